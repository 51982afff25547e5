"""datasets.load_metric and evaluate.load without a network: what scripts hand them, read from them, and are told."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import evaluate
import evaluate.config
import numpy
import pytest
import sklearn  # noqa: F401  sets two environment variables when it is first imported, here and not in a test
import torch
from inline_snapshot import snapshot

from hf_mps.layer.compat import metrics
from hf_mps.metrics import as_evaluate, table
from tests.layer.compat.arming import arm


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """evaluate keeps the rows of a metric in a file of its cache."""
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path / "metrics")


def computed(name: str, predictions: Any, references: Any, config: str | None = None, **keywords: Any) -> Any:
    return datasets.load_metric(name, config).compute(predictions=predictions, references=references, **keywords)


def test_rows_are_added_one_by_one_in_batches_or_handed_over_whole(said) -> None:
    metric = datasets.load_metric("accuracy", script_version="master")
    metric.add(prediction=1, reference=1)
    metric.add_batch(predictions=torch.tensor([1, 0]), references=numpy.array([1, 1]))
    assert metric.compute() == {"accuracy": pytest.approx(2 / 3)}
    assert metric.compute(predictions=[1], references=[1]) == {"accuracy": 1.0}
    assert metric.name == "accuracy"
    assert said() == snapshot(["datasets.load_metric: accuracy is computed here, with evaluate's interface"])


def test_the_arguments_of_old_scripts_are_taken(tmp_path: Path) -> None:
    places = {"cache_dir": str(tmp_path / "own"), "experiment_id": "mine", "num_process": 1, "process_id": 0}
    metric = datasets.load_metric("glue", "mrpc", keep_in_memory=False, revision="1.18.0", **places)
    metric.add_batch(predictions=[1], references=[1])
    assert [path.name for path in (tmp_path / "own").rglob("*.arrow")] == ["mine-1-0.arrow"]
    assert metric.compute() == {"accuracy": 1.0, "f1": 1.0}
    second = datasets.load_metric("accuracy", None, 1, 2)
    assert (second.process_id, second.num_process) == (1, 2)
    in_memory = datasets.load_metric("accuracy", keep_in_memory=True)
    assert in_memory.compute(predictions=[1, 0], references=[1, 1]) == {"accuracy": 0.5}
    with pytest.raises(TypeError, match="unexpected keyword argument 'normalise'"):
        computed("accuracy", [1], [1], normalise=True)


def test_glue_without_its_task_and_xnli() -> None:
    with pytest.raises(KeyError, match="glue needs a configuration: one of sst2, mnli, mnli_mismatched,"):
        datasets.load_metric("glue")
    assert computed("xnli", [0, 1, 2], [0, 1, 1]) == {"accuracy": pytest.approx(2 / 3)}


def test_rouge_gives_what_old_scripts_and_new_ones_read() -> None:
    predictions, references = ["the cats sat", "a dog"], ["the cat sat", "the moon"]
    found = computed("rouge", predictions, references, use_stemmer=True)
    assert list(found) == ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    # run_summarization until 4.22, and since: https://github.com/huggingface/transformers/pull/18371
    old = {name: value.mid.fmeasure * 100 for name, value in found.items()}
    new = {name: round(value * 100, 4) for name, value in found.items()}
    assert old == pytest.approx(dict.fromkeys(found, 50.0), abs=1e-9)
    assert new == dict.fromkeys(found, 50.0)
    middle = found["rouge1"]
    assert isinstance(middle, float)
    assert middle.low.precision <= middle.mid.recall <= middle.high.fmeasure
    assert pickle.loads(pickle.dumps(middle)).mid.recall == middle.mid.recall
    assert json.loads(json.dumps(found)) == {name: float(value) for name, value in found.items()}


def test_rouge_draws_nothing_from_anybodys_random_numbers() -> None:
    numpy.random.seed(3)
    torch.manual_seed(3)
    expected = numpy.random.random(), torch.rand(1)
    numpy.random.seed(3)
    torch.manual_seed(3)
    first = computed("rouge", ["a b", "c"], ["a", "c d"])
    assert (numpy.random.random(), torch.rand(1)) == expected
    numpy.random.seed(3)
    assert computed("rouge", ["a b", "c"], ["a", "c d"]) == first


def test_a_metric_of_the_hub_alone_says_what_there_is(said) -> None:
    with pytest.raises(FileNotFoundError) as refused:
        datasets.load_metric("bertscore")
    assert "bertscore is a metric of the hub, and evaluate.load did not get it" in str(refused.value)
    assert str(refused.value).endswith("without a network there are " + ", ".join(as_evaluate.names()))
    assert said() == snapshot(["datasets.load_metric: evaluate.load takes its place for bertscore"])


def test_a_metrics_own_file_goes_to_evaluate_with_all_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(evaluate, "load", lambda *names, **keywords: given.update(keywords, names=names))
    datasets.load_metric("./metrics/accuracy", "mine", cache_dir="x", script_version="master", revision="main", own=1)
    assert given.pop("names") == ("./metrics/accuracy", "mine")
    assert given == {"cache_dir": "x", "revision": "main", "own": 1}


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"^wer needs jiwer, which is missing: pip install jiwer$"):
        datasets.load_metric("wer")


def test_evaluate_load_finds_the_same_metrics_where_the_hub_cannot_be_reached(said) -> None:
    metric = evaluate.load("glue", "mrpc", experiment_id="x")
    assert metric.compute(predictions=[1, 1], references=[1, 0]) == pytest.approx({"accuracy": 0.5, "f1": 2 / 3})
    assert said() == snapshot(["evaluate.load: glue is neither cached nor to be had from the hub; it is computed here"])
    for path, kind in (("accuracy", "comparison"), ("./accuracy", None)):
        with pytest.raises(FileNotFoundError, match="Couldn't find a module script"):
            evaluate.load(path, module_type=kind)
    assert said() == []


def test_what_evaluate_itself_finds_is_evaluates(said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate.loading, "evaluation_module_factory", lambda *_, **__: pytest.fail("stock was asked"))
    with pytest.raises(pytest.fail.Exception, match="stock was asked"):
        evaluate.load("accuracy")
    assert said() == []


def test_a_script_s_own_modules_of_those_names_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "evaluate.loading")
    for name, own in (("datasets", {"Cats": list}), ("evaluate", {}), ("evaluate", {"load": list})):
        module = ModuleType(name)
        vars(module).update(own)
        before = dict(vars(module))
        arm(metrics, module)
        assert vars(module) == before


def test_evaluates_combined_metrics_are_found_too() -> None:
    both = evaluate.combine(["accuracy", "f1"])
    assert both.compute(predictions=[1, 1, 1], references=[1, 0, 1]) == pytest.approx({"accuracy": 2 / 3, "f1": 0.8})


def test_every_metric_of_the_table_can_be_loaded_and_describes_itself() -> None:
    for name in as_evaluate.names():
        metric = datasets.load_metric(name, "sst2" if name == "glue" else None)
        assert (metric.name, metric.module_type) == (name, "metric")
        assert metric.description
