"""A device that adds in any order is held to rounding and its own spread, which two runs on it show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.core.choice import Choice
from hf_mps.layer import guards
from hf_mps.metal.simulator import strictness
from hf_mps.tools.dryrun.parity.compare import TOLERANCES, Parity, compare, equal, report, verdict
from hf_mps.tools.dryrun.parity.trace import GRADIENT, Trace, digest
from hf_mps.tools.dryrun.render import Form, render
from tests.layer.guards.experiments.order import deterministic
from tests.tools.dryrun.parity.runs import Classifier, batches, held

TOLERANCE = TOLERANCES["fp32"].value
MANY_WORDS = ((16, 24), (16, 24), (16, 24))
FACTS = {"device": Choice("mps", "because")}


def shown(parity: Parity, form: Form = "table") -> str:
    return render(report("glue/mrpc", parity, FACTS), form)


def trace(gradient: float = 1.0, loss: float = 1.0, device: str = "mps") -> Trace:
    """A step with one gradient."""
    made = Trace(device, losses=[loss], norms=[2.0])
    made.events[(1, GRADIENT, "words", "weight")] = digest(torch.full((8,), gradient))
    return made


def test_what_the_device_differs_by_from_itself_is_added_to_rounding() -> None:
    wanted, found = trace(device="cpu"), trace(1 + 1.5 * TOLERANCE, 1 + 1.5 * TOLERANCE)
    assert not compare(wanted, found).same
    assert not compare(wanted, found, again=found).same, "equal runs excuse nothing"
    again = trace(1 + 0.8 * TOLERANCE, 1 + 0.8 * TOLERANCE)
    judged = compare(wanted, found, again=again)
    assert judged.same
    assert judged.spread.steps == pytest.approx((0.7 * TOLERANCE,), rel=0.01)
    assert not compare(wanted, trace(1 + 3 * TOLERANCE), again=trace(1 + 2.5 * TOLERANCE)).same, "nor do all"


def test_a_device_that_is_not_sure_of_its_own_result_is_wrong() -> None:
    judged = compare(trace(device="cpu"), trace(), again=trace(1.5))
    assert not judged.same
    assert verdict(judged) == snapshot(
        "different: two runs on mps differ from each other, first at step 1, gradient: words (weight), off by 0.5"
        " (mps is simulated)"
    )


def test_a_second_run_that_fails_is_told() -> None:
    again = trace()
    again.failure = "RuntimeError: the device is gone"
    judged = compare(trace(device="cpu"), trace(), again=again)
    assert not judged.same
    assert "the run on mps ended: RuntimeError: the device is gone" in verdict(judged)


def test_an_embedding_is_named_as_the_first_place_where_two_runs_differ(tmp_path: Path) -> None:
    with strictness.on("atomic-order"):
        found = held(Classifier(), batches(*MANY_WORDS), tmp_path)
    assert found.same
    assert (found.spread.first.what, found.spread.first.module) == (GRADIENT, "words")
    assert found.spread.first.rel_error < 1e-5
    line = shown(found).splitlines()[-1]
    assert line.startswith("spread ")
    assert "two runs on mps differ, first at step 1, gradient: words (weight), off by" in line
    assert json.loads(shown(found, "json"))["spread"]["first"]["module"] == "words"


def test_in_order_two_runs_are_equal_and_the_report_says_so(tmp_path: Path) -> None:
    guards.get("atomic-order").forget()
    with strictness.on("atomic-order"), deterministic():
        found = held(Classifier(), batches(*MANY_WORDS), tmp_path)
    assert found.same
    assert found.spread.first is None
    assert shown(found).endswith("spread 0: two runs on mps are equal to the bit")


def test_a_device_with_the_cpus_results_to_the_bit_is_not_run_twice(tmp_path: Path) -> None:
    found = held(Classifier(frozen=True), batches((4, 6)), tmp_path)
    assert equal(trace(), trace())
    assert not equal(trace(), trace(1.0000001))
    assert found.same
    assert found.spread is None
    assert "spread" not in shown(found)
