"""Metrics by evaluate's names, equal to scikit-learn and scipy, without a network and without evaluate's caches."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evaluate  # noqa: F401  first of all: importing torch sets a variable, which no test may do
import numpy
import pytest
import torch
from inline_snapshot import snapshot
from scipy import stats
from sklearn import metrics as sk
from transformers.trainer_utils import speed_metrics

from hf_mps import metrics
from hf_mps.metrics.selection import is_metric, of_log
from hf_mps.metrics.table import computed

Oracle = Callable[[Any, Any], float]  # (references, predictions), scikit-learn's order


def labels(count: int, kinds: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(kinds), k=count)


LABELS: dict[str, Oracle] = {
    "accuracy": sk.accuracy_score,
    "f1": sk.f1_score,
    "precision": sk.precision_score,
    "recall": sk.recall_score,
    "matthews_correlation": sk.matthews_corrcoef,
}
VALUES: dict[str, Oracle] = {
    "pearsonr": lambda r, p: stats.pearsonr(p, r)[0],
    "spearmanr": lambda r, p: stats.spearmanr(p, r)[0],
    "mse": sk.mean_squared_error,
    "rmse": sk.root_mean_squared_error,
    "mae": sk.mean_absolute_error,
}


@pytest.mark.parametrize("name", LABELS)
@pytest.mark.parametrize("seed", range(3))
def test_two_label_metrics_equal_scikit_learns(name: str, seed: int) -> None:
    predictions, references = labels(211, 2, seed), labels(211, 2, seed + 100)
    assert metrics.load([name]).compute(predictions, references) == {name: LABELS[name](references, predictions)}


@pytest.mark.parametrize("name", ["f1", "precision", "recall"])
@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_averages_over_many_labels_equal_scikit_learns(name: str, average: str) -> None:
    predictions, references = labels(300, 5, 1), labels(300, 4, 2)
    expected = getattr(sk, f"{name}_score")(references, predictions, average=average, zero_division=0)
    assert metrics.load([f"{name}/{average}"]).compute(predictions, references) == {f"{name}_{average}": expected}


@pytest.mark.parametrize("name", VALUES)
def test_metrics_of_values_equal_scipys_and_scikit_learns_with_ties(name: str) -> None:
    draw = random.Random(3)
    references = [round(draw.uniform(0, 5) * 2) / 2 for _ in range(200)]
    predictions = [value + draw.gauss(0, 1) for value in references]
    assert metrics.load([name]).compute(predictions, references) == {name: VALUES[name](references, predictions)}


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("mrpc", ["f1", "accuracy"]),
        ("qqp", ["f1", "accuracy"]),
        ("cola", ["matthews_correlation"]),
        ("stsb", ["pearsonr", "spearmanr"]),
        *((task, ["accuracy"]) for task in ("sst2", "mnli", "mnli_matched", "mnli_mismatched", "qnli", "rte", "wnli")),
    ],
)
def test_a_glue_task_reports_what_the_benchmark_reports_and_the_first_judges(task: str, names: list[str]) -> None:
    loaded = metrics.load([f"glue/{task}"])
    predictions, references = labels(100, 2, 5), labels(100, 2, 6)
    values = loaded.compute(predictions, references)
    oracles = LABELS | VALUES
    assert values == {name: pytest.approx(oracles[name](references, predictions), abs=1e-15) for name in names}
    assert list(values) == names
    assert loaded.main == names[0]
    assert loaded.greater_is_better


def test_several_metrics_are_computed_together_and_the_first_name_judges() -> None:
    loaded = metrics.load(["accuracy", "f1", "matthews_correlation", "accuracy"])
    assert loaded.names == ("accuracy", "f1", "matthews_correlation")
    assert loaded.main == "accuracy"
    assert metrics.load(["mse"]).greater_is_better is False
    values = loaded.compute([1, 0, 1, 1], [1, 0, 0, 1])
    assert values == {
        "accuracy": 0.75,
        "f1": 0.8,
        "matthews_correlation": sk.matthews_corrcoef([1, 0, 0, 1], [1, 0, 1, 1]),
    }
    assert all(type(value) is float for value in values.values())


@pytest.mark.parametrize("kind", ["list", "numpy", "float32", "column", "torch"])
def test_predictions_may_be_lists_arrays_columns_or_tensors(kind: str) -> None:
    predictions, references = [0.5, 1.0, 2.0, 4.0], [1.0, 2.0, 3.0, 3.5]
    made: Any = {
        "list": lambda values: values,
        "numpy": numpy.array,
        "float32": lambda values: numpy.array(values, dtype=numpy.float32),
        "column": lambda values: numpy.array(values)[:, None],
        "torch": torch.tensor,
    }[kind]
    loaded = metrics.load(["glue/stsb", "mse"])
    assert loaded.compute(made(predictions), made(references)) == loaded.compute(predictions, references)


@pytest.mark.parametrize(
    ("name", "predictions", "references", "expected"),
    [
        ("f1", [0, 0, 0], [0, 1, 1], 0.0),
        ("f1", [0, 0], [0, 0], 0.0),
        ("precision", [0, 0, 0], [1, 0, 1], 0.0),
        ("recall", [1, 1, 1], [0, 0, 0], 0.0),
        ("f1/macro", [2, 2, 2], [0, 1, 2], 1 / 6),
        ("matthews_correlation", [1, 1, 1], [0, 1, 1], 0.0),
        ("matthews_correlation", [1, 1, 1], [1, 1, 1], 0.0),
        ("accuracy", [1], [1], 1.0),
        ("pearsonr", [2.0, 2.0, 2.0], [1.0, 2.0, 3.0], 0.0),
        ("pearsonr", [1.0, 2.0, 3.0], [4.0, 4.0, 4.0], 0.0),
        ("pearsonr", [1.0], [2.0], 0.0),
        ("pearsonr", [1.0, 1.0 + 1e-14, 1.0], [1.0, 3.0, 1.0], 1.0),
        ("spearmanr", [2.0, 2.0], [1.0, 2.0], 0.0),
        ("pearsonr", [math.nan, 1.0, 2.0], [1.0, 2.0, 3.0], math.nan),
        ("spearmanr", [math.inf, 1.0, 2.0], [1.0, 2.0, 3.0], math.nan),
        ("mse", [math.nan, 1.0], [1.0, 1.0], math.nan),
        ("bleu", ["a b c d"], ["a b c x"], 0.0),
    ],
)
def test_degenerate_answers_have_a_number_and_no_warning(
    name: str, predictions: list[Any], references: list[Any], expected: float
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (value,) = metrics.load([name]).compute(predictions, references).values()
    assert value == pytest.approx(expected, nan_ok=True, abs=1e-2 if "1e-14" in str(predictions) else 1e-12)


def test_logits_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"one number a row, not an array of shape \(2, 2\)"):
        metrics.load(["accuracy"]).compute([[0.1, 0.9], [0.8, 0.2]], [1, 0])


def test_the_baseline_is_the_training_rows_majority_label_and_says_so() -> None:
    baseline = metrics.load(["glue/mrpc"]).baseline([1, 0, 1, 1], train=[1, 0, 1])
    assert baseline.metrics == {"f1": pytest.approx(6 / 7), "accuracy": 0.75}
    assert baseline.what == snapshot("always answers 1, the label of 66.7% of the training rows")


def test_the_baseline_of_values_is_their_mean() -> None:
    baseline = metrics.load(["mse", "pearsonr"]).baseline([1.0, 3.0], train=[1.0, 2.0, 3.0], regression=True)
    assert baseline.metrics == {"mse": 1.0, "pearsonr": 0.0}
    assert baseline.what == snapshot("always answers 2, the mean of the training rows")


def test_a_recipe_may_name_every_metric_of_the_table_and_those_that_a_task_computes_itself() -> None:
    # These are taken from sums over pixels, tokens and pairs, from boxes, from the words of texts, from queries with
    # their documents, and from what a model generates itself.
    sums = {"map", "mean_iou", "perplexity", "rewards/accuracies", "rewards/margins", "active_dims", "rerank"}
    generated = {"reward", "kl", "completions/mean_length", "completions/clipped_ratio"}
    assert set(metrics.available()) - set(computed()) == sums | generated


NO_NETWORK = """
import socket, sys
def refuse(*arguments, **keywords):
    raise AssertionError(f"the network was asked: {arguments}")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
