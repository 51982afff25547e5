"""A run's files: results.json to be read by programs, training.png by people, README.md by both."""

from __future__ import annotations

import ast
import errno
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import transformers.modeling_utils  # first of all: importing it sets a variable, which no test may do
import yaml
from huggingface_hub import ModelCard
from matplotlib import image

from hf_mps.choice import Choice
from hf_mps.finetune import report
from hf_mps.finetune.metrics import Baseline
from hf_mps.finetune.report import Expectation, RunRecord
from hf_mps.finetune.report.plot import column, draw, smoothed


def history(steps: int = 60) -> list[dict[str, Any]]:
    """What Trainer and StepLines leave of three epochs with an evaluation at the end of each."""
    entries: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        entries.append(
            {
                "loss": 0.7 - 0.3 * step / steps + 0.05 * math.sin(step),
                "grad_norm": 2.0 + math.cos(step),
                "learning_rate": 2e-5 * (1 - step / steps),
                "samples_per_second": 40.0,
                "memory_bytes": 2**30,
                "peak_memory_bytes": 2**31,
                "epoch": 3 * step / steps,
                "step": step,
            }
        )
        if step % (steps // 3) == 0:
            score = 0.8 + 0.03 * step / steps
            entries.append(
                {"eval_loss": 0.5, "eval_f1": score, "eval_accuracy": score - 0.1, "eval_runtime": 3.0, "step": step}
            )
    return [*entries, {"train_runtime": 9.0, "train_loss": 0.5, "step": steps}]


def a_record(**changes: Any) -> RunRecord:
    given: dict[str, Any] = {
        "name": "glue/mrpc",
        "recipe": {"model": "google-bert/bert-base-cased", "training": {"learning_rate": 2e-5, "seed": 42}},
        "device": Choice("mps", "Metal answered the probe"),
        "choices": {"precision": Choice("float32", "bf16 | fp16 are emulated"), "batch": Choice(32, "the recipe's")},
        "metrics": {"f1": 0.8821, "accuracy": 0.8431, "loss": 0.41},
        "main_metric": "f1",
        "log_history": history(),
        "train_seconds": 192.3,
        "samples_per_second": 57.24,
        "baseline": Baseline(
            "always answers 1, the label of 67.4% of the training rows", {"f1": 0.81, "accuracy": 0.68}
        ),
        "peak_memory": 2_085_000_000,
        "expectation": Expectation("f1", 0.85, None, True),
        "model": "google-bert/bert-base-cased",
        "dataset": "nyu-mll/glue",
        "dataset_config": "mrpc",
        "language": "en",
    }
    return RunRecord(**(given | changes))


def results(folder: Path) -> dict[str, Any]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    content: dict[str, Any] = json.loads((folder / "results.json").read_text("utf-8"), parse_constant=refuse)
    return content


def picture(png: bytes) -> Any:
    """The pixels as floats in [0, 1], of shape (height, width, 4)."""
    assert png.startswith(b"\x89PNG\r\n")
    return image.imread(io.BytesIO(png), format="png")


def panel_titles(monkeypatch: pytest.MonkeyPatch, record: RunRecord) -> list[str]:
    from matplotlib.axes import Axes

    titles: list[str] = []
    set_title = Axes.set_title
    monkeypatch.setattr(
        Axes, "set_title", lambda self, words, **k: (titles.append(words), set_title(self, words, **k))[1]
    )
    draw(record)
    return titles


def test_a_run_leaves_three_files_and_nothing_else(tmp_path: Path) -> None:
    written = report.write(tmp_path / "out", a_record())
    assert written == [tmp_path / "out" / name for name in ("results.json", "training.png", "README.md")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "results.json", "training.png"]


def test_an_earlier_runs_files_are_replaced(tmp_path: Path) -> None:
    report.write(tmp_path, a_record(name="first"))
    report.write(tmp_path, a_record(name="second"))
    assert results(tmp_path)["name"] == "second"
    assert "# second\n" in (tmp_path / "README.md").read_text()


def test_a_full_disk_surfaces_and_keeps_the_earlier_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.write(tmp_path, a_record(name="first"))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        report.write(tmp_path, a_record(name="second"))
    assert results(tmp_path)["name"] == "first"
    assert len(list(tmp_path.iterdir())) == 3


# results.json


def test_results_json_has_its_schema_and_every_number_of_the_run(tmp_path: Path) -> None:
    record = a_record(fallback=[{"operator": "aten::_ctc_loss", "calls": 3}], guards=["checkpoint-rng"])
    report.write(tmp_path, record)
    content = results(tmp_path)
    assert content.pop("versions").keys() == {
        "hf_mps", "torch", "transformers", "accelerate", "datasets", "python", "platform",
    }  # fmt: skip
    assert content.pop("log_history") == history()
    assert content == {
        "schema": 1,
        "name": "glue/mrpc",
        "recipe": {"model": "google-bert/bert-base-cased", "training": {"learning_rate": 2e-5, "seed": 42}},
        "device": {"value": "mps", "reason": "Metal answered the probe"},
        "choices": {
            "precision": {"value": "float32", "reason": "bf16 | fp16 are emulated"},
            "batch": {"value": 32, "reason": "the recipe's"},
        },
        "metrics": {"f1": 0.8821, "accuracy": 0.8431, "loss": 0.41},
        "main_metric": "f1",
        "greater_is_better": True,
        "split": "validation",
        "baseline": {
            "what": "always answers 1, the label of 67.4% of the training rows",
            "metrics": {"f1": 0.81, "accuracy": 0.68},
        },
        "expectation": {"metric": "f1", "low": 0.85, "high": None, "met": True},
        "train_seconds": 192.3,
        "samples_per_second": 57.24,
        "peak_memory_bytes": 2_085_000_000,
        "fallback": [{"operator": "aten::_ctc_loss", "calls": 3}],
        "unexpected_fallback": [],
        "predictions": None,
        "pictures": [],
        "guards": ["checkpoint-rng"],
        "sentinels": [],
    }


def test_every_key_of_results_json_is_documented() -> None:
    documented = re.findall(r"`(\w+)`", report.results.__doc__ or "")
    assert set(report.results(a_record())) <= set(documented)


def test_a_diverged_run_is_strict_json_with_nulls(tmp_path: Path) -> None:
    diverged = a_record(
        metrics={"f1": float("nan")}, log_history=[{"loss": float("nan"), "grad_norm": float("inf"), "step": 1}]
    )
    report.write(tmp_path, diverged)
    assert results(tmp_path)["metrics"] == {"f1": None}
    assert results(tmp_path)["log_history"] == [{"loss": None, "grad_norm": None, "step": 1}]


def test_no_path_of_the_machine_but_the_users_own_stands_in_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "minilm"
    folder.mkdir(parents=True)
    report.write(tmp_path / "out", a_record(model=str(folder), recipe={"model": "../minilm"}))
    for name in ("results.json", "README.md"):
        text = (tmp_path / "out" / name).read_text()
        assert str(tmp_path) not in text
        assert str(Path.home()) + "/" not in text


def test_versions_are_those_installed() -> None:
    import platform

    import torch

    import hf_mps

    found = report.versions()
    assert found["torch"] == torch.__version__
    assert found["transformers"] == transformers.__version__
    assert found["hf_mps"] == hf_mps.__version__
    assert found["python"] == platform.python_version()


# README.md


def card(**changes: Any) -> ModelCard:
    from hf_mps.finetune.report.card import card as text

    return ModelCard(text(a_record(**changes)))


def test_the_front_matter_is_what_the_hub_reads() -> None:
    data = card().data
    assert data.library_name == "transformers"
    assert data.base_model == "google-bert/bert-base-cased"
    assert data.datasets == ["nyu-mll/glue"]
    assert data.metrics == ["accuracy", "f1"]
    assert data.pipeline_tag == "text-classification"
    assert data.language == "en"
    assert data.model_name == "glue/mrpc"
    assert data.eval_results is not None
    assert [
        (result.metric_type, result.metric_value, result.dataset_type, result.dataset_config, result.dataset_split)
        for result in data.eval_results
    ] == [
        ("f1", 0.8821, "nyu-mll/glue", "mrpc", "validation"),
        ("accuracy", 0.8431, "nyu-mll/glue", "mrpc", "validation"),
    ]


def test_a_folder_as_model_and_data_of_ones_own_stay_out_of_the_front_matter(tmp_path: Path) -> None:
    made = card(
        model=str(tmp_path / "minilm"), dataset=None, dataset_config=None, dataset_name="my pairs", language=None
    )
    assert made.data.base_model is None
    assert made.data.datasets is None
    assert made.data.language is None
    assert made.data.eval_results is not None
    assert made.data.eval_results[0].dataset_name == "my pairs"
    assert "Fine-tuned from `minilm` on my pairs, by hf_mps" in made.text


def test_a_folder_that_is_named_like_a_hub_id_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert card(model="models/mine").data.base_model is None
    assert card(model="models/other").data.base_model == "models/other"


def test_averages_and_numbers_that_are_not_finite_reach_the_hub_rightly() -> None:
    data = card(metrics={"f1_macro": 0.5, "pearsonr": float("nan"), "loss": 1.0}, main_metric="f1_macro").data
    assert data.eval_results is not None
    assert [(result.metric_type, result.metric_name) for result in data.eval_results] == [("f1", "f1_macro")]


def test_a_run_without_any_metric_still_has_a_card() -> None:
    assert card(metrics={"loss": 1.0}, main_metric="loss", baseline=None).data.eval_results is None


def test_the_card_tells_results_choices_recipe_and_versions_in_words() -> None:
    text = card().text
    for line in (
        "# glue/mrpc",
        "Fine-tuned from [google-bert/bert-base-cased](https://huggingface.co/google-bert/bert-base-cased) on"
        " nyu-mll/glue mrpc, by hf_mps on the device `mps` (Metal answered the probe)."
        " Training took 3 min 12 s (57.2 samples/s, 1.94 GiB of memory at peak).",
        "| metric (validation) | this model | baseline |",
        "| **f1** | 0.8821 | 0.8100 |",
        "| loss | 0.4100 |  |",
        "The baseline always answers 1, the label of 67.4% of the training rows.",
        "Expected by the recipe: f1 at least 0.85: met.",
        "| device | `mps` | Metal answered the probe |",
        r"| precision | `float32` | bf16 \| fp16 are emulated |",
        "| batch | `32` | the recipe's |",
        "![Loss, f1 and learning rate over the training steps](training.png)",
    ):
        assert line in text.splitlines(), line


def fenced(text: str, language: str) -> str:
    found = re.search(rf"^(`{{3,}}){language}\n(.*?)\n\1$", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found.group(2)


def test_the_snippet_is_three_lines_that_load_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minilm: Path
) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    AutoTokenizer.from_pretrained(minilm).save_pretrained(tmp_path)
    small = AutoConfig.from_pretrained(minilm, num_hidden_layers=1)
    AutoModelForSequenceClassification.from_config(small).save_pretrained(tmp_path)
    snippet = fenced(card().text, "python")
    assert len(snippet.splitlines()) == 3
    ast.parse(snippet)
    monkeypatch.chdir(tmp_path)
    loaded: dict[str, Any] = {}
    exec(snippet, loaded)
    assert loaded["model"].config.num_hidden_layers == 1
    assert loaded["tokenizer"]("hello")["input_ids"]


def test_the_recipe_on_the_card_is_yaml_that_reads_back() -> None:
    recipe = {
        "model": "größe",
        "note": "a fence: ```",
        "training": {"learning_rate": 2e-5},
        "data": {"files": ["a.csv"]},
    }
    assert yaml.safe_load(fenced(card(recipe=recipe).text, "yaml")) == recipe


def test_what_a_user_names_cannot_break_the_cards_tables() -> None:
    text = card(choices={"a|b": Choice("x`y", "two\nlines | <script>")}).text
    assert r"| a\|b | `x'y` | two lines \| &lt;script> |" in text.splitlines()


def test_fallback_and_guards_are_listed_where_there_are_any() -> None:
    text = card(
        fallback=[{"operator": "aten::_ctc_loss", "calls": 3, "seconds": 0.5}], guards=[{"name": "resume-rng"}]
    ).text
    assert "| operator | calls | seconds |" in text
    assert "| aten::_ctc_loss | 3 | 0.5 |" in text
    assert "- name resume-rng" in text
    assert "## Guards" not in card().text
    assert "## Operators" not in card().text


# training.png


def test_the_picture_is_a_page_of_ink_in_colours_told_apart_by_all() -> None:
    page = picture(draw(a_record()))
    assert page.shape == (1050, 1650, 4)
    colours = (page[..., :3] * 255).round().astype(int).reshape(-1, 3)
    assert 0.01 < (colours < 250).any(axis=1).mean() < 0.5

    def inked(colour: str) -> int:
        wanted = numpy.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
        return int((abs(colours - wanted).max(axis=1) <= 2).sum())

    for name, colour in {"loss": "#0072B2", "evaluation": "#E69F00", "metric": "#009E73", "rate": "#CC79A7"}.items():
        assert inked(colour) > 200, name


def test_nothing_is_cut_off_at_the_pages_edge() -> None:
    page = picture(draw(a_record()))[..., :3]
    edges = (page[:4], page[-4:], page[:, :4], page[:, -4:])
    assert all((edge > 0.99).all() for edge in edges)


def test_each_thing_that_was_logged_has_its_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert panel_titles(monkeypatch, a_record()) == [
        "Loss", "Evaluation (validation)", "Learning rate", "Gradient norm", "Throughput", "Memory",
    ]  # fmt: skip


def test_a_run_that_logged_less_has_fewer_panels_and_a_lower_page(monkeypatch: pytest.MonkeyPatch) -> None:
    little = a_record(log_history=[{"loss": 0.5, "learning_rate": 1e-3, "step": 1}])
    assert panel_titles(monkeypatch, little) == ["Loss", "Evaluation (validation)", "Learning rate"]
    assert picture(draw(a_record(log_history=[]))).shape == (735, 1650, 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"log_history": [{"loss": float("nan"), "step": step, "learning_rate": 0.0} for step in range(1, 30)]},
        {"log_history": [{"eval_mse": 3.0 - step, "step": step} for step in (1, 2)], "main_metric": "mse"},
        {"name": "a $x$ of 名", "model": "/a/$b$", "dataset_name": "$", "split": "$dev$", "metrics": {}},
        {"metrics": {"f1": float("nan")}, "log_history": [{"eval_f1": float("nan"), "step": 3}]},
        {"baseline": Baseline("x", {"f1": float("nan")}), "peak_memory": None},
    ],
    ids=["all NaN", "an error to lower", "dollars and other letters", "NaN score", "NaN baseline"],
)
def test_odd_runs_are_drawn_too(changes: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    page = picture(draw(a_record(**changes)))
    assert (page[..., :3] < 0.9).any()
    assert not recwarn.list


def test_the_same_run_draws_the_same_bytes() -> None:
    assert draw(a_record()) == draw(a_record())


def test_drawing_leaves_the_users_matplotlib_as_it_was() -> None:
    import matplotlib
    from matplotlib import pyplot

    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30}):
        before = dict(matplotlib.rcParams)
        page = picture(draw(a_record()))
        assert dict(matplotlib.rcParams) == before
    assert not ((page[..., 0] > 0.9) & (page[..., 1] < 0.1)).any()
    assert pyplot.get_fignums() == []


