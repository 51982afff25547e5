"""Products with weights of four and eight bits run Metal's kernels, with the result of the unpacked weights."""

from __future__ import annotations

import pytest
import torch

from hf_mps.metal.kernels.rules import Dispatch

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
OUTPUTS, INPUTS = 64, 128


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    allowed = TOLERANCE[found.dtype] * wanted.abs().max().item()
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=0, atol=allowed)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("rows", [1, 17])
def test_weights_of_four_bits(kernels: Dispatch, dtype: torch.dtype, group: int, rows: int) -> None:
    draw = torch.Generator().manual_seed(0)
    given = torch.randn(rows, INPUTS, generator=draw).to(dtype)
    weight = torch.randint(0, 16, (OUTPUTS, INPUTS), generator=draw)
    scales = torch.randn(INPUTS // group, OUTPUTS, 2, generator=draw).to(dtype)
    halves = (weight[:, ::2] << 4 | weight[:, 1::2]).to(torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(halves.to("mps"), 2)
    found = torch.ops.aten._weight_int4pack_mm(given.to("mps"), packed, group, scales.to("mps"))
    scale, zero = (scales[..., at].double().repeat_interleave(group, 0).T for at in (0, 1))
    close(found, given.double() @ ((weight - 8) * scale + zero).T)
    assert packed.shape == (OUTPUTS // 8, INPUTS // 32, 32, 1)
    assert kernels.ledger.operators["_convert_weight_to_int4pack"] == 1
    assert kernels.ledger.operators["_weight_int4pack_mm"] == 1


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 11, 12])
def test_weights_of_eight_bits_but_for_the_kernel_that_races(kernels: Dispatch, dtype: torch.dtype, rows: int) -> None:
    draw = torch.Generator().manual_seed(0)
    given = torch.randn(rows, INPUTS, generator=draw).to(dtype)
    weight = torch.randint(-128, 128, (OUTPUTS, INPUTS), dtype=torch.int8, generator=draw)
    scales = (torch.rand(OUTPUTS, generator=draw) / 100).to(dtype)
    found = torch.ops.aten._weight_int8pack_mm(given.to("mps"), weight.to("mps"), scales.to("mps"))
    close(found, given.double() @ (weight.double() * scales.double()[:, None]).T)
    assert kernels.ledger.operators["_weight_int8pack_mm"] == (rows < 12)
