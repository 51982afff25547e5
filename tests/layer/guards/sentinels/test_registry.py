"""The sentinels can be listed, switched off one by one, and say in one line what they found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_mps.core import settings
from hf_mps.layer import guards
from hf_mps.layer.guards import SentinelNotice
from hf_mps.layer.guards.catalogue import SENTINELS
from tests.layer.guards import loops

NAMES = SENTINELS.names


def train(still: nn.Parameter, moving: nn.Parameter) -> None:
    """A plain loop whose optimizer puts one of its weights back, as a kernel does that never writes it."""
    optimizer = torch.optim.SGD([("still", still), ("moving", moving)], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: still.data.fill_(1.0))
    loops.descend(lambda: still.sum() + moving.square().sum(), optimizer, 6)


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


def test_importing_the_package_does_not_import_torch(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        "-c", "import hf_mps.layer.guards, sys; hf_mps.layer.guards.SentinelNotice; print('torch' in sys.modules)"
    )
    assert done.stdout == "False\n"
