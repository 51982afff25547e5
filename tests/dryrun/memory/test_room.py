"""A run whose step would not fit the machine makes room itself, with what changes least; any other is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from hf_mps.core.choice import Choice
from hf_mps.dryrun import prepare
from hf_mps.dryrun.memory import estimate, room
from hf_mps.dryrun.memory.fit import CHECKPOINTING
from hf_mps.dryrun.memory.machine import Machine
from hf_mps.dryrun.memory.trace import Estimate
from hf_mps.dryrun.resolve import Target, resolve_target
from hf_mps.finetune.run.room import at_most
from scripts.bench import check_plan
from scripts.bench.check_plan import CLASSIFY, CONTINUE, SUMMARIZE, Pair

MIB = 2**20
(KEY,) = CHECKPOINTING


# MiB of a step: as it is, with attention in blocks, with checkpointing, with both.
PEAKS = {(): 327, ("attention",): 291, (KEY,): 252, ("attention", KEY): 215}


@pytest.fixture
def target(tmp_path: Path) -> Target:
    """A small decoder's step of 327 MiB."""
    return resolve_target(str(check_plan.recipe(Pair("llama", CONTINUE, 2, 512), tmp_path)))


def mac(size: int) -> Machine:
    """One on which a step of so many MiB fits."""
    return Machine("a small Mac", 1000 * MIB, int(size * MIB / 0.95) + 1)


@pytest.mark.parametrize(
    ("size", "refused", "made"),
    [
        (330, {}, {}),
        (300, {}, room.ATTENTION),
        (300, {"attention": "sdpa"}, CHECKPOINTING),
        (230, {}, room.ATTENTION | CHECKPOINTING),
        (100, {}, room.ATTENTION | CHECKPOINTING),  # too large still, and less
        (230, {KEY: False}, room.ATTENTION),
        (230, {"attention": "eager", KEY: False}, {}),
    ],
)
def test_the_least_change_that_fits_and_none_that_was_refused(
    target: Target, monkeypatch: pytest.MonkeyPatch, size: int, refused: dict[str, Any], made: dict[str, Any]
) -> None:
    def estimated(target: Target, *_: Any) -> Estimate:
        keys = target.resolved.overrides.keys() - refused.keys()
        return Estimate(2, 512, 1, PEAKS[tuple(sorted(keys))] * MIB, {}, "")

    monkeypatch.setattr(room, "_estimate", estimated)
    found = room.make(target.varied(refused) if refused else target, mac(size), Choice("mps", ""))
    assert dict(found.overrides) == made
    assert set(found.choices) == {"attention" if name == "attention" else "checkpointing" for name in made}


def test_the_reason_has_both_peaks_and_the_word_that_refuses_it(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = {frozenset(keys): size for keys, size in PEAKS.items()}

    def estimated(target: Target, *_: Any) -> Estimate:
        return Estimate(2, 512, 1, peaks[frozenset(target.resolved.overrides)] * MIB, {}, "")

    monkeypatch.setattr(room, "_estimate", estimated)
    found = room.make(target, mac(300), Choice("mps", "")).choices
    assert found["attention"].reason == snapshot(
        "0.32 GiB of a step swaps on a small Mac, 0.28 GiB fits: attention in blocks keeps no scores, and"
        " computes them once more; to refuse it: attention=sdpa"
    )


@pytest.mark.parametrize(
    "pair",
    [
        Pair("bert", CLASSIFY, 8, 128),
        Pair("gpt2", CONTINUE, 2, 128, ("speedups=false",)),
        Pair("t5", SUMMARIZE, 2, 64),
    ],
    ids=lambda pair: pair.model,
)
def test_a_step_stays_below_the_bytes_that_decide_whether_one_is_traced(pair: Pair, tmp_path: Path) -> None:
    wanted = resolve_target(str(check_plan.recipe(pair, tmp_path)), pair.overrides)
    with prepare.weightless(wanted) as parts:
        most = at_most(parts.prepared, parts.recipe)
    assert most is not None
    assert estimate(wanted).bytes < most
