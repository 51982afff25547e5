"""A run's model card: front matter as the hub reads it, and everything that was decided, in words."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from hf_mps.core.choice import Choice
from hf_mps.finetune.report.results import card
from hf_mps.metal.kernels.coverage import Coverage
from tests.finetune.records import a_record


def model_card(**changes: Any) -> ModelCard:
    return ModelCard(card(a_record(**changes)))


def test_the_front_matter_is_what_the_hub_reads() -> None:
    data = model_card().data
    assert data.library_name == "transformers"
    assert data.base_model == "google-bert/bert-base-cased"
    assert data.datasets == ["nyu-mll/glue"]
    assert data.metrics == ["accuracy", "f1"]
    assert data.pipeline_tag == "text-classification"
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
    made = model_card(model=str(tmp_path / "minilm"), dataset=None, dataset_config=None, dataset_name="my pairs")
    assert made.data.base_model is None
    assert made.data.datasets is None
    assert made.data.eval_results[0].dataset_name == "my pairs"
    assert "Fine-tuned from `minilm` on my pairs, by hf_mps" in made.text


def test_a_folder_that_is_named_like_a_hub_id_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_card(model="models/mine").data.base_model is None
    assert model_card(model="models/other").data.base_model == "models/other"


def test_averages_and_numbers_that_are_not_finite_reach_the_hub_rightly() -> None:
    data = model_card(metrics={"f1_macro": 0.5, "pearsonr": float("nan"), "loss": 1.0}, main_metric="f1_macro").data
    assert data.eval_results is not None
    assert [(result.metric_type, result.metric_name) for result in data.eval_results] == [("f1", "f1_macro")]


def test_a_run_without_any_metric_still_has_a_card() -> None:
    assert model_card(metrics={"loss": 1.0}, main_metric="loss", baseline=None).data.eval_results is None


def test_the_card_tells_results_choices_recipe_and_versions_in_words() -> None:
    text = model_card().text
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
    return found.group(2)


def test_the_snippet_is_three_lines_that_load_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minilm: Path
) -> None:
    AutoTokenizer.from_pretrained(minilm).save_pretrained(tmp_path)
    small = AutoConfig.from_pretrained(minilm, num_hidden_layers=1)
    AutoModelForSequenceClassification.from_config(small).save_pretrained(tmp_path)
    snippet = fenced(model_card().text, "python")
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
    assert yaml.safe_load(fenced(model_card(recipe=recipe).text, "yaml")) == recipe


def test_what_a_user_names_cannot_break_the_cards_tables() -> None:
    text = model_card(choices={"a|b": Choice("x`y", "two\nlines | <script>")}).text
    assert r"| a\|b | `x'y` | two lines \| &lt;script> |" in text.splitlines()


def test_fallback_and_guards_are_listed_where_there_are_any() -> None:
    text = model_card(
        fallback=[{"operator": "aten::_ctc_loss", "calls": 3, "seconds": 0.5}],
        guards=[
            {"name": "resume-rng", "times": 2, "lines": ["saved | it", "read it"], "issue": "transformers/trainer.py"},
            {"name": "pin-memory", "times": 1, "lines": ["off"], "issue": "https://github.com/pytorch"},
        ],
        sentinels=[{"name": "loss-frozen", "times": 1, "lines": ["the loss stays the same"]}],
    ).text
    for lines in (
        "| operator | calls | seconds |\n| --- | --- | --- |\n| aten::_ctc_loss | 3 | 0.5 |\n",
        "## Guards that acted\n\n| guard | what it did | times | reported in |\n| --- | --- | --- | --- |\n"
        "| `resume-rng` | saved \\| it; read it | 2 | transformers/trainer.py |\n"
        "| `pin-memory` | off | 1 | https://github.com/pytorch |\n",
        "## Signs of a fault\n\n| sentinel | what it found | times |\n| --- | --- | --- |\n"
        "| `loss-frozen` | the loss stays the same | 1 |\n",
    ):
        assert lines in text
    assert "## Guards" not in model_card().text
    assert "## Operators" not in model_card().text


def test_a_simulated_run_is_told_as_one_and_its_speed_not_at_all() -> None:
    reason = "Metal passed its probe on Apple M2 Pro (simulated), macOS 15.6"
    text = model_card(simulated=True, device=Choice("mps", reason)).text
    assert "M2 Pro" not in text, "hardware that was not there"
    assert (
        " nyu-mll/glue mrpc, by hf_mps on a simulated device `mps`. Training took 3 min 12 s on a CPU"
        " that simulated a Mac's GPU; a Mac's speed and memory differ.\n"
    ) in text
    assert "| device | `mps` | simulated: the CPU of a machine without Metal computed |" in text
    for figure in ("samples/s", "57.2", "1.94 GiB"):
        assert figure not in text
    assert "simulated" not in model_card().text


def test_a_run_with_a_releases_kernels_says_how_much_of_it_they_were() -> None:
    ran = Coverage("2.13.0", 9, 4, {("aten::cat", "why"): 1}, {})
    assert (
        "## Metal kernels\n\n9 of 10 launches that are Metal kernels on a Mac ran torch 2.13.0's own (4 kernels); "
        "as without kernels: aten::cat (1).\n"
    ) in model_card(metal_kernels=ran).text
    assert "Metal kernels" not in model_card().text
