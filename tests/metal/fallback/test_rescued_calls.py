"""Which errors of Metal's kernels rescue takes to the CPU, by the words of PyTorch's sources, and which it must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from inline_snapshot import snapshot

from hf_mps.metal import fallback
from hf_mps.metal.fallback import registration
from hf_mps.metal.fallback.accounting import MetalFallbackWarning
from hf_mps.metal.fallback.rescue import Rescue

STUB = "DispatchStub: missing kernel for mps"
ASSERTED = (
    'false INTERNAL ASSERT FAILED at "aten/src/ATen/native/DispatchStub.cpp":226, please report a bug to PyTorch. '
)
SAID = {
    "a stub without Metal's kernel": NotImplementedError(STUB),
    "the same as an assertion": RuntimeError(ASSERTED + STUB),
    "a dtype that a kernel is not made for": NotImplementedError("\"odd_mps\" not implemented for 'Long'"),
    "a half-precision one": RuntimeError("\"odd_mps\" not implemented for 'Half'"),
    "a graph's limit": RuntimeError("MPSGraph does not support tensor dims larger than INT_MAX"),
    "the same, misspelt in torch 2.9": RuntimeError("MPSGaph does not support tensor dims larger than INT_MAX"),
    "an index beyond 32 bits": RuntimeError(
        "nonzero is not supported for tensors with more than INT_MAX elements, See"
    ),
    "tiles of macOS 15": RuntimeError(
        "Tiling of batch matmul for larger than 2**32 entries only available from MacOS15"
    ),
    "a dtype of a kernel": TypeError("Trying to convert Long to the MPS backend but it does not have support for it."),
}


@pytest.fixture
def odd() -> Iterator[Callable[[Exception | None], Any]]:
    """Operators whose Metal kernels raise what they are told to, after they have written to what they change."""
    library = torch.library.Library("oddly", "DEF")
    raised: list[Exception | None] = [None]

    def metal(x: torch.Tensor) -> torch.Tensor:
        if raised[0] is not None:
            raise raised[0]
        return x + 1

    def metal_(x: torch.Tensor) -> torch.Tensor:
        x.zero_()
        return metal(x)

    for schema, name, on_cpu, on_metal in (
        ("plus(Tensor x) -> Tensor", "plus", lambda x: x + 1, metal),
        ("plus_(Tensor(a!) x) -> Tensor(a!)", "plus_", lambda x: x.add_(1), metal_),
    ):
        library.define(schema)
        library.impl(name, on_cpu, "CPU")
        library.impl(name, on_metal, "MPS")

    def told(error: Exception | None) -> Any:
        raised[0] = error
        return torch.ops.oddly

    yield told
    library._destroy()


@pytest.mark.parametrize("name", SAID)
def test_a_kernel_that_lacks_is_replaced_by_the_cpus_and_named(name: str, odd: Any) -> None:
    with pytest.raises(type(SAID[name])):
        odd(SAID[name]).plus(torch.ones(2, device="mps"))
    with Rescue(share=False), pytest.warns(MetalFallbackWarning, match="oddly::plus of float32") as said:
        found = odd(SAID[name]).plus(torch.ones(2, device="mps"))
    assert found.tolist() == [2.0, 2.0]
    assert found.is_mps
    assert "and runs on the CPU; each such call waits" in str(said[0].message)
    assert "INTERNAL ASSERT" not in str(said[0].message)
    assert [entry.operator for entry in fallback.report().operators] == ["oddly::plus"]


@pytest.mark.parametrize("name", ["a stub without Metal's kernel", "a dtype that a kernel is not made for"])
def test_what_may_be_half_written_is_not_computed_again(name: str, odd: Any) -> None:
    values = torch.ones(2, device="mps")
    with Rescue(share=False), pytest.raises(RuntimeError) as caught:
        odd(SAID[name]).plus_(values)
    assert caught.value is SAID[name]
    assert values.tolist() == [0.0, 0.0], "as Metal's kernel left it"
    assert not fallback.report().operators


@pytest.mark.parametrize(
    "words", ["index 3 is out of bounds", "MPS backend out of memory (MPS allocated: …) not supported"]
)
def test_other_errors_stay_what_they_are(words: str, odd: Any) -> None:
    with Rescue(share=False), pytest.raises(RuntimeError, match="out of"):
        odd(RuntimeError(words)).plus(torch.ones(2, device="mps"))
    assert not fallback.report().operators


def test_a_pool_of_sizes_that_do_not_divide_trains_without_rescue(simulated: None) -> None:
    rows = torch.arange(49.0).view(1, 1, 7, 7)
    there = rows.to("mps").requires_grad_()
    with registration.suspended(), pytest.raises(NotImplementedError, match="Adaptive pool MPS"):
        F.adaptive_avg_pool2d(there, 3)
    with pytest.warns(MetalFallbackWarning, match=r"must be divisible by output sizes\) and runs"):
        found = F.adaptive_avg_pool2d(there, 3)
    with pytest.warns(MetalFallbackWarning, match="_adaptive_avg_pool2d_backward of"):
        found.square().sum().backward()
    here = rows.requires_grad_()
    right = F.adaptive_avg_pool2d(here, 3)
    right.square().sum().backward()
    torch.testing.assert_close(found.cpu(), right)
    torch.testing.assert_close(there.grad.cpu(), here.grad)
    assert {entry.operator for entry in fallback.report().operators} >= {"aten::_adaptive_avg_pool2d"}


def test_a_pool_that_metal_has_stays_there(simulated: None) -> None:
    there = torch.arange(36.0, device="mps").view(1, 1, 6, 6).requires_grad_()
    F.adaptive_avg_pool2d(there, 3).sum().backward()
    assert not fallback.report().operators


def test_the_table_says_what_its_seconds_leave_out() -> None:
    torch.ones(3, device="mps").mode()
    assert str(fallback.report()).splitlines()[-1] == snapshot(
        "  not in these seconds: at each call the GPU runs out of work, as nothing is queued meanwhile"
    )
