"""Tagging words with several labels each: read from lists or text, learned, measured, answered and refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.finetune.models import tagging
from hf_mps.finetune.text import word_sets
from hf_mps.metrics import sets
from tests.finetune import tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command

RECIPE = """# Tell what each word is.
task: token-classification
model: model
data:
  files: {train: train.jsonl, validation: dev.jsonl}
  columns: {words: tokens, tags: labels}
seed: 1
training:
  per_device_train_batch_size: 8
  learning_rate: 1e-2
  num_train_epochs: 1
"""
# What the words of a sentence are: `cat` is an animal and a name at once, `the` begins the name, `was` is nothing.
PARTS = (["name"], ["animal", "name"], [], ["on"], ["place"])


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw, made = random.Random(seed), []
    for _ in range(count):
        words = ["the", draw.choice(tiny.ANIMALS), "was", "on", draw.choice(tiny.PLACES)]
        made.append({"tokens": words, "labels": [list(part) for part in PARTS]})
        if draw.random() < 0.3:
            made[-1] = {"tokens": ["it", "is", "good"], "labels": [[], [], []]}
    return made


@pytest.fixture
def tagging_desk(desk: Path) -> Path:
    """The desk with a recipe and rows whose words have several labels, as JSON lines."""
    tiny.write_jsonl(desk / "train.jsonl", rows(48))
    tiny.write_jsonl(desk / "dev.jsonl", rows(16, seed=1))
    (desk / "my.yaml").write_text(RECIPE, encoding="utf-8")
    return desk


@pytest.mark.usefixtures("rendered")
def test_a_run_learns_every_label_of_a_word_and_the_saved_model_says_them(
    tagging_desk: Path, finetune: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    from hf_mps.cli.main import main

    ended = finetune("my.yaml", "training.num_train_epochs=6", "training.eval_strategy=no")
    assert (ended.code, ended.err) == (0, "")
    run = tagging_desk / "runs/my"
    said = results(run)
    each = {f"{name}_f1" for name in ("animal", "name", "on", "place")}
    assert set(said["metrics"]) == {"f1_micro", "f1_macro", "exact_match", "loss", *each}
    assert said["main_metric"] == "f1_micro"
    assert said["baseline"]["what"] == snapshot("always answers name (32.1%), the commonest of the training words")
    # A constant answer has about 0.5; the words tell their labels, and nearly all are learned.
    assert said["baseline"]["metrics"]["f1_micro"] < 0.6
    assert said["metrics"]["f1_micro"] > said["baseline"]["metrics"]["f1_micro"] + 0.35
    assert said["choices"]["tags"]["value"] == snapshot("4, 0.80 a word: animal, name, on, place")
    assert said["fallback"] == []
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert config["problem_type"] == "multi_label_classification"
    assert (run / "labels.png").read_bytes().startswith(b"\x89PNG")
    found = predictions(run)
    dev = rows(16, seed=1)
    given = [(word, sorted(some)) for row in dev for word, some in zip(row["tokens"], row["labels"], strict=True)]
    assert [(line["word"], json.loads(line["label"])) for line in found] == given
    for line in found:
        assert len(json.loads(line["prediction"])) == len(json.loads(line["probability"]))
    capfd.readouterr()
    assert main(["predict", str(run), "dev.jsonl", "--format", "jsonl"]) == 0
    answers = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [answer["prediction"] for answer in answers] == [json.loads(line["prediction"]) for line in found]
    assert main(["evaluate", str(run), "--json"]) == 0, capfd.readouterr().err
    measured = json.loads(capfd.readouterr().out)["splits"]["validation"]["metrics"]
    assert measured["f1_micro"] == pytest.approx(said["metrics"]["f1_micro"])


def test_lists_ids_and_text_between_separators_are_the_same_labels(tagging_desk: Path, finetune: Command) -> None:
    names = ("O", "animal", "name", "on", "place")
    ids = tagging_desk / "ids"
    ids.mkdir()
    for split, made in (("train", rows(48)), ("dev", rows(16, seed=1))):
        lines = ["# text = a comment", "1-2\tnothing\t_", "1.1\tleft out\t_"]
        for row in made:
            pairs = zip(row["tokens"], row["labels"], strict=True)
            lines += [f"{at}\t{word}\t{'|'.join(some) or '_'}" for at, (word, some) in enumerate(pairs, 1)] + [""]
        (tagging_desk / f"{split}.conllu").write_text("\n".join(lines), encoding="utf-8")
        numbered = [[[names.index(one) for one in some] or [0] for some in row["labels"]] for row in made]
        tiny.write_jsonl(ids / f"{split}.jsonl", [made[at] | {"labels": some} for at, some in enumerate(numbered)])
    words = ("training.max_steps=3", "training.logging_steps=1")
    assert finetune("my.yaml", *words, "output_dir=lists").code == 0
    text = ("data.words=1", "data.tags=2", "data.separator=|")
    for name, ending, change in (("text", "conllu", text), ("ids", "jsonl", (f"data.labels=[{','.join(names)}]",))):
        place = "ids/" if name == "ids" else ""
        files = (f"data.train={place}train.{ending}", f"data.validation={place}dev.{ending}")
        ended = finetune("my.yaml", *words, *files, *change, f"output_dir=of-{name}")
        assert ended.code == 0, ended.err
        for key in ("loss", "metrics"):
            ours, theirs = (
                [entry.get(key) for entry in results(tagging_desk / run)["log_history"]]
                for run in (f"of-{name}", "lists")
            )
            assert ours == theirs


def test_accumulated_gradients_are_those_of_the_whole_batch(tagging_desk: Path, finetune: Command) -> None:
    losses = []
    for batch, steps in ((8, 1), (4, 2)):
        words = (
            f"training.per_device_train_batch_size={batch}",
            f"training.gradient_accumulation_steps={steps}",
            "config_overrides={hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}",
            "training.train_sampling_strategy=random",
            "training.max_steps=2",
            "training.logging_steps=1",
            f"output_dir=by-{steps}",
        )
        assert finetune("my.yaml", *words).code == 0
        log = results(tagging_desk / f"by-{steps}")["log_history"]
        losses.append([entry["loss"] for entry in log if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_resumed_run_is_the_whole_one_to_the_last_bit(tagging_desk: Path, finetune: Command) -> None:
    from safetensors.torch import load_file

    steps = ("training.save_strategy=steps", "training.save_steps=2", "training.max_steps=4")
    assert finetune("my.yaml", *steps, "output_dir=whole").code == 0
    resumed = "training.resume_from_checkpoint=whole/checkpoint-2"
    assert finetune("my.yaml", *steps, resumed, "output_dir=resumed").code == 0
    whole, again = (load_file(tagging_desk / name / "model.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_the_loss_is_that_of_the_labelled_tokens_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 3, generator=draw, requires_grad=True)
    labels = torch.randint(0, 2, (2, 4, 3), generator=draw).float()
    kept = torch.tensor([[False, True, True, False], [False, True, False, False]])
    labels[~kept] = -100
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits[kept], labels[kept])
    loss = tagging.over_words({"logits": logits}, labels)
    assert torch.equal(loss, expected) or loss.item() == pytest.approx(expected.item(), rel=1e-6)
    # Of a step with twice as many labels it is half.
    assert tagging.over_words({"logits": logits}, labels, 18).item() == pytest.approx(loss.item() / 2, rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert not gradient[~kept].any()
    assert gradient[kept].all()


@pytest.mark.parametrize("side", ["right", "left"])
def test_labels_stand_beside_their_tokens_on_either_side(side: str) -> None:
    def padded(rows: list[Any]) -> dict[str, Any]:
        return {"input_ids": torch.zeros(len(rows), 4)}

    row = {"input_ids": [1, 2], "labels": [[-100, -100], [0, 1]]}
    table = word_sets.Collator(padded, 2, side)([row])["labels"]
    own = slice(2) if side == "right" else slice(2, 4)
    assert table[0, own].tolist() == row["labels"]
    assert table.shape == (1, 4, 2)
    assert (table == -100).sum() == 6


def test_each_labels_f1_is_scikit_learns() -> None:
    from sklearn.metrics import f1_score

    draw = numpy.random.default_rng(0)
    answers, truths = draw.integers(0, 2, (40, 3)), draw.integers(0, 2, (40, 3))
    measured = sets.of_sets(["f1/micro"], "token-classification", of="word", each=("a", "b", "c"))
    found = measured.compute(answers, truths)
    assert tuple(found) == measured.reported == ("f1_micro", "a_f1", "b_f1", "c_f1")
    assert [found[f"{name}_f1"] for name in "abc"] == pytest.approx(list(f1_score(truths, answers, average=None)))


@pytest.mark.parametrize(
    ("labels", "words", "line"),
    [
        (
            [["name"], None, [], [], []],
            (),
            snapshot("train.jsonl: row 1: word 2 has no labels; allowed: a list for each word, an empty one for none"),
        ),
        (
            [["name"], [""], [], [], []],
            (),
            snapshot("train.jsonl: row 1 has an empty label among its own; allowed: a name for each"),
        ),
        ([["name"], [], []], (), snapshot("train.jsonl: row 1 has 5 words and 3 tags; allowed: a tag for each word")),
        (
            [["name"], ["nama"], [], [], []],
            ("data.labels=[animal,name,on,place]",),
            snapshot(
                "train.jsonl: row 1: label 'nama' is not in the label set (animal, name, on, place), data.labels in"
                " the recipe; did you mean 'name'?"
            ),
        ),
        (
            None,
            ("data.separator=|",),
            snapshot("train.jsonl: data.separator is for labels in a text, and these are lists; leave it out"),
        ),
        (
            None,
            ("problem_type=single_label_classification",),
            snapshot(
                "train.jsonl: data.columns.tags names a column of type List; allowed: a list of tags in each row, as"
                " JSON and Parquet have them"
            ),
        ),
        (
            None,
            ("problem_type=single_label_classification", "threshold=0.3"),
            snapshot(
                "my.yaml: the recipe has threshold beside problem_type: single_label_classification; leave one of"
                " them out"
            ),
        ),
        (
            None,
            ("metrics=seqeval",),
            snapshot(
                "metrics has 'seqeval', which token-classification with several labels a word does not compute;"
                " allowed: f1/macro, f1/micro, f1/weighted, precision/macro, precision/micro, precision/weighted,"
                " recall/macro, recall/micro, recall/weighted, exact_match"
            ),
        ),
        (
            None,
            ("training.label_smoothing_factor=0.1",),
            snapshot(
                "training.label_smoothing_factor is for one tag a word, and these rows have several labels;"
                " leave it out"
            ),
        ),
    ],
)
def test_what_cannot_be_labels_is_refused_in_one_line(
    tagging_desk: Path, finetune: Command, labels: Any, words: tuple[str, ...], line: str
) -> None:
    made = rows(48)
    if labels is not None:
        made[0] = {"tokens": ["the", "cat", "was", "on", "mat"], "labels": labels}
    tiny.write_jsonl(tagging_desk / "train.jsonl", made)
    ended = finetune("my.yaml", *words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.removeprefix("hf-mps: ").removesuffix("\n") == line


def test_text_without_a_separator_and_a_threshold_for_one_tag_are_refused(
    tagging_desk: Path, finetune: Command
) -> None:
    made = [row | {"labels": ["|".join(some) for some in row["labels"]]} for row in rows(48)]
    tiny.write_jsonl(tagging_desk / "train.jsonl", made)
    assert finetune("my.yaml", "problem_type=multi_label_classification").err == snapshot(
        "hf-mps: train.jsonl: the tags are a text for each word, and several labels stand in a list for each"
        " or between separators; next: data.separator='|'\n"
    )
    one = [row | {"labels": [(some or ["O"])[0] for some in row["labels"]]} for row in rows(48)]
    for name in ("train", "dev"):
        tiny.write_jsonl(tagging_desk / f"{name}.jsonl", one)
    assert finetune("my.yaml", "threshold=0.4").err == snapshot(
        "hf-mps: threshold is for words with several labels, and these have one each; leave it out\n"
    )
