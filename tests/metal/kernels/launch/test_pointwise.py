"""The generic pointwise launches take the kernel that PyTorch's host takes, whatever way the operands lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_mps.metal.kernels.rules import Dispatch


def _ran(kernels: Dispatch) -> set[str]:
    return {name for name in kernels.ledger.kernels if not name.startswith(("copy_", "fill_"))}


def _given(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


UNARY = {
    "exp_dense_scalar_float_float": (_given(32, 17), lambda each: each.t()),
    "exp_strided_float_float": (_given(32, 17), lambda each: each[:, ::2]),
    "exp_dense_float_float": (_given(1 << 18), lambda each: each),
}


@pytest.mark.parametrize("kernel", UNARY)
def test_one_input_lies_as_it_will(kernels: Dispatch, kernel: str) -> None:
    given, view = UNARY[kernel]
    found = view(given.to("mps")).exp()
    assert _ran(kernels) == {kernel}
    torch.testing.assert_close(found.cpu(), view(given).exp())


def test_whole_numbers_become_floats(kernels: Dispatch) -> None:
    given = torch.arange(1, 9)
    torch.testing.assert_close(given.to("mps").sqrt().cpu(), given.sqrt())
    assert _ran(kernels) == {"sqrt_dense_scalar_float_long"}


def test_an_output_of_another_dtype_is_cast_where_it_is_stored(kernels: Dispatch) -> None:
    given = _given(8).abs()
    found = torch.empty(8, dtype=torch.float16, device="mps")
    torch.sqrt(given.to("mps"), out=found)
    torch.testing.assert_close(found.cpu(), given.sqrt().half())
    assert _ran(kernels) == {"sqrt_dense_castout_float"}


BINARY = {
    "add_dense_float_float": (_given(4, 6), _given(4, 6)),
    "add_dense_scalar_float_float": (_given(4, 6), _given(1)),
    "add_dense_scalar_lhs_float_float": (_given(1), _given(4, 6)),
    "add_dense_broadcast_float_float": (_given(4, 6), _given(6)),
    "add_dense_broadcast_rhs_float_float": (_given(6), _given(4, 6)),
    "add_strided_float_float": (_given(4, 6), _given(4, 1)),
    "add_dense_cast_float_float": (_given(4, 6), _given(4, 6).half()),
    "add_strided_cast_float_float": (_given(4, 6), _given(4, 1).half()),
    "add_dense_broadcast_cast_float_float": (_given(4, 6), torch.arange(6)),
    "add_dense_scalar_cast_bfloat_bfloat": (_given(4, 6).bfloat16(), 3),
    "add_dense_ilp4_float_float": (_given(1 << 18), _given(1 << 18)),
}


@pytest.mark.parametrize("kernel", BINARY)
def test_two_inputs_lie_as_they_will(kernels: Dispatch, kernel: str) -> None:
    first, second = BINARY[kernel]
    found = torch.add(first.to("mps"), second.to("mps") if isinstance(second, Tensor) else second)
    assert _ran(kernels) == {kernel}
    torch.testing.assert_close(found.cpu(), torch.add(first, second))


def test_a_whole_number_beside_floats_becomes_one(kernels: Dispatch) -> None:
    given = _given(4, 6)
    torch.testing.assert_close((given.to("mps") * 3).cpu(), given * 3)
    torch.testing.assert_close((2 - given.to("mps")).cpu(), 2 - given)
    assert _ran(kernels) == {"mul_dense_scalar_float_float", "sub_dense_scalar_lhs_float_float"}


def test_a_value_beside_them_reaches_the_kernel(kernels: Dispatch) -> None:
    first, second = _given(4, 6), _given(6, 4)
    found = torch.add(first.to("mps"), second.to("mps").t(), alpha=-2.5)
    torch.testing.assert_close(found.cpu(), torch.add(first, second.t(), alpha=-2.5))
    assert _ran(kernels) == {"add_alpha_strided_float_float_float"}


def test_in_place_and_out_write_where_they_should(kernels: Dispatch) -> None:
    given, other = _given(4, 6), _given(6)
    target = given.to("mps")[:, 1:5]
    target.add_(other.to("mps")[1:5])
    torch.testing.assert_close(target.cpu(), given[:, 1:5] + other[1:5])
    out = torch.empty(0, device="mps")
    torch.mul(given.to("mps"), other.to("mps"), out=out)
    torch.testing.assert_close(out.cpu(), given * other)
    assert kernels.ledger.operators["add_.Tensor"] == 1
    assert kernels.ledger.operators["mul.out"] == 1


def test_a_comparison_written_to_floats_is_cast_where_it_is_stored(kernels: Dispatch) -> None:
    given, other = _given(4, 6), _given(4, 6).flip(0)
    target = given.to("mps")
    target.gt_(other.to("mps"))
    assert _ran(kernels) >= {"gt_strided_castout_bool_float"}
    torch.testing.assert_close(target.cpu(), (given > other).float())


@pytest.mark.parametrize(
    ("kernel", "dtype", "view"),
    [
        ("clamp_dense_float_float", torch.float32, lambda each: each),
        ("clamp_strided_float_float", torch.float32, lambda each: each[:, ::2]),
        ("clamp_dense_cast_float", torch.float16, lambda each: each),
        ("clamp_strided_cast_float", torch.float16, lambda each: each[:, ::2]),
    ],
)
def test_three_inputs_lie_as_they_will(
    kernels: Dispatch, kernel: str, dtype: torch.dtype, view: Callable[[Tensor], Tensor]
) -> None:
    given, low, high = _given(4, 6), _given(4, 6).flip(0).to(dtype), _given(4, 6).flip(1) + 1
    found = torch.clamp(*(view(each.to("mps")) for each in (given, low, high)))
    assert _ran(kernels) >= {kernel}
    torch.testing.assert_close(found.cpu(), torch.clamp(view(given), view(low), view(high)))


def test_one_weight_or_one_for_each_element_interpolates(kernels: Dispatch) -> None:
    start, end = _given(4, 6), _given(4, 6).flip(0)
    for weight in (torch.tensor(0.25), _given(4, 6), _given(4, 1), _given(6)):
        found = torch.lerp(*(each.to("mps") for each in (start, end, weight)))
        torch.testing.assert_close(found.cpu(), torch.lerp(start, end, weight))
    assert _ran(kernels) >= {
        "lerp_tensor_scalar_weight_float",
        "lerp_tensor_dense_float",
        "lerp_tensor_strided_2d_float",
    }


def test_pytorch_words_its_errors(kernels: Dispatch) -> None:
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        torch.add(_given(4).to("mps"), _given(3).to("mps"))
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.arange(3, device="mps").add_(1.5)
    with pytest.raises(RuntimeError, match="Found dtype Half but expected Float"):
        torch.ops.aten.gelu.out(_given(4).to("mps"), out=torch.empty(4, dtype=torch.float16, device="mps"))
