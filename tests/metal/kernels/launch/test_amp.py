"""GradScaler's kernels: gradients unscaled and looked through, the scale's next value."""

from __future__ import annotations

import pytest
import torch

from hf_mps.metal.kernels.rules import Dispatch
from hf_mps.metal.kernels.values import metal

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def unscaled(grads: list[torch.Tensor], factor: float) -> float:
    found = torch.zeros(1, device="mps")
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.full((1,), factor, device="mps"))
    return float(found.cpu())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_unscaled(kernels: Dispatch, dtype: torch.dtype) -> None:
    given = [torch.randn(shape).to(dtype) for shape in ((3,), (0,), (40, 50), (65536 * 33 + 5,), ())]
    grads = [each.to("mps") for each in given]
    assert unscaled(grads, 0.25) == 0
    assert kernels.ledger.kernels[f"ampNonFiniteCheckAndUnscale_{metal(dtype)}"]
    for mine, other in zip(grads, given, strict=True):
        torch.testing.assert_close(mine.cpu(), other * 0.25)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_number_that_is_not_finite_is_found(kernels: Dispatch, dtype: torch.dtype, bad: float) -> None:
    grad = torch.ones(70_000, dtype=dtype, device="mps")
    grad[69_999] = bad
    assert unscaled([torch.ones(3, dtype=dtype, device="mps"), grad], 0.5) == 1
    assert kernels.ledger.kernels[f"ampNonFiniteCheckAndUnscale_{metal(dtype)}"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dense_gradient_of_any_order_is_unscaled(kernels: Dispatch, dtype: torch.dtype) -> None:
    grad = torch.arange(12.0).to(dtype).reshape(3, 4).to("mps").t()
    assert unscaled([grad], 2.0) == 0
    torch.testing.assert_close(grad.cpu(), (torch.arange(12.0) * 2).to(dtype).reshape(3, 4).t())


def test_a_gradient_with_gaps_is_walked_as_if_it_had_none(kernels: Dispatch) -> None:
    """Metal's fault, of the host: half of the gradient is left as it was, and what lies between it is halved."""
    whole = torch.ones(4, 8, device="mps")
    assert unscaled([whole[:, ::2]], 0.5) == 0
    assert kernels.ledger.kernels["ampNonFiniteCheckAndUnscaleSingle_float"] == 1
    assert whole.cpu().ravel().tolist() == [0.5] * 16 + [1.0] * 16


@pytest.mark.parametrize(
    ("found_inf", "tracker", "scale_after", "tracker_after"), [(1.0, 3, 32.0, 0), (0.0, 0, 64.0, 1), (0.0, 3, 128.0, 0)]
)
def test_the_scale_follows_what_was_found(
    kernels: Dispatch, found_inf: float, tracker: int, scale_after: float, tracker_after: int
) -> None:
    scale = torch.full((1,), 64.0, device="mps")
    growth = torch.full((1,), tracker, dtype=torch.int32, device="mps")
    torch._amp_update_scale_(scale, growth, torch.full((1,), found_inf, device="mps"), 2.0, 0.5, 4)
    assert (float(scale), int(growth)) == (scale_after, tracker_after)
    assert kernels.ledger.kernels["ampUpdateScale_float"] == 1
