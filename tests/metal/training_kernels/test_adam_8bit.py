"""bitsandbytes' 8-bit optimizers on mps: their own steps and states, by a kernel of hf_mps or by operators."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_mps.layer import guards

bitsandbytes = pytest.importorskip("bitsandbytes")
SHAPES = [(96, 64), (5001,), (7,)]  # the last has fewer than 4,096 elements, and moments in float32


@pytest.fixture(autouse=True, params=["operators", "kernel"])
def _way(request: pytest.FixtureRequest, _trials_anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_TRAINING_KERNELS", str(int(request.param == "kernel")))
    # Trainer leaves there which places among an optimizer's weights step with 32 bits.
    monkeypatch.setattr(bitsandbytes.optim.GlobalOptimManager, "_instance", None)


def weights(device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(device, dtype)) for shape in SHAPES]


def stepped(optimizer: Any, steps: range) -> list[Tensor]:
    """The weights after steps with the same gradients on every device."""
    found = optimizer.param_groups[0]["params"]
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        for weight in found:
            weight.grad = torch.randn(weight.shape, generator=draw).to(weight)
        optimizer.step()
    return [weight.detach().cpu().clone() for weight in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_is_that_of_bitsandbytes_on_the_cpu(dtype: torch.dtype) -> None:
    ours, theirs = (bitsandbytes.optim.AdamW8bit(weights(device, dtype), lr=1e-2) for device in ("mps", "cpu"))
    for mine, other in zip(stepped(ours, range(1)), stepped(theirs, range(1)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-7)
    for mine, other in list(zip(ours.state.values(), theirs.state.values(), strict=True))[:2]:
        for name in ("state1", "state2"):
            assert mine[name].dtype == other[name].dtype == torch.uint8
            # On the CPU bitsandbytes rounds to another byte here and there, mostly of squares near zero.
            assert float((mine[name].cpu() != other[name]).float().mean()) < 0.05
            torch.testing.assert_close(mine[f"absmax{name[-1]}"].cpu(), other[f"absmax{name[-1]}"])


def test_each_moment_becomes_the_nearest_byte() -> None:
    optimizer = bitsandbytes.optim.AdamW8bit(weights("mps"), lr=1e-2)
    stepped(optimizer, range(1))
    weight = optimizer.param_groups[0]["params"][0]
    state, gradient = optimizer.state[weight], weight.grad.cpu().double()
    for number, moment in ((1, 0.1 * gradient), (2, 0.001 * gradient**2)):
        rows = moment.view(-1, 256)
        share = rows / rows.abs().amax(1, keepdim=True)
        meaning, codes = (state[f"{name}{number}"].cpu() for name in ("qmap", "state"))
        off = (meaning.double()[codes.int()].view(rows.shape) - share).abs()
        least = (share[..., None] - meaning.double()).abs().amin(-1)
        assert float((off - least).max()) < 1e-7


@pytest.mark.rotated
@pytest.mark.parametrize("kind", ["AdamW8bit", "Lion8bit", "RMSprop8bit", "SGD8bit"])
def test_a_state_that_was_saved_goes_on_as_the_one_that_was_not(kind: str) -> None:
    made = getattr(bitsandbytes.optim, kind)
    how = {"momentum": 0.9} if kind == "SGD8bit" else {}
    # The third has moments in float32, by an operator of bitsandbytes' own, which torch.compile makes anew.
    whole, first = (made(weights("mps")[:2], lr=1e-2, **how) for _ in range(2))
    expected = stepped(whole, range(4))
    middle = stepped(first, range(2))
    second = made([nn.Parameter(each.to("mps")) for each in middle], lr=1e-2, **how)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert all(map(torch.equal, stepped(second, range(2, 4)), expected))


def test_its_state_is_a_quarter_and_it_learns_alike() -> None:
    losses, sizes = [], []
    for kind in (torch.optim.AdamW, bitsandbytes.optim.AdamW8bit):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(16, 32), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 16))
        optimizer = kind(model.to("mps").parameters(), lr=1e-2)
        draw, total = torch.Generator().manual_seed(0), 0.0
        for _ in range(60):
            words = torch.randint(0, 16, (32, 4), generator=draw).to("mps")
            loss = nn.functional.cross_entropy(model(words), words[:, 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() / 60
        losses.append(total)
        state = optimizer.state[model[2].weight]
        sizes.append(sum(each.nbytes for name, each in state.items() if torch.is_tensor(each) and "qmap" not in name))
    assert sizes[1] <= 0.26 * sizes[0]
    assert losses[1] == pytest.approx(losses[0], rel=0.005)
    assert losses[0] < 1.0 < torch.log(torch.tensor(16.0))


def test_the_guard_reports_it() -> None:
    guard = guards.get("cuda-optimizer")
    before = guard.times
    stepped(bitsandbytes.optim.Adam8bit(weights("mps")), range(1))
    assert guard.times > before
