"""histc runs PyTorch's own Metal kernel."""

from __future__ import annotations

import pytest
import torch

from hf_mps.metal.kernels.rules import Dispatch


@pytest.mark.parametrize("edges", [{}, {"min": -1, "max": 1}], ids=["all", "some"])
def test_elements_are_counted_between_edges_wherever_they_lie(kernels: Dispatch, edges: dict[str, int]) -> None:
    given = torch.randn(30, 100, generator=torch.Generator().manual_seed(0))
    for view in (given, given.t(), given[:, ::3]):
        torch.testing.assert_close(torch.histc(view.to("mps"), 7, **edges).cpu(), torch.histc(view, 7, **edges))
    assert kernels.ledger.operators["histc"] == 3
    assert kernels.ledger.kernels["histogramdd_float"] == 3
