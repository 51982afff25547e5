"""Layer norm runs PyTorch's own Metal kernel, with the CPU's result."""

from __future__ import annotations

import pytest
import torch

from hf_mps.metal.kernels.rules import Dispatch


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


def test_small_variances_are_lost_on_this_release_as_on_a_mac(kernels: Dispatch) -> None:
    """pytorch#190491, mended in 2.14: the variance is E[x²] - E[x]², and 0 where that is below 1e-6."""
    given = torch.tensor([[-9.9e-4, -9.9e-4, 9.9e-4, 9.9e-4]])
    found = torch.nn.functional.layer_norm(given.to("mps"), (4,), eps=1e-12)
    assert kernels.ledger.operators["native_layer_norm"] == 1
    torch.testing.assert_close(found.cpu(), torch.tensor([[-990.0, -990.0, 990.0, 990.0]]), rtol=1e-3, atol=0)
    torch.testing.assert_close(torch.nn.functional.layer_norm(given, (4,), eps=1e-12), given.sign(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("axis", [3, 384, 5000])
def test_rms_norm_runs_its_kernel_where_no_gradient_is_wanted(kernels: Dispatch, axis: int) -> None:
    draw = torch.Generator().manual_seed(0)
    given, weight = (torch.randn(shape, generator=draw) for shape in ((4, axis), (axis,)))
    with torch.no_grad():
        found = torch.rms_norm(given.to("mps"), (axis,), weight.to("mps"), 1e-6)
    wanted = torch.rms_norm(given.double(), (axis,), weight.double(), 1e-6)
    assert kernels.ledger.operators["_fused_rms_norm"] == 1
    torch.testing.assert_close(found.cpu().double(), wanted, **TOLERANCE[torch.float32])