"""


# What each metric that does not compare one number a row is tried with: predictions, references, and what they score.
EXAMPLES: dict[str, tuple[list[Any], list[Any], dict[str, float]]] = {
    "squad": (
        [{"id": "a", "prediction_text": "The cat."}, {"id": "b", "prediction_text": "a dog"}],
        [
            {"id": "a", "answers": {"text": ["cat"], "answer_start": [0]}},
            {"id": "b", "answers": {"text": ["old dog", "bird"], "answer_start": [0, 4]}},
        ],
        {"exact_match": 50.0, "f1": 100 * (1 + 2 / 3) / 2},
    ),
    "squad_v2": (
        [{"id": "a", "prediction_text": ""}, {"id": "b", "prediction_text": "dog"}],
        [
            {"id": "a", "answers": {"text": [], "answer_start": []}},
            {"id": "b", "answers": {"text": ["cat"], "answer_start": [0]}},
        ],
        {"exact": 50.0, "f1": 50.0, "HasAns_exact": 0.0, "HasAns_f1": 0.0, "NoAns_exact": 100.0, "NoAns_f1": 100.0},
    ),
    "seqeval": (
        [["O", "O"]],
        [["O", "O"]],
        {"overall_precision": 0.0, "overall_recall": 0.0, "overall_f1": 0.0, "overall_accuracy": 1.0},
    ),
    "rouge": (["the cat sat"], ["the cats sat"], {"rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0, "rougeLsum": 1.0}),
    "sacrebleu": (["the cat sat on it"], ["the cat sat on it"], {"sacrebleu": 100.0}),
    "bleu": (["the cat sat on it"], ["the cat sat on it"], {"bleu": 1.0}),
    "chrf": (["the cat sat on it"], ["the cat sat on it"], {"chrf": 100.0}),
    "wer": (["the cat sat"], ["the cat sat down"], {"wer": 0.25}),
    "cer": (["cat"], ["cats"], {"cer": 0.25}),
    "sts": ([0.1, 0.2, 0.4], [1.0, 2.0, 4.0], {"spearman_cosine": 1.0, "pearson_cosine": 1.0}),
    "retrieval": ([1, 2, 11], [1, 1, 1], {"cosine_accuracy@1": 1 / 3, "cosine_mrr@10": 0.5}),
    "sparse_retrieval": ([1, 2, 11], [1, 1, 1], {"dot_accuracy@1": 1 / 3, "dot_mrr@10": 0.5}),
    "average_precision": ([0.9, 0.8, 0.1], [1, 0, 1], {"average_precision": (1 + 2 / 3) / 2}),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_metrics_of_texts_names_and_ranks_have_their_known_figures(name: str) -> None:
    predictions, references, expected = EXAMPLES[name]
    assert metrics.load([name]).compute(predictions, references) == pytest.approx(expected)


def test_loading_needs_no_network_and_no_writable_home(run_python: Callable[..., Any], tmp_path: Path) -> None:
    nowhere = tmp_path / "a file, in which no folder can be made"
    nowhere.write_text("")
    program = (
        NO_NETWORK
        + """
