"""A kernel is used where it won its trial on this machine; the outcome is kept, and a variable overrules it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_mps.core.errors import UserError
from hf_mps.metal.training_kernels import trial

Side = Callable[[Tensor], Sequence[Tensor]]


def doubled(x: Tensor) -> Sequence[Tensor]:
    return (x * 2,)


def slowly(x: Tensor) -> Sequence[Tensor]:
    for _ in range(50):
        x = x + 0
    return doubled(x)


def wrongly(x: Tensor) -> Sequence[Tensor]:
    return (x * 2.001,)


def never(x: Tensor) -> Sequence[Tensor]:
    raise RuntimeError("no pipeline state")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Callable[[Side, Side], trial.Outcome]:
    """The trial of a kernel that computes `ours` where PyTorch computes `stock`."""

    def of(ours: Side, stock: Side) -> trial.Outcome:
        def cases(_: str) -> Iterator[trial.Case]:
            yield trial.Case("1,000 numbers", [torch.arange(1000.0)], ours, stock)

        monkeypatch.setattr(trial, "family", lambda _: SimpleNamespace(cases=cases, SOURCE=SimpleNamespace(digest="1")))
        return trial.outcome("clip", anew=True)

    return of


def test_what_is_exact_and_faster_is_used(tried: Any) -> None:
    found = tried(doubled, slowly)
    assert found.on
    assert found.reason.startswith("as exact as PyTorch's own operators and ")
    assert trial.may_act("clip")


def test_what_is_slower_is_not_used(tried: Any) -> None:
    found = tried(slowly, doubled)
    assert (found.on, trial.may_act("clip")) == (False, False)
    assert "times as long as PyTorch's own operators here" in found.reason


def test_what_is_wrong_is_not_used_however_fast(tried: Any) -> None:
    found = tried(wrongly, slowly)
    assert not found.on
    assert found.reason.startswith("1,000 numbers: off by 5.0e-04, and PyTorch's own by 0")


def test_what_fails_is_not_used(tried: Any) -> None:
    found = tried(never, doubled)
    assert (found.on, found.rows) == (False, ())
    assert found.reason.startswith("it failed: RuntimeError: no pipeline state")
    assert trial.kept_outcome("clip") is None, "what was missing may be there next time"


def test_the_outcome_is_kept_for_this_machine_torch_and_code(tried: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(doubled, slowly)
    monkeypatch.setattr(trial, "_known", {})
    assert trial.outcome("clip") == found
    monkeypatch.setattr(trial, "_known", {})
    monkeypatch.setattr(trial.machine, "present", lambda: SimpleNamespace(chip="Apple M9", macos="26.0"))
    assert trial.outcome("clip").rows != found.rows


@pytest.mark.parametrize(("value", "acts"), [("0", False), ("1", True), ("-clip", False)])
def test_a_variable_overrules_the_trial(value: str, acts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_TRAINING_KERNELS", value)
    assert trial.may_act("clip") is acts
    assert trial.known() == {"clip": trial.Outcome(acts, f"HF_MPS_TRAINING_KERNELS={value}")}


def test_a_kernel_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_TRAINING_KERNELS", "-clap")
    with pytest.raises(UserError, match=r"=-clap: clap is no kernel; there are clip, .*did you mean 'clip'"):
        trial.may_act("clip")


def test_a_trial_draws_nothing_and_sees_no_mode(tried: Any) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state(), torch.mps.get_rng_state()
    with torch.no_grad(), torch.autocast("mps", dtype=torch.float16), torch.device("meta"):
        assert tried(doubled, slowly).on
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], torch.mps.get_rng_state())
