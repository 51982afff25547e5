"""A run whose step would not fit the machine makes room itself, with what changes least; any other is left alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.features.machine import at_most
from hf_mps.tools.dryrun import prepare
from hf_mps.tools.dryrun.memory import adjust
from hf_mps.tools.dryrun.memory.fit import CHECKPOINTING
from hf_mps.tools.dryrun.memory.machine import Machine
from hf_mps.tools.dryrun.memory.plan import estimate
from hf_mps.tools.dryrun.memory.trace import Estimate
from hf_mps.tools.dryrun.resolve import Target, resolve_target
from scripts.bench import check_plan
from scripts.bench.check_plan import CLASSIFY, CONTINUE, SUMMARIZE, Pair

MIB = 2**20
(KEY,) = CHECKPOINTING


# MiB that each takes from a step of 327.
SAVED = {"attention": 36, KEY: 75, "step_in_backward": 30, "training.optim": 60, "weights": 80, "lora": 140}


def estimated(target: Target, *_: Any) -> Estimate:
    made = (
        key for key, override in target.resolved.overrides.items() if override.value not in (False, "sdpa", "eager")
    )
    return Estimate(2, 512, 1, (327 - sum(SAVED[key] for key in made)) * MIB, {}, "")


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
        (300, {}, adjust.ATTENTION),
        (300, {"attention": "sdpa"}, CHECKPOINTING),
        (230, {}, adjust.ATTENTION | CHECKPOINTING),
        (190, {}, adjust.ATTENTION | CHECKPOINTING | adjust.EARLY),
        (100, {}, adjust.ATTENTION | CHECKPOINTING | adjust.EARLY),  # too large still, and less
        (190, {"step_in_backward": False}, adjust.ATTENTION | CHECKPOINTING),
        (230, {KEY: False}, adjust.ATTENTION | adjust.EARLY),
        (230, {"attention": "eager", KEY: False}, {}),  # less than a tenth is not worth it
    ],
)
def test_the_least_change_that_fits_and_none_that_was_refused(
    target: Target, monkeypatch: pytest.MonkeyPatch, size: int, refused: dict[str, Any], made: dict[str, Any]
) -> None:
    monkeypatch.setattr(adjust, "_estimate", estimated)
    found = adjust.make(target.varied(refused) if refused else target, mac(size), Choice("mps", ""))
    assert dict(found.overrides) == made
    assert set(found.choices) == {"checkpointing" if name == KEY else name for name in made}
    assert found.bytes == estimated(target.varied(refused | made)).bytes


def test_a_model_that_cannot_checkpoint_gets_what_it_can_have(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(target: Target, *given: Any) -> Estimate:
        if KEY in target.resolved.overrides:
            raise UserError("model m: it cannot take a step of the task masked-lm: ValueError: no checkpointing")
        return estimated(target, *given)

    monkeypatch.setattr(adjust, "_estimate", refusing)
    assert dict(adjust.make(target, mac(230), Choice("mps", "")).overrides) == adjust.ATTENTION | adjust.EARLY


def test_a_step_that_adds_gradients_up_takes_no_early_steps(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adjust, "_estimate", lambda *given: replace(estimated(*given), accumulation=2))
    assert dict(adjust.make(target, mac(190), Choice("mps", "")).overrides) == adjust.ATTENTION | CHECKPOINTING


def test_the_reason_has_both_peaks_and_the_word_that_refuses_it(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adjust, "_estimate", estimated)
    found = adjust.make(target, mac(300), Choice("mps", "")).choices
    assert found["attention"].reason == snapshot(
        "0.32 GiB of a step swaps on a small Mac, 0.28 GiB fits: attention in blocks keeps no scores, and"
        " computes them once more; to refuse it: attention=sdpa"
    )


@pytest.mark.parametrize(
    ("size", "proposal"),
    [
        (190, ""),
        (130, "training.optim=adafactor would need 0.12 GiB, which fits"),
        (110, "weights=bfloat16 would need 0.10 GiB, which fits"),
        (80, "lora={} would need 0.07 GiB, which fits"),
        (40, "lora={} would need 0.07 GiB, which swaps"),
    ],
)
def test_what_trains_to_other_numbers_is_proposed_in_one_line_and_not_taken(
    target: Target, monkeypatch: pytest.MonkeyPatch, size: int, proposal: str
) -> None:
    monkeypatch.setattr(adjust, "_estimate", estimated)
    metal = Choice("mps", "")
    made = adjust.make(target, mac(size), metal)
    assert made.overrides.keys() <= {"attention", KEY, "step_in_backward"}
    found = adjust.proposed(target, mac(size), metal, made)
    line = f"0.18 GiB of a step, even so; {proposal}, and trains to other numbers; next: hf-mps plan {target.name}"
    assert [choice.reason for choice in found.values()] == ([line] if proposal else [])


@pytest.mark.slow
def test_a_step_in_the_backward_pass_keeps_no_gradients_and_another_optimizer_no_moments(
    target: Target, tmp_path: Path
) -> None:
    config = tmp_path / "llama" / "config.json"
    few = config.read_text(encoding="utf-8").replace('"num_hidden_layers": 4', '"num_hidden_layers": 2')
    config.write_text(few, encoding="utf-8")
    plain, early, adafactor, halves = (
        estimate(target.varied(CHECKPOINTING | changes), length=16)
        for changes in ({}, adjust.EARLY, adjust.EARLY | adjust.ADAFACTOR, adjust.HALVES)
    )
    assert early.bytes < plain.bytes - 0.8 * plain.parts["gradients"]
    assert early.parts["optimizer"] == plain.parts["optimizer"]
    assert adafactor.parts["optimizer"] < 0.05 * plain.parts["optimizer"]
    assert halves.parts["weights"] < 0.51 * plain.parts["weights"]
    assert halves.parts["optimizer"] < 0.51 * plain.parts["optimizer"]


@pytest.mark.rotated
@pytest.mark.parametrize(
    "pair",
    [
        Pair("bert", CLASSIFY, 8, 128),
        Pair("gpt2", CONTINUE, 2, 128, ("optimizations=false",)),
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
