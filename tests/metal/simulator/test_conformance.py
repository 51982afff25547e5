"""The simulated device gives the CPU's results for PyTorch's own operator samples (see conformance/)."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from tests import share
from tests.metal.simulator.conformance import exceptions, runner
from tests.metal.simulator.conformance.compare import Outcome, difference, outcome

pytest.importorskip("expecttest", reason="PyTorch's operator samples import it")

import torch
from torch.testing._internal.common_methods_invocations import op_db


@pytest.mark.slow
def test_opinfo_samples_agree_with_the_cpu(mps: None) -> None:
    """This run's eighth of OpInfo (tests/share.py): forward, backward, in place and out= in four dtypes."""
    names = runner.names()
    chosen = share.of(names)
    summary = runner.run_all(workers=2, only=chosen)
    assert summary.operators == len(chosen)
    assert summary.native > 10 * len(chosen)
    unexplained, needless = exceptions.match(summary.differences, exceptions.read())
    assert not unexplained
    # A share draws other samples than the whole, which may not show what is listed.
    if share.is_whole():
        assert not needless, "these entries of opinfo_exceptions.yaml explain nothing any more: delete them"
        assert summary.compressed == {"sparse.sampled_addmm", "sparse.mm.reduce"}
        assert summary.operators == len(op_db)
        assert summary.native > 15_000
        assert summary.agreed / summary.native >= 0.999, summary.differences
        assert {"aten::multi_margin_loss", "aten::mode", "aten::channel_shuffle"} <= summary.missing


def test_every_exception_has_its_reason() -> None:
    for entry in exceptions.read():
        assert set(entry) <= {"operator", "form", "dtypes", "releases", "reason"}
        assert entry["operator"] in runner.names()
        assert len(entry["reason"].split()) > 4


def test_a_listed_difference_that_is_gone_and_a_new_one_are_both_found() -> None:
    listed = [{"operator": "add", "form": "any", "reason": "…"}, {"operator": "mul", "form": "out", "reason": "…"}]
    found = [{"operator": "add", "form": "out", "dtype": "int64"}, {"operator": "sub", "form": "out", "dtype": "int64"}]
    assert exceptions.match(found, listed) == ([found[1]], [listed[1]])


# The comparison itself must see what it is there for: each of these is a fault that a device could have.


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x + 1e-3,
        lambda x: x.to(torch.float64),
        lambda x: x[:1],
        lambda x: [x, x],
        lambda x: x.tolist(),
        lambda x: torch.where(x > 0, x, torch.nan),
    ],
    ids=["value", "dtype", "shape", "number", "type", "nan"],
)
def test_the_comparison_finds(wrong) -> None:
    x = torch.tensor([-1.0, 2.0, 3.0])
    assert outcome(lambda: x, lambda: wrong(x)).kind == "differs"


def test_the_comparison_passes_what_is_equal_or_random() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf")])
    assert outcome(lambda: x, lambda: x.clone()) == Outcome("same")
    assert outcome(lambda: torch.rand(9), lambda: torch.rand(9) * 0.5).kind == "random"
    assert outcome(lambda: torch.rand(9), lambda: torch.rand(8)).kind == "differs"
    assert difference([x], [x * (1 + 1e-7)]).kind == "close"


def test_one_side_that_raises_is_a_difference() -> None:
    def fails() -> None:
        raise ValueError("no")

    assert outcome(fails, fails).kind == "both raise"
    assert outcome(lambda: 1, fails).kind == "differs"
    assert outcome(fails, lambda: 1).kind == "differs"


def test_a_missing_operator_must_be_one_that_the_table_calls_missing() -> None:
    text = (
        "The operator '{}' is not currently implemented for the MPS device. If you want this op to be considered for "
        "addition please comment on https://github.com/pytorch/pytorch/issues/141287 …"
    )

    def reports(name: str, kind: type[Exception] = NotImplementedError):
        return Mock(side_effect=kind(text.format(name)))

    assert outcome(lambda: 1, reports("aten::mode")) == Outcome("missing", "aten::mode")
    assert outcome(lambda: 1, reports("aten::add.Tensor")).kind == "differs"
    assert outcome(lambda: 1, reports("aten::mode", RuntimeError)).kind == "differs"
