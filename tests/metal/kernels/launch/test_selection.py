"""Selections along a dimension, nonzero, triangles, windows and ranges run PyTorch's own Metal kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_mps.metal.kernels.rules import Dispatch
from tests.metal.kernels.launch.test_copies import FLOATS, launched, numbers
from tests.metal.kernels.launch.test_indices import indices


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (lambda x: x.tril(), ["tril_int_float"]),
        (lambda x: x.t().triu(1), ["triu_int_float"]),
        (lambda x: x.clone().tril_(-1), ["tril_inplace_int_float"]),
        (lambda x: torch.tril_indices(7, 5, 1, device=x.device), ["tril_indices_long"]),
        (lambda x: torch.triu_indices(7, 5, -2, device=x.device), ["triu_indices_long"]),
        (lambda x: torch.eye(7, 9, device=x.device), ["eye_float"]),
        (lambda x: torch.eye(2100, device=x.device), ["eye_diag_float"]),
        (lambda x: x.index_copy(0, indices(x, 3, 1), x[:2]), ["index_copy_dense_float_long_32"]),
        (lambda x: x.t().index_copy(0, indices(x, 3, 1), x.t()[:2]), None),
        (lambda x: x.t().index_copy(0, indices(x, 3)[0], x.t()[:1]), None),
        (lambda x: x.gt(50).nonzero().contiguous(), None),
        (lambda x: torch.arange(0, 9, device=x.device), None),
        (lambda x: x[0].long().repeat_interleave(torch.arange(9, device=x.device)), None),
    ],
)  # fmt: skip
def test_the_host_chooses_the_kernel(
    kernels: Dispatch, run: Callable[[Tensor], Tensor], names: list[str] | None
) -> None:
    found = launched(kernels, run, numbers(7, 9))
    assert names is None or [name for name in found if not name.startswith("copy_")] == names


def test_nonzero_counts_over_many_groups(kernels: Dispatch) -> None:
    given = numbers(70_001) * (numbers(70_001) > 50)
    found = launched(kernels, lambda x: x.nonzero().flatten(), given)
    assert found == ["count_nonzero_prefix_sum_float", "prefix_sum_blocks", "scatter_nonzero_indices_float"]


def test_an_index_out_of_bounds_never_reaches_a_kernel_that_says_nothing_of_it(kernels: Dispatch) -> None:
    given = numbers(7, 9).to("mps")
    with pytest.raises((IndexError, RuntimeError)):
        given.index_copy(0, indices(given, 99), given[:1]).cpu()
    assert kernels.ledger.operators["index_copy"] == 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_windows_are_summed_and_their_gradient_is_taken(kernels: Dispatch, dtype: torch.dtype) -> None:
    def fold(given: Tensor) -> Tensor:
        given = given.detach().requires_grad_()
        image = torch.nn.functional.fold(given, (8, 12), (2, 3), stride=2, padding=(1, 0), dilation=(2, 1))
        image.square().sum().backward()
        return torch.cat([image.detach().flatten(), given.grad.flatten()])

    found = launched(kernels, fold, (numbers(2, 12, 20) / 64).to(dtype))
    assert {name.split("_")[0] for name in found} >= {"col2im", "im2col"}