def test_smoothing_starts_without_a_pull_and_follows_its_formula() -> None:
    values = [3.0, 1.0, 2.0, float("nan"), 5.0]
    weights = [0.5 ** (2 - i) for i in range(3)]
    expected = sum(w * x for w, x in zip(weights, values, strict=False)) / sum(weights)
    found = smoothed(values, 0.5)
    assert found[0] == 3.0
    assert found[2] == found[3] == pytest.approx(expected)
    assert smoothed([2.0] * 50, 0.9) == pytest.approx([2.0] * 50)


def test_a_step_that_was_logged_twice_after_a_resume_counts_once() -> None:
    entries = [{"loss": 1.0, "step": 1}, {"loss": 2.0, "step": 2}, {"loss": 3.0, "step": 2}, {"loss": None, "step": 3}]
    assert column(entries, "loss") == ([1.0, 2.0], [1.0, 3.0])


def test_reading_the_record_needs_no_torch_and_no_matplotlib(run_python: Callable[..., Any]) -> None:
    program = (
        "import sys; from hf_mps.finetune import report; report.versions()\n"
        "print([name for name in ('torch', 'matplotlib', 'huggingface_hub', 'yaml') if name in sys.modules])"
    )
    done = run_python("-c", program, env={"HF_MPS": "0"})
    assert done.stdout == "[]\n", done.stderr
