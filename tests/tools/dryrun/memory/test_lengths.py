"""What is planned is as wide as it says: tokens, answers, pictures and sound, in every task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_mps.cli.main import main
from hf_mps.tools.dryrun import batch, metal_device, prepare
from hf_mps.tools.dryrun.resolve import Target, resolve_target

ROWS = "training.per_device_train_batch_size=2"


def shapes(target: Target, length: int | None = None) -> dict[str, tuple[int, ...]]:
    """The shapes of a planned batch, by the names that the model takes them under."""
    device = metal_device()
    with prepare.weightless(target) as parts:
        wide = batch.width(parts.whole, parts.prepared, length)
        made = prepare.step(parts, device, fake=True, wide=wide).batches[0]
        return {name: tuple(tensor.shape) for name, tensor in made.items() if hasattr(tensor, "shape")}


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("recipe", "ids"),
    [
        ("masked-lm/wikitext", ["input_ids", "labels"]),
        ("causal-lm/wikitext", ["input_ids", "labels"]),
        ("glue/mrpc", ["input_ids", "attention_mask", "token_type_ids"]),
        ("token-classification/conll2003", ["input_ids", "labels"]),
        ("question-answering/squad", ["input_ids"]),
        ("multiple-choice/swag", ["input_ids", "attention_mask"]),
        ("sentence-embeddings/stsb", ["anchor_input_ids", "positive_attention_mask"]),
        ("summarization/xsum", ["input_ids", "attention_mask"]),
        ("sft/chat", ["input_ids", "labels"]),
        ("dpo/ultrafeedback", ["input_ids", "attention_mask"]),
        ("orpo/ultrafeedback", ["input_ids", "completion_mask"]),
        ("kto/kto-mix", ["input_ids", "KL_input_ids", "KL_completion_mask"]),
        ("grpo/gsm8k", ["input_ids", "attention_mask"]),
    ],
)
def test_every_task_takes_the_length_that_is_asked_for(recipe: str, ids: list[str]) -> None:
    found = shapes(resolve_target(recipe, [ROWS]), length=48)
    assert {name: found[name][-1] for name in ids} == dict.fromkeys(ids, 48)


@pytest.mark.rotated
@pytest.mark.parametrize("recipe", ["causal-lm/wikitext", "sft/chat", "dpo/ultrafeedback", "kto/kto-mix"])
def test_rows_are_as_long_as_the_recipe_cuts_them_and_not_as_the_short_ones_that_are_made_up(recipe: str) -> None:
    assert shapes(resolve_target(recipe, [ROWS]))["input_ids"][-1] == 1024


@pytest.mark.parametrize(("said", "length", "expected"), [("null", None, (512, 128)), ("24", 48, (48, 24))])
def test_answers_have_a_length_of_their_own_by_default_the_tasks(
    said: str, length: int | None, expected: tuple[int, int]
) -> None:
    found = shapes(resolve_target("summarization/xsum", [ROWS, f"max_target_length={said}"]), length)
    assert (found["input_ids"][-1], found["labels"][-1]) == expected
    assert found["decoder_input_ids"][-1] == found["labels"][-1]


def test_sound_is_as_long_as_the_recipe_lets_it_be() -> None:
    found = shapes(resolve_target("speech-recognition/librispeech", [ROWS, "max_duration_in_seconds=3"]))
    assert found["input_values"] == (2, 3 * 16000)


@pytest.mark.parametrize(("config", "size"), [({"image_size": 96}, 96), ({}, 224)])
def test_pictures_are_of_the_size_that_the_configuration_names_or_of_imagenets(
    config: dict[str, Any], size: int, tmp_path: Path
) -> None:
    kind = "vit" if config else "resnet"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **config}), encoding="utf-8")
    found = shapes(resolve_target(str(tmp_path), [ROWS], "image-classification"))
    assert found["pixel_values"] == (2, 3, size, size)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["glue/mrpc", "--length", "1000000"],
            "--length 1000000: allowed: at most 512, the positions that this model has",
        ),
        (
            ["image-classification", "--length", "64"],
            "--length 64: rows of image-classification have no tokens; their size is set by the model's configuration",
        ),
        (
            ["speech-recognition/librispeech", "--length", "64"],
            "--length 64: rows of speech-recognition have no tokens; their size is set by max_duration_in_seconds=N",
        ),
    ],
)
def test_a_length_that_cannot_be_is_refused_in_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert capsys.readouterr().err == f"hf-mps: {line}\n"
