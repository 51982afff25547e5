"""Layer norm runs PyTorch's own Metal kernel, with the CPU's result."""

from __future__ import annotations

import pytest
import torch

from hf_mps.kernels.rules import Dispatch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axis", [1, 3, 384, 4096, 5000])
def test_layer_norm_has_the_cpus_result_from_metals_kernel(kernels: Dispatch, axis: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    given, weight, bias = (torch.randn(shape, generator=draw).to(dtype) for shape in ((5, 7, axis), (axis,), (axis,)))
    found = torch.nn.functional.layer_norm(given.to("mps"), (axis,), weight.to("mps"), bias.to("mps"))
    wanted = torch.nn.functional.layer_norm(given.double(), (axis,), weight.double(), bias.double())
    assert kernels.ledger.operators["native_layer_norm"] == 1
    assert sum(kernels.ledger.kernels.values()) == 1
    torch.testing.assert_close(found.cpu().double(), wanted, **TOLERANCE[dtype])


TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 3e-2},
}


def test_after_it_the_device_computes_as_before(kernels: Dispatch) -> None:
    from hf_mps import kernels as metal_kernels

    given = torch.randn(4, 8, device="mps")
    kernels.ledger.clear()
    metal_kernels.disable()
    torch.nn.functional.layer_norm(given, (8,))
    assert kernels.ledger.operators == {}
