"""Lengths that batches are padded to: the best list, what decides otherwise, and a collator for every task."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from math import comb
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from transformers import BertModel

from hf_mps.core import notices
from hf_mps.finetune.text import buckets, lengths
from hf_mps.finetune.text.buckets import BucketSampler
from hf_mps.finetune.text.lengths import Lengths, Padded, PadToBucket
from tests.finetune import tiny
from tests.finetune.run_files import results
from tests.finetune.tiny import Command
from tests.refusals import refusal

FILLS = {"input_ids": 9, "attention_mask": 0, "token_type_ids": 0, "labels": -100, "decoder_input_ids": 9}


class Tokenizer:
    """What the module reads of a tokenizer."""

    model_max_length = 100
    pad_token_id = 9
    pad_token_type_id = 0
    padding_side = "right"


def recipe(**said: Any) -> Padded:
    """A recipe of which only the lengths matter."""
    return Padded.model_validate({"task": "x", "model": "m", "data": {"generated": "pairs"}, **said})


def counts(number: int, seed: int = 0) -> list[int]:
    """Lengths as texts have them: many short ones and a long tail."""
    draw = random.Random(seed)
    return [min(96, max(5, round(draw.lognormvariate(3, 0.6)))) for _ in range(number)]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_other_list_of_so_many_lengths_wastes_less(batch: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "TOLERANCE", 0.0)
    rows = counts(60)
    found = buckets.optimal_buckets(rows, top=max(rows), limit=96, batch=batch, most=most, step=8)

    def expected(list_: tuple[int, ...]) -> float:
        within = [comb(sum(row <= length for row in rows), batch) / comb(len(rows), batch) for length in list_]
        return sum(
            length * (share - before) for length, share, before in zip(list_, within, [0.0, *within[:-1]], strict=True)
        )

    last = -(-max(rows) // 8) * 8
    candidates = range(8, last, 8)
    every = [(*some, last) for size in range(most) for some in itertools.combinations(candidates, size)]
    least = min(map(expected, every))
    assert expected(found) == pytest.approx(least)


def test_the_list_is_as_short_as_it_pays_and_never_passes_the_limit() -> None:
    three = [11] * 50 + [12] * 50 + [83] * 50
    assert buckets.optimal_buckets(three, top=83, limit=84, batch=1, most=8, step=8) == (16, 84)
    spread = list(range(1, 513))
    assert len(buckets.optimal_buckets(spread, top=512, limit=512, batch=1, most=8, step=8)) == 8
    long = buckets.optimal_buckets([100_000, 3], top=100_000, limit=10**6, batch=1, most=8, step=8)
    assert long[-1] >= 100_000


@pytest.mark.parametrize(
    ("rows", "top", "batch", "listed"),
    [
        ([12] * 9, 12, 4, (12,)),
        ([7] * 9, 40, 1, (7, 40)),
        ([8, 20, 37], 37, 8, (37,)),  # all rows in one batch: it has one length
        ([8, 20, 37], 41, 8, (37, 41)),  # and a row of another split is longer
    ],
)
def test_lengths_that_are_few_already_are_the_list(
    rows: list[int], top: int, batch: int, listed: tuple[int, ...]
) -> None:
    assert buckets.optimal_buckets(rows, top=top, limit=512, batch=batch, most=8, step=8) == listed


def padding(rows: list[int], order: list[int], target: Callable[[int], int]) -> float:
    """The share of padding in batches of 16 rows taken in `order`, in percent."""
    cut = [[rows[row] for row in order[at : at + 16]] for at in range(0, len(order), 16)]
    return 100 * (1 - sum(rows) / sum(target(max(batch)) * len(batch) for batch in cut))


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("number", [10, 16, 40, 130, 200, 3000])
def test_the_padding_that_the_reason_tells_is_what_batches_then_hold(number: int, grouped: bool) -> None:
    rows = counts(number)
    made = recipe(training={"per_device_train_batch_size": 16})
    choice = lengths.decide(made, {"train": rows}, 96, grouped=grouped)
    told = [int(figure) for figure in re.findall(r"(\d+)%", choice.reason)]
    told = told * 2 if len(told) == 1 else told  # one figure: the list is no worse and no better
    shuffled = [random.Random(seed).sample(range(number), number) for seed in range(200 if number < 1000 else 5)]
    ours = [list(BucketSampler([choice.value.target(row) for row in rows], 16, seed=1))] if grouped else shuffled
    held = [mean(padding(rows, order, choice.value.target) for order in ours)]
    held += [mean(padding(rows, order, int) for order in shuffled)]
    assert told == pytest.approx(held, abs=1)
    assert ("where random batches of 16 padded to their longest rows have" in choice.reason) == (told[0] < told[1])
    assert ("is padded to its longest row, often a shape new to Metal" in choice.reason) == (told[0] > told[1])


def test_rows_of_one_length_of_the_list_leave_nothing_to_compare() -> None:
    choice = lengths.decide(recipe(), {"train": [16] * 40}, 96)
    assert choice.reason.startswith("one length: about 0% padding; half of the rows within 16 tokens")


def test_the_choice_says_what_the_list_saves() -> None:
    choice = lengths.decide(recipe(), {"train": counts(2000)}, 96)
    assert choice.value.padding == "list"
    assert all(length % 8 == 0 for length in choice.value.shapes)
    assert len(choice.value.shapes) <= lengths.SHAPES
    assert str(choice.value) == ", ".join(map(str, choice.value.shapes)) + " tokens"
    assert choice.reason.startswith(f"{len(choice.value.shapes)} lengths, chosen from your data: about ")
    assert "padding, where random batches of 32 padded to their longest rows have" in choice.reason
    assert "at the limit of 96 and perhaps cut" in choice.reason


@pytest.mark.parametrize(
    ("said", "value", "reason"),
    [
        ({"padding": "longest"}, Lengths(96, "longest"), "padding in the recipe: each batch to its own longest row; "),
        ({"padding": "max_length"}, Lengths(96, "max_length"), "padding in the recipe: one shape; "),
        ({"pad_to_multiple_of": 32}, Lengths(96, "longest", multiple=32), "pad_to_multiple_of in the recipe; "),
        (
            {"optimizations": False},
            Lengths(96, "longest"),
            "optimizations is false in the recipe: each batch to its own longest row; ",
        ),
    ],
)
def test_the_recipes_word_decides(said: dict[str, Any], value: Lengths, reason: str) -> None:
    choice = lengths.decide(recipe(**said), {"train": counts(50)}, 96)
    assert choice.value == value
    assert choice.reason.startswith(reason)


def test_a_cpu_which_compiles_nothing_pads_to_each_batchs_longest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_DEVICE", "cpu")
    choice = lengths.decide(recipe(), {"train": [5, 9, 12]}, 96)
    assert choice.value == Lengths(96, "longest")
    assert choice.reason == snapshot(
        "a CPU compiles nothing for a new shape, so each batch goes to its own longest row; half of the rows within 9"
        " tokens, the longest 12"
    )
    assert lengths.decide(recipe(padding="list"), {"train": [5, 9, 12]}, 96).value.padding == "list"


def test_a_recipe_has_one_way_of_padding() -> None:
    for padding in ("list", "max_length"):
        with pytest.raises(
            ValueError, match=f"has pad_to_multiple_of beside padding: {padding}; leave one of them out"
        ):
            recipe(padding=padding, pad_to_multiple_of=8)


def test_the_next_length_up() -> None:
    few = Lengths(64, "list", (16, 24, 40))
    assert [few.target(width) for width in (1, 16, 17, 40, 41, 63, 70)] == [16, 16, 24, 40, 48, 64, 70]
    assert [Lengths(64, "longest").target(width) for width in (5, 64)] == [5, 64]
    assert [Lengths(64, "longest", multiple=10).target(width) for width in (5, 51)] == [10, 60]
    assert Lengths(64, "max_length").target(3) == 64


def test_rows_are_cut_to_what_the_model_can_read() -> None:
    class Config:
        max_position_embeddings = 90

    assert lengths.limit(recipe(), Tokenizer(), Config()) == 90
    assert lengths.limit(recipe(), Tokenizer(), object(), default=64) == 64
    assert lengths.limit(recipe(max_length=90), Tokenizer(), Config()) == 90
    assert refusal(lengths.limit, recipe(max_length=90, pad_to_multiple_of=32), Tokenizer(), Config()) == snapshot(
        "pad_to_multiple_of is 32: 90 tokens would become 96, and this model has 90 positions; "
        "allowed: a max_length that is a multiple of it"
    )


def padded(batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """`batch` through the collator of a list of 8 and 16."""
    target = Lengths(16, "list", (8, 16)).target
    return PadToBucket(lambda rows: dict(rows[0]), target, FILLS, **settings)([batch])


def test_a_batch_is_filled_up_with_what_each_column_is_filled_with() -> None:
    ones = torch.ones(2, 5, dtype=torch.long)
    batch = padded({"input_ids": ones, "attention_mask": ones, "labels": ones, "score": torch.ones(2)})
    assert batch["input_ids"].tolist() == [[1] * 5 + [9] * 3] * 2
    assert batch["attention_mask"].tolist() == [[1] * 5 + [0] * 3] * 2
    assert batch["labels"].tolist() == [[1] * 5 + [-100] * 3] * 2
    assert batch["score"].shape == (2,)
    left = padded({"input_ids": ones, "labels": ones}, side="left")
    assert left["input_ids"].tolist() == [[9] * 3 + [1] * 5] * 2
    assert left["labels"].tolist() == [[-100] * 3 + [1] * 5] * 2


def test_labels_that_are_not_tokens_stay_as_they_are() -> None:
    ids = torch.ones(2, 5, dtype=torch.long)
    assert padded({"input_ids": ids, "labels": torch.tensor([0, 1])})["labels"].tolist() == [0, 1]
    several = padded({"input_ids": ids, "labels": torch.ones(2, 5)})
    assert several["labels"].shape == (2, 5)
    choices = padded({"input_ids": torch.ones(2, 3, 5, dtype=torch.long), "labels": torch.tensor([0, 1])})
    assert choices["input_ids"].shape == (2, 3, 8)


def test_a_decoder_has_lengths_of_its_own_and_starts_at_the_left() -> None:
    ids, labels = torch.ones(2, 9, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)
    batch = {"input_ids": ids, "labels": labels, "decoder_input_ids": labels}
    up = padded(batch, side="left", labels=Lengths(8, "list", (6, 8)).target)
    assert up["input_ids"].tolist()[0] == [9] * 7 + [1] * 9
    assert up["labels"].tolist() == [[1] * 5 + [-100]] * 2
    assert up["decoder_input_ids"].tolist() == [[1] * 5 + [9]] * 2


def test_a_column_of_tokens_that_nothing_is_known_of_is_refused() -> None:
    ones = torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="the padding value of column bbox is unknown; known: input_ids"):
        padded({"input_ids": ones, "bbox": ones})
    up = Lengths(16, "list", (8,)).collator(lambda rows: dict(rows[0]), Tokenizer(), filled={"bbox": 7})
    assert up([{"input_ids": ones, "bbox": ones}])["bbox"].tolist() == [[1] * 5 + [7] * 3] * 2


def rows(number: int) -> list[dict[str, Any]]:
    """Rows of 7 to 34 tokens that a model can learn."""
    made = tiny.rows(number)
    for place, row in enumerate(made):
        row["second"] += " it is" * (place * 7 % 13)
    return made


def test_a_run_trains_and_evaluates_on_the_lengths_of_its_list(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_csv(desk / "train.csv", rows(96))
    tiny.write_csv(desk / "dev.csv", rows(20))
    widths: list[int] = []
    forward = BertModel.forward

    def watched(self: Any, input_ids: Any, *others: Any, **settings: Any) -> Any:
        widths.append(input_ids.shape[1])
        return forward(self, input_ids, *others, **settings)

    monkeypatch.setattr(BertModel, "forward", watched)
    finetune("my.yaml").finished()

    assert "like length together" in str(results(desk / "runs/my")["choices"]["sampling"])
    listed = results(desk / "runs/my")["choices"]["lengths"]["value"]["shapes"]
    assert 1 < len(listed) <= 5
    assert set(widths) == set(listed)


def test_a_files_length_gives_way_to_the_models_positions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Config:
        max_position_embeddings = 90

    notices.forget()
    assert lengths.limit(recipe(max_length=384), Tokenizer(), Config()) == 90
    assert capsys.readouterr().err == snapshot(
        "hf-mps: max_length is 90, not the recipe's 384: the model has no more\n"
    )
