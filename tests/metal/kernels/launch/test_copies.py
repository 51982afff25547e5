"""Copies, casts, fills and concatenations run PyTorch's own Metal kernels where a Mac does, with the CPU's results."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_mps.metal.kernels import disable, enable, running
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import Dispatch
from hf_mps.metal.kernels.values import padded, u32
from hf_mps.metal.simulator import build

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
REALS = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def numbers(*shape: int) -> Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(0)).float()


def launched(kernels: Dispatch | None, run: Callable[[Tensor], Tensor], given: Tensor) -> list[str]:
    """The kernels that `run` launches on the device, where its result has the CPU's values, dtype and strides."""
    there = given.to("mps")
    kernels.ledger.clear()
    found = run(there)
    names = sorted(kernels.ledger.kernels.elements())
    wanted = run(given)
    assert (found.dtype, found.stride()) == (wanted.dtype, wanted.stride())
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=0)
    return names


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (Tensor.clone, []),
        (lambda x: x[2:].contiguous(), []),
        (lambda x: x.clone(memory_format=torch.contiguous_format), []),
        (lambda x: x.t().contiguous(), ["copy_identity_strided_float_float"]),
        (lambda x: x[:, ::3].contiguous(), ["copy_identity_strided_float_float"]),
        (lambda x: x[0].expand(9, 40).contiguous(), ["copy_identity_strided_float_float"]),
        (Tensor.half, ["copy_identity_dense_castout_float"]),
        (lambda x: x[1:].half(), ["copy_identity_dense_castout_float"]),
        (lambda x: x.to(torch.complex64), ["copy_identity_dense_castout_float"]),
        (lambda x: x.to(torch.complex64).mul(1j).conj().resolve_conj(), None),
        (lambda x: x[:0].half(), []),
    ],
)  # fmt: skip
def test_a_copy_launches_what_the_host_chooses(
    kernels: Dispatch, run: Callable[[Tensor], Tensor], names: list[str] | None
) -> None:
    found = launched(kernels, run, numbers(30, 40))
    assert names is None or found == names


def test_a_cast_of_many_elements_takes_the_kernel_with_several_a_thread(kernels: Dispatch) -> None:
    assert launched(kernels, Tensor.half, numbers(131_072)) == ["copy_identity_dense_castout_ilp_float"]
    assert launched(kernels, Tensor.half, numbers(131_071)) == ["copy_identity_dense_castout_float"]


def test_a_copy_between_two_layouts_goes_through_memory_without_gaps(kernels: Dispatch) -> None:
    def into_columns(given: Tensor) -> Tensor:
        whole = given.new_zeros(40, 30)
        whole[:, ::2].copy_(given.t()[:, ::2])
        return whole

    assert launched(kernels, into_columns, numbers(30, 40)) == ["copy_identity_strided_float_float"] * 2


@pytest.mark.rotated
@pytest.mark.parametrize(("of", "into"), [*itertools.permutations(REALS, 2)], ids=str)
def test_every_dtype_is_cast_to_every_other_as_on_the_cpu(
    kernels: Dispatch, of: torch.dtype, into: torch.dtype
) -> None:
    given = numbers(7, 11).to(of)
    for layout in (given, given.t(), given[:, ::2], given[3:]):
        launched(kernels, lambda x: x.to(into), layout)
    assert kernels.ledger.operators["copy_"] >= 1


def test_a_tensor_with_gaps_is_gathered_before_it_goes_to_the_host(kernels: Dispatch) -> None:
    given = numbers(6, 8)
    there = given.to("mps")[:, ::2]
    kernels.ledger.clear()
    assert torch.equal(there.cpu(), given[:, ::2])
    assert list(kernels.ledger.kernels) == ["copy_identity_strided_float_float"]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("fill", "names"),
    [
        (lambda x: x.fill_(0), []),
        (lambda x: x.fill_(2.5), ["fill_scalar_dense_{}"]),
        (lambda x: x.t().fill_(2.5), ["fill_scalar_dense_{}"]),
        (lambda x: x[:, ::2].fill_(2.5), ["fill_scalar_strided_{}"]),
        (lambda x: x[:, 1:].zero_(), ["fill_scalar_strided_{}"]),
        (lambda x: x.fill_(torch.tensor(3.0, device=x.device)), None),
    ],
)
def test_a_fill_is_bytes_or_a_kernel_as_the_host_decides(
    kernels: Dispatch, fill: Callable[[Tensor], Tensor], names: list[str] | None, dtype: torch.dtype
) -> None:
    def run(given: Tensor) -> Tensor:
        fill(given)
        return given

    metal = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}[dtype]
    found = launched(kernels, run, numbers(7, 9).to(dtype))
    assert names is None or found == [name.format(metal) for name in names]


def test_a_number_is_not_rounded_to_the_default_dtype(kernels: Dispatch) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert launched(kernels, lambda x: x.clone().fill_(0.1), numbers(7, 9)) == ["fill_scalar_dense_float"]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("mask", "kind"),
    [(lambda x: x > 50, "dense"), (lambda x: x[:1] > 50, "broadcast"), (lambda x: x[:, :1] > 50, "strided")],
)
def test_a_masked_fill_takes_the_kernel_of_its_layout(
    kernels: Dispatch, mask: Callable[[Tensor], Tensor], kind: str
) -> None:
    found = launched(kernels, lambda x: x.masked_fill(mask(x), -float("inf")), numbers(7, 9))
    assert f"masked_fill_scalar_{kind}_32bit" in found


def test_a_concatenation_launches_a_kernel_for_each_input(kernels: Dispatch) -> None:
    found = launched(kernels, lambda x: torch.cat([x, x[:, :2], x[:, 3:]], 1), numbers(4, 9))
    assert found == ["cat_int32_t_float_float"] * 3
    found = launched(kernels, lambda x: torch.cat([x, x.long()[:1], x[:0]]), numbers(4, 9))
    assert found == ["cat_int32_t_float_float", "cat_int32_t_long_float", "copy_identity_dense_castout_float"]


def test_a_dtype_that_metal_has_not_is_not_written_at_all(release: str) -> None:
    """pytorch#197715: a host that asks for float64 (number 7) gets no error, and its memory stays as it was."""
    given, into = numbers(9).to("mps"), torch.full((9,), 7.0, dtype=torch.float64)
    kernel = Release(release).kernel("copy_identity_dense_castout_ilp_float")
    kernel.launch((into, given, padded(u32(8, 7, 9), 16)), 3)
    assert into.tolist() == [7.0] * 9


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.t()[:, ::2].contiguous(),
        lambda x: x[2:, 1::3].half(),
        lambda x: torch.cat([x.t(), x.t()[:5]]),
        lambda x: x.t()[x[:, 0].long() % 3],
        lambda x: x.index_put((x[:, 0].long() % 30,), x[:1], accumulate=True),
        lambda x: x.gather(1, x.long() % 7),
    ],
)
def test_no_access_leaves_the_tensors(release: str, run: Callable[[Tensor], Tensor]) -> None:
    """Checked kernels bound each access to what the rule has bound, also where a view has strides of zero."""
    enable(release, build.running("these tests need the simulated device"), checked=True)
    try:
        launched(running(), run, numbers(30, 40))
    finally:
        disable()
