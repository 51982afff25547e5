"""Reading, writing and adding by indices run PyTorch's own Metal kernels, with the CPU's results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_mps.metal.kernels.rules import Dispatch
from tests.metal.kernels.launch.test_copies import FLOATS, launched, numbers


def indices(given: Tensor, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=given.device)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[indices(x, 0, 4, -2)],
        lambda x: x[:, indices(x, 0, 6, -2), indices(x, 1)[:, None]],
        lambda x: x[indices(x, 0, 4), :, indices(x, 1, 2)],
        lambda x: x.transpose(0, 2)[indices(x, 2, 0)],
        lambda x: x[1:, ::2][..., indices(x, 2, 0)],
        lambda x: x[x > 50],
        lambda x: x[x[:, :, 0] > 50],
        lambda x: x[indices(x)],
        lambda x: x[indices(x, 3).int()],
    ],
)
def test_what_indices_say_is_read(kernels: Dispatch, read: Callable[[Tensor], Tensor]) -> None:
    found = launched(kernels, read, numbers(5, 7, 3))
    assert kernels.ledger.operators["index.Tensor"] == 1
    assert found == [] or "index_select_32bit" in found


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_what_indices_say_is_written(kernels: Dispatch, accumulate: bool, dtype: torch.dtype) -> None:
    def write(given: Tensor) -> Tensor:
        return given.index_put((indices(given, 0, 4, -2),), given[:3].flip(0), accumulate=accumulate)

    found = launched(kernels, write, numbers(5, 7).to(dtype))
    assert any(name.startswith("index_put_accumulate" if accumulate else "index_put_") for name in found)


def test_one_thread_writes_where_algorithms_must_be_deterministic(kernels: Dispatch) -> None:
    # Python's own switch would put the guard of atomic order in front of the rules, which leave before it.
    torch._C._set_deterministic_algorithms(True)
    try:
        found = launched(kernels, lambda x: x.index_put((indices(x, 1, 1, 2),), x[:3]), numbers(5, 7))
    finally:
        torch._C._set_deterministic_algorithms(False)
    assert "index_put_serial_32bit" in found


def test_an_index_out_of_bounds_is_refused_as_without_kernels(kernels: Dispatch) -> None:
    given = numbers(5, 7).to("mps")
    with pytest.raises(IndexError, match="index 9 is out of bounds for dimension 0 with size 5"):
        given[indices(given, 9)].cpu()
    assert kernels.ledger.operators["index.Tensor"] == 0


def test_a_mask_of_bytes_is_warned_of_at_the_line_that_indexes(kernels: Dispatch) -> None:
    given, mask = numbers(5, 7).to("mps"), torch.tensor([1, 0, 1, 0, 0], dtype=torch.uint8, device="mps")
    with pytest.warns(UserWarning, match=r"indexing with dtype torch\.uint8 is now deprecated") as warned:
        given.index_put_((mask,), given[mask], accumulate=True)
    assert [each.filename for each in warned] == [__file__] * 2
    assert torch.equal(given[[0, 2]].cpu(), numbers(5, 7)[[0, 2]] * 2)


def test_gather_and_scatter_are_dense_or_strided_as_the_host_decides(kernels: Dispatch) -> None:
    whole = torch.randint(0, 7, (5, 7), generator=torch.Generator().manual_seed(0))
    for where, layout in ((whole, "dense"), (whole[:3, :4], "strided")):

        def read(given: Tensor, where: Tensor = where) -> Tensor:
            return given.gather(1, where.to(given.device))

        def add(given: Tensor, where: Tensor = where) -> Tensor:
            return given.scatter_add(1, where.to(given.device), given)

        assert f"gather_{layout}_float_long" in launched(kernels, read, numbers(5, 7))
        assert f"scatter_add_{layout}_float_long" in launched(kernels, add, numbers(5, 7))
