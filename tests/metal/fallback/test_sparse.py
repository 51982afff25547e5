"""What Metal lacks for sparse COO tensors runs on the CPU too, named and counted; PyTorch's own variable has no say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_mps.core import notices
from hf_mps.metal import fallback
from hf_mps.metal.fallback import registration

pytestmark = [
    pytest.mark.filterwarnings("ignore::hf_mps.metal.fallback.MetalFallbackWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]

MATRIX = [[0.0, 2.0, 0.0], [1.0, 0.0, -3.0]]


def matrix(device: str) -> torch.Tensor:
    return torch.tensor(MATRIX, device=device).to_sparse()


def rectified(device: str) -> torch.Tensor:
    x = torch.tensor(MATRIX, device=device, requires_grad=True)
    torch.sparse.sum(x.to_sparse().relu() * 2).backward()
    assert x.grad is not None
    return x.grad


def in_place(device: str) -> torch.Tensor:
    x = torch.ones(2, 4, device=device)
    assert x.addmm_(matrix(device), torch.ones(3, 4, device=device), beta=0.5) is x
    return x


def resized(device: str) -> torch.Tensor:
    out = torch.zeros(1, 1, device=device).to_sparse()
    torch.hspmm(matrix(device), torch.ones(3, 4, device=device), out=out)
    return out


CALLS: dict[str, Callable[[str], Any]] = {
    "aten::threshold_backward (sparse)": rectified,
    "aten::addmm_ (sparse)": in_place,
    "aten::hspmm (sparse)": lambda device: torch.hspmm(matrix(device), torch.ones(3, 4, device=device)),
    "aten::hspmm.out (sparse)": resized,
    "aten::sspaddmm.out (sparse)": lambda device: torch.smm(matrix(device), torch.ones(3, 4, device=device)),
    "aten::_dimI (sparse)": lambda device: matrix(device)._dimI(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_missing_operator_runs_on_the_cpu_and_is_counted(name: str) -> None:
    expected = CALLS[name]("cpu")
    fallback.reset()
    found = CALLS[name]("mps")
    if isinstance(expected, torch.Tensor):
        assert found.is_mps
        assert found.layout == expected.layout
        torch.testing.assert_close(found.cpu(), expected)
    else:
        assert found == expected
    entry = next(entry for entry in fallback.report().operators if entry.operator == name)
    assert entry.calls == 1
    assert entry.way == "copied"
    assert entry.bytes > 0


def test_its_warning_names_the_operator_and_the_line() -> None:
    notices.forget()
    with pytest.warns(fallback.MetalFallbackWarning) as told:
        matrix("mps")._dimI()
    assert str(told[0].message).startswith("hf_mps: aten::_dimI (sparse) of float32[2, 3] has no Metal kernel and runs")
    assert told[0].filename == __file__


def test_everything_that_the_cpu_has_for_them_is_given_or_refused_with_a_reason() -> None:
    computed = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    with registration.suspended():
        on_cpu = torch._C._dispatch_get_registrations_for_dispatch_key("SparseCPU")
        lacking = {name for name in on_cpu if name.startswith("aten::") and not computed(name, "SparseMPS")}
    assert {f"{name} (sparse)" for name in lacking} <= set(fallback.registered()) | set(fallback.refused())
    assert fallback.refused()["aten::_to_sparse_csr (sparse)"].startswith("its result has a compressed sparse layout")
