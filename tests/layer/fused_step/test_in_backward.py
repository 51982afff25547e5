"""Weights step when their gradient is there: as they would after the backward pass, and halves by chance."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_mps.layer.fused_step import in_backward
from hf_mps.layer.fused_step.in_backward import InBackward, rounded

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=1e-2),
    "fused AdamW": lambda weights: torch.optim.AdamW(weights, lr=1e-2, fused=True),
    "SGD with momentum": lambda weights: torch.optim.SGD(weights, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, lr=1e-2),
}


class Tied(torch.nn.Module):
    """An embedding whose weight is the head's, with a layer between; what a decoder is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(11, 6)
        self.layer = torch.nn.Linear(6, 6)
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.unused = torch.nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.frozen(self.layer(self.words(ids)).tanh()) @ self.words.weight.t()
        return torch.nn.functional.cross_entropy(logits, ids.roll(1))


def model(device: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return Tied().to(device, dtype)


def train(trained: Any, optimizer: Any, early: InBackward | None, steps: int = 5) -> None:
    ids = torch.arange(11, device=next(trained.parameters()).device)
    if early is not None:
        early.attach(trained.parameters())
    for _ in range(steps):
        if early is not None:
            early.begin(optimizer, measuring=False)
        trained(ids).backward()
        if early is not None:
            assert all(each.grad is None for each in trained.parameters())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_state_are_those_of_a_step_after_the_backward_pass(name: str, device: str) -> None:
    stock, early = model(device), model(device)
    optimizers = [OPTIMIZERS[name]([*each.parameters()]) for each in (stock, early)]
    train(stock, optimizers[0], None)
    train(early, optimizers[1], InBackward())
    for mine, theirs in zip(early.parameters(), stock.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    expected, found = (each.state_dict() for each in optimizers)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_measuring_gives_the_norm_and_changes_nothing() -> None:
    trained = model("cpu")
    before, ids, early = copy.deepcopy(trained.state_dict()), torch.arange(11), InBackward()
    gradients = torch.autograd.grad(trained(ids), [trained.words.weight, *trained.layer.parameters()])
    expected = torch.nn.utils.get_total_norm(gradients)
    optimizer = torch.optim.AdamW(trained.parameters())
    early.attach(trained.parameters())
    early.begin(optimizer, measuring=True)
    trained(ids).backward()
    assert early.norm() == expected
    assert not optimizer.state
    torch.testing.assert_close(dict(trained.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_rounded_value_is_a_neighbour_and_its_mean_the_value(device: str) -> None:
    value = 1 + 2**-7 * 0.3  # bfloat16 has 1 and 1 + 2**-7 here
    torch.manual_seed(0)
    for sign in (1, -1):
        drawn = rounded(torch.full((100_000,), sign * value, device=device)).float().cpu()
        assert set(drawn.tolist()) == {sign * 1.0, sign * (1 + 2**-7)}
        assert abs(drawn.mean().item() - sign * value) < 4 * 2**-7 * (0.3 * 0.7 / 100_000) ** 0.5
    exact = torch.tensor([0.0, 1.5, -2.0, float("inf"), -float("inf")], device=device)
    assert torch.equal(rounded(exact).float(), exact)
    assert rounded(torch.tensor([float("nan")], device=device)).isnan().all()


def test_halves_go_where_a_float32_weight_goes_though_each_step_is_below_their_digits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_backward, "PIECE", 100)  # not a whole number of pieces
    torch.manual_seed(0)
    half = torch.nn.Parameter(torch.ones(5, 150, dtype=torch.bfloat16, device="mps"))
    nearest, whole = (torch.nn.Parameter(half.detach().clone().to(dtype)) for dtype in (half.dtype, torch.float32))
    early = InBackward()
    early.attach([half])
    for weight in (half, nearest, whole):
        optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0)
        for number in range(50):
            if weight is half:
                early.begin(optimizer, measuring=False)
            (weight.float() * 3 + number).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if weight is half:
            state = optimizer.state[half]
            moments = [state["exp_avg"], state["exp_avg_sq"]]
            assert all((each.dtype, each.shape) == (torch.bfloat16, half.shape) for each in moments)
            assert state["step"] == 50
    assert bool((whole < 0.951).all())
    assert bool((nearest == 1).all())
    assert abs(half.float().mean().item() - whole.mean().item()) < 2e-3
