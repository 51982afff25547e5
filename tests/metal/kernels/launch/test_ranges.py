"""Ranges as 2.14 makes them, by kernels; they are run where that release was fetched."""

from __future__ import annotations

import pytest
import torch

from hf_mps.metal.kernels.rules import Dispatch


@pytest.mark.parametrize("given", [(0, 7), (5, 0, -2), (1.5, 9.2, 0.3), (3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
def test_a_range_has_the_numbers_of_the_cpus(newer: Dispatch, dtype: torch.dtype, given: tuple[float, ...]) -> None:
    if dtype != torch.float32:
        given = tuple(int(each) or 1 for each in given) if len(given) == 3 else given
    newer.ledger.clear()
    torch.testing.assert_close(torch.arange(*given, dtype=dtype, device="mps").cpu(), torch.arange(*given, dtype=dtype))
    assert newer.ledger.operators["arange.start_out"] == 1


def test_a_step_below_one_is_an_error_of_int64_alone(newer: Dispatch) -> None:
    with pytest.raises(ValueError, match="step must be nonzero"):
        torch.arange(0, 5, 0.5, dtype=torch.int64, device="mps")
    assert torch.arange(0, 2, 0.5, dtype=torch.int32, device="mps").tolist() == [0, 0, 0, 0]
