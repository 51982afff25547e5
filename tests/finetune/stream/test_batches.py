"""Batches are full and of like length, no example is lost, and each can be made again from its place."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from hf_mps.finetune.stream.batches import Arranging, Batches, Making
from hf_mps.finetune.stream.endless import Reader, Windows
from hf_mps.finetune.stream.files import Broken
from hf_mps.finetune.text import packing
from tests.finetune.stream import corpora


def pack(examples: Any) -> list[list[Any]]:
    fitted = packing.best_fit([len(one["input_ids"]) for one in examples], 10)
    return [[examples[place] for place in row] for row in fitted]


WAYS = {
    "plain": (Making(corpora.encode, 8), Arranging(3)),
    "alike": (Making(corpora.encode, 8), Arranging(3, grouped=True, target=lambda width: -(-width // 2) * 16)),
    "blocks": (Making(corpora.encode, 9, joined=True, before=(-1,), after=(-2,)), Arranging(2)),
    "packed": (Making(corpora.encode, 10, pack=pack, filler=-9), Arranging(2)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_goes_on_behind_any_batch(tmp_path: Path, way: str) -> None:
    corpora.write(tmp_path, "rows", range(90))
    read, (making, arranging) = corpora.reading(tmp_path / "rows.jsonl"), WAYS[way]
    whole = [batch.examples for batch in islice(corpora.batches(read, making, arranging), 60)]
    state: dict[str, Any] = {}
    for number, batch in enumerate(islice(corpora.batches(read, making, arranging), 45)):
        state = json.loads(json.dumps((batch.state or state) | {"batch": batch.given}))
        if number % 5 == 0 or batch.state:
            rest = islice(corpora.batches(read, making, arranging, state), 60 - number - 1)
            assert [one.examples for one in rest] == whole[number + 1 :]


@pytest.mark.parametrize("way", WAYS)
def test_no_token_is_lost_but_those_that_wait(tmp_path: Path, way: str) -> None:
    corpora.write(tmp_path, "rows", range(200))
    read, (making, arranging) = corpora.reading(tmp_path / "rows.jsonl"), WAYS[way]
    seen: Counter[int] = Counter()
    for batch in corpora.batches(read, making, arranging):
        assert len(batch.examples) == arranging.size
        seen.update(token for one in batch.examples for token in one["input_ids"] if token >= 0)
        if seen.total() > 5000:  # several passes over 800 tokens
            break
    passes = {number: seen[number] / (number % 7 + 1) for number in range(200)}
    assert 4 <= min(passes.values()) <= max(passes.values()) <= 9


def test_a_batch_holds_rows_of_like_length(tmp_path: Path) -> None:
    corpora.write(tmp_path, "rows", range(200))
    making, arranging = WAYS["alike"]
    found = list(islice(corpora.batches(corpora.reading(tmp_path / "rows.jsonl"), making, arranging), 300))
    widths = [{arranging.target(len(one["input_ids"])) for one in batch.examples} for batch in found]
    # What is left of each group of 32 batches is mixed.
    assert sum(len(width) == 1 for width in widths) > 0.85 * len(widths)


def test_ranks_have_batches_of_one_length_at_a_step(tmp_path: Path) -> None:
    for number in range(2):
        corpora.write(tmp_path, f"rows-{number}", range(700 * number, 700 * number + 700))
    read, (making, arranging) = corpora.reading(tmp_path / "*.jsonl"), WAYS["alike"]
    both = [Batches(Windows(Reader(read, number, 2), 10, 3), making, arranging) for number in range(2)]
    widths = [[max(len(one["input_ids"]) for one in batch.examples) for batch in islice(one, 160)] for one in both]
    near = [abs(first - second) <= 2 for first, second in zip(*widths, strict=True)]
    assert sum(near) > 0.85 * len(near)


def test_blocks_are_whole_and_packed_rows_nearly_full(tmp_path: Path) -> None:
    corpora.write(tmp_path, "rows", range(200))
    read = corpora.reading(tmp_path / "rows.jsonl")
    blocks = [one["input_ids"] for b in islice(corpora.batches(read, *WAYS["blocks"]), 100) for one in b.examples]
    assert all(len(block) == 9 and block[0] == -1 and block[-1] == -2 for block in blocks)
    rows = [one for b in islice(corpora.batches(read, *WAYS["packed"]), 100) for one in b.examples]
    assert all(len(row["input_ids"]) == len(row["position_ids"]) == len(row["labels"]) == 10 for row in rows)
    assert sum(token == -9 for row in rows for token in row["input_ids"]) < 0.03 * 10 * len(rows)


def test_another_size_of_batch_goes_on_with_the_same_examples(tmp_path: Path) -> None:
    corpora.write(tmp_path, "rows", range(400))
    read, (making, _) = corpora.reading(tmp_path / "rows.jsonl"), WAYS["plain"]
    before = list(islice(corpora.batches(read, making, Arranging(6), buffer=1), 5))
    state: dict[str, Any] = {}
    for batch in before:
        state = (batch.state or state) | {"batch": batch.given}
    after = islice(corpora.batches(read, making, Arranging(4), state, buffer=1), 20)
    numbers = [one["input_ids"][0] for batch in (*before, *after) for one in batch.examples]
    assert numbers == list(range(110))


def test_a_row_that_a_task_refuses_is_told_with_its_line(tmp_path: Path) -> None:
    corpora.write(tmp_path, "rows", range(6))

    def refusing(rows: Any) -> list[Any]:
        made = corpora.encode(rows)
        return [Broken("is not liked") if row["text"] == "row 4" else one for row, one in zip(rows, made, strict=True)]

    read = corpora.reading(tmp_path / "rows.jsonl")
    found = list(islice(corpora.batches(read, Making(refusing, 8), Arranging(2)), 20))
    told = [line.rpartition("/")[2] for batch in found for line in batch.told]
    assert told[0] == snapshot("rows.jsonl: line 5 is not liked")
    assert [4] not in [one["input_ids"] for batch in found for one in batch.examples]
    assert 5 <= found[-1].tally.broken <= found[-1].tally.rows / 5