import json
from hf_mps import metrics
from hf_mps.metrics.table import computed
examples = json.loads(sys.argv[1])
for name in computed():
    metrics.load([name]).compute(*examples.get(name, ([0, 1, 1, 0], [0, 1, 0, 0])))
print(metrics.load(["glue/mrpc"]).compute([0, 1, 1], [0, 1, 0]))
"""
    )
    home = {"HOME": str(nowhere / "home"), "HF_HOME": str(nowhere / "hf"), "HF_HUB_OFFLINE": None, "HF_MPS": "0"}
    given = json.dumps({name: values[:2] for name, values in EXAMPLES.items()})
    done = run_python("-c", program, given, env=home)
    assert done.returncode == 0, done.stderr
    assert done.stdout == snapshot("{'f1': 0.6666666666666666, 'accuracy': 0.6666666666666666}\n")
    assert done.stderr == ""


def test_importing_metrics_and_listing_them_imports_nothing_heavy(run_python: Callable[..., Any]) -> None:
    program = (
        "import sys; from hf_mps import metrics; metrics.available()\n"
        "print([name for name in ('torch', 'numpy', 'evaluate', 'sklearn', 'scipy') if name in sys.modules])"
    )
    done = run_python("-c", program, env={"HF_MPS": "0"})
    assert done.stdout == "[]\n", done.stderr


def test_one_place_knows_which_entries_of_a_log_are_metrics() -> None:
    """Everything that the installed Trainer adds to an evaluation by itself is no metric."""
    timings = speed_metrics("eval_mm", start_time=0.0, num_samples=3, num_steps=2)
    timings |= {"eval_model_preparation_time": 1.0, "eval_jit_compilation_time": 2.0}
    logs = {"eval_loss": 0.7, "eval_mm_accuracy": 0.5, "step": 3, "epoch": 1.0, **timings}
    assert of_log(logs) == {"loss": 0.7, "mm_accuracy": 0.5}
    assert [name for name in (*timings, "test_runtime", "step", "epoch") if is_metric(name)] == []
    assert is_metric("test_accuracy")
