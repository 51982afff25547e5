"""The sentinels can be listed, switched off one by one, and say in one line what they found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_mps.core import settings
from hf_mps.core.errors import UserError
from hf_mps.layer import guards
from hf_mps.layer.guards import SentinelNotice
from hf_mps.layer.guards.catalogue import SENTINELS
from hf_mps.layer.integrations import table

NAMES = SENTINELS.names


def test_every_sentinel_is_complete() -> None:
    for name in NAMES:
        sentinel = guards.get(name)
        assert sentinel.name == name
        for sentence in (sentinel.what, sentinel.why):
            assert sentence
            assert not sentence.endswith(".")
    assert {module for module in SENTINELS.after if module != "torch"} == {
        module for module, rooms in table().items() if "sentinels" in rooms
    }


def test_the_report_has_each_with_state_and_reason() -> None:
    report = guards.report()
    assert [each.name for each in report.sentinels] == list(NAMES)
    assert {each.state for each in report.sentinels} <= {"on", "needless"}  # torch 2.15 sees to stopped-gpu itself
    assert len(str(report).splitlines()) == len(report.guards) + len(NAMES)


def train(still: nn.Parameter, moving: nn.Parameter) -> None:
    """A plain loop whose optimizer puts one of its weights back, as a kernel does that never writes it."""
    optimizer = torch.optim.SGD([("still", still), ("moving", moving)], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: still.data.fill_(1.0))
    for _ in range(6):
        (still.sum() + moving.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_one_that_found_something_says_so_once_and_names_the_weight() -> None:
    weights = [nn.Parameter(torch.ones(size, device="mps")) for size in (3, 2)]
    with pytest.warns(SentinelNotice) as said:
        train(*weights)
    (line,) = [str(each.message) for each in said]
    assert line.startswith(
        "hf_mps: 1 of 2 trained weights have gradients and did not move in the first 3 optimizer steps: still [3];"
    )
    assert line.endswith(" (sentinel; HF_MPS_SENTINELS=-weights-still switches it off)")
    state = next(each for each in guards.report().sentinels if each.name == "weights-still")
    assert (state.state, state.acted) == ("found", 1)


def test_a_name_that_is_no_sentinel_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_SENTINELS", "-loss-frozn")
    with pytest.raises(UserError, match=r"loss-frozn is no sentinel; there are .*; did you mean 'loss-frozen'"):
        settings.safeguards_off("sentinel", NAMES)
    monkeypatch.setenv("HF_MPS_SENTINELS", "stopp")
    with pytest.raises(UserError, match=r"stopp is no sentinel; .*; stop is the one word .*; did you mean 'stop'"):
        settings.safeguards_off("sentinel", NAMES)
    monkeypatch.setenv("HF_MPS_SENTINELS", "loss-frozen")
    with pytest.raises(UserError, match="sentinels are on by themselves; -loss-frozen switches one off"):
        settings.safeguards_off("sentinel", NAMES)


@pytest.mark.parametrize(
    ("value", "off", "stops"),
    [
        ("", set(), False),
        ("stop", set(), True),
        ("stop,-loss-frozen", {"loss-frozen"}, True),
        (" -loss-frozen , -gradient-norm ,stop", {"loss-frozen", "gradient-norm"}, True),
        ("-non-finite", {"non-finite"}, False),
    ],
)
def test_stop_stands_alone_or_beside_names(
    value: str, off: set[str], stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MPS_SENTINELS", value)
    assert (settings.safeguards_off("sentinel", NAMES), settings.sentinels_stop()) == (off, stops)


CODE = """
import torch, hf_mps.layer.guards
print([state.name for state in hf_mps.guards.report().sentinels if state.state == "off by user"])
print(torch.Tensor.backward.__module__, hasattr(torch.Tensor.backward, "hf_mps_patches"))
"""


@pytest.mark.rotated("/")
@pytest.mark.parametrize(
    ("names", "patched"), [(["gradient-norm", "loss-frozen"], True), (list(NAMES), False)], ids=["two", "all"]
)
def test_the_variable_switches_single_sentinels_off(names: list[str], patched: bool, run_python) -> None:
    done = run_python("-c", CODE, env={"HF_MPS_SENTINELS": ", ".join(f"-{name}" for name in reversed(names))})
    assert done.stdout.splitlines() == [f"{names}", f"torch._tensor {patched}"], done.stderr


@pytest.mark.rotated("/")
def test_a_mistyped_sentinel_leaves_every_sentinel_on(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python("-c", CODE, env={"HF_MPS_SENTINELS": "-loss-frozn"})
    assert "did you mean 'loss-frozen'?; every sentinel stays on" in done.stderr


def test_importing_the_package_does_not_import_torch(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        "-c", "import hf_mps.layer.guards, sys; hf_mps.layer.guards.SentinelNotice; print('torch' in sys.modules)"
    )
    assert done.stdout == "False\n"
