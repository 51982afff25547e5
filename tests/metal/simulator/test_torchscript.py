"""TorchScript hands over lists that name no element type: indices among them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.usefixtures("mps"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
]


def written(x: Tensor) -> Tensor:
    x[x > 2] = 1.5
    return x


def read(x: Tensor) -> Tensor:
    return x[x > 2]


def columns(x: Tensor) -> Tensor:
    return x[:, torch.tensor([2, 0], device=x.device)]


def added(x: Tensor) -> Tensor:
    return x.index_put_([None, torch.tensor([0, 0], device=x.device)], torch.ones(2, device=x.device), accumulate=True)


@pytest.mark.parametrize("function", [written, read, columns, added])
def test_a_scripted_function_indexes_as_on_the_cpu(function: Callable[[Tensor], Tensor]) -> None:
    scripted = torch.jit.script(function)
    given = torch.arange(6.0).view(2, 3)
    assert torch.equal(scripted(given.to("mps")).cpu(), scripted(given))
