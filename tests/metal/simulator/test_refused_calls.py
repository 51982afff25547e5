"""Calls that Metal's kernels refuse, as they refuse them: their words, their conditions, and nothing beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from hf_mps.core.releases import torch_release
from hf_mps.metal.fallback import registration
from hf_mps.metal.simulator import strictness

pytestmark = pytest.mark.usefixtures("mps", "bare")

Call = Callable[[], torch.Tensor]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="mps")


def behind_two_billion(offset: int) -> torch.Tensor:
    """A matrix at the beginning of a storage of more elements than an int counts; nothing is written to it."""
    storage = torch.empty(2**31 + 1024, dtype=torch.float16, device="mps")
    return storage[offset:].as_strided((16, 16), (16, 1))


REFUSED: dict[str, tuple[Call, str]] = {
    "pool to sizes that do not divide": (
        lambda: F.adaptive_avg_pool2d(ones(1, 1, 7, 7), 3),
        r"^Adaptive pool MPS: input sizes must be divisible by output sizes\. Non-divisible input sizes are not "
        r"implemented on MPS device yet\. For now, you can manually transfer tensor to cpu in this case\. Please refer "
        r"to \[this issue\]\(https://github\.com/pytorch/pytorch/issues/96056\)$",
    ),
    "pool in one dimension": (
        lambda: F.adaptive_avg_pool1d(ones(1, 1, 7), 3),
        "input sizes must be divisible by output",
    ),
    "pool to larger sizes": (
        lambda: F.adaptive_avg_pool2d(ones(1, 1, 3, 3), 7),
        "^Adaptive pool MPS: output sizes must be divisible by input sizes",
    ),
    "pool to a size larger and one smaller": (
        lambda: F.adaptive_avg_pool2d(ones(1, 1, 2, 8), 4),
        "^Adaptive pool MPS: Input height and width must both be greater than, or equal to, or lesser than output",
    ),
    "maximum of them": (lambda: F.adaptive_max_pool2d(ones(1, 1, 2, 8), 4), "Input height and width must both be"),
    "transposed convolution in half precision": (
        lambda: F.conv_transpose3d(ones(1, 1, 2, 2, 2, dtype=torch.float16), ones(1, 1, 2, 2, 2, dtype=torch.float16)),
        "^ConvTranspose 3D with BF16 or FP16 types is not supported on MPS$",
    ),
    "convolution of integers": (
        lambda: F.conv1d(ones(1, 1, 4, dtype=torch.int64), ones(1, 1, 2, dtype=torch.int64)),
        "^Convolution is supported only for Floating types$",
    ),
    "product with a dimension beyond 32 bits": (
        lambda: torch.bmm(ones(1, 1, 1).expand(1, 2**32 + 1, 1), ones(1, 1, 1)),
        r"^Output dim sizes larger than 2\*\*32 elements for matmul not supported on MPS device\.$",
    ),
    "mask over too much": (
        lambda: ones(1).expand(2**32).masked_fill_(ones(1, dtype=torch.bool), 0.0),
        r"^masked_fill not supported for tensors of more than 2\*\*32 elements$",
    ),
}
if torch_release() < (2, 14):
    REFUSED["nonzero of too much"] = (
        lambda: ones(1, dtype=torch.bool).expand(2**31).nonzero(),
        "^nonzero is not supported for tensors with more than INT_MAX elements, +See https://github.com/pytorch/pytorch",
    )
if torch_release() >= (2, 10):
    REFUSED["product of a view of a large storage"] = (
        lambda: behind_two_billion(16) @ ones(16, 16, dtype=torch.float16),
        "^MPSGraph does not support tensor dims larger than INT_MAX$",
    )


# Its storage is larger than a buffer of an 8 GB Mac may be.
LARGE = "product of a view of a large storage"


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.default_mac) if n == LARGE else n for n in REFUSED])
def test_what_metal_refuses_is_refused_in_its_words(name: str) -> None:
    call, words = REFUSED[name]
    # The fallback takes such pools to the CPU.
    with registration.suspended(), pytest.raises(RuntimeError, match=words):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda device: F.adaptive_avg_pool2d(torch.ones(1, 2, 7, 7, device=device), 1),
        lambda device: F.adaptive_avg_pool2d(torch.ones(1, 2, 6, 9, device=device), 3),
        lambda device: F.adaptive_avg_pool2d(torch.ones(1, 2, 3, 3, device=device), 6),
        lambda device: F.adaptive_max_pool2d(torch.ones(1, 2, 7, 7, device=device), 3),
        lambda device: F.conv_transpose3d(*[torch.ones(1, 1, 2, 2, 2, device=device)] * 2),
        pytest.param(
            lambda device: F.conv1d(torch.ones(1, 1, 65_540, device=device), torch.ones(1, 1, 2, device=device)),
            marks=pytest.mark.macos(15, 1),
        ),
    ],
    ids=["to one", "divisible", "to a multiple", "maximum", "float32", "long, from macOS 15.1 on"],
)
def test_what_is_beside_it_is_computed(call: Callable[[str], torch.Tensor]) -> None:
    assert torch.equal(call("mps").cpu(), call("cpu"))


@pytest.mark.default_mac
def test_a_large_storage_is_no_matter_where_a_tensor_begins_with_it() -> None:
    assert (behind_two_billion(0) @ ones(16, 16, dtype=torch.float16)).shape == (16, 16)


def test_without_refusals_the_device_computes_what_the_cpu_does() -> None:
    rows = torch.arange(49.0).view(1, 1, 7, 7)
    with strictness.off("refusals"):
        found = F.adaptive_avg_pool2d(rows.to("mps"), 3)
    assert torch.equal(found.cpu(), F.adaptive_avg_pool2d(rows, 3))


def test_padding_of_more_than_three_dimensions_goes_another_way_and_says_so() -> None:
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with pytest.warns(
            UserWarning, match="The constant padding of more than 3 dimensions is not currently supported"
        ):
            padded = F.pad(ones(1, 1, 1, 1, 1), (0, 1) * 4, value=2.0)
    finally:
        torch.set_warn_always(always)
    assert padded.shape == (1, 2, 2, 2, 2)
    assert padded.sum().item() == 1 + 15 * 2


def test_before_macos_15_1_a_convolution_is_at_most_65536_wide(run_python: Callable[..., object]) -> None:
    code = (
        "import torch, torch.nn.functional as F\n"
        "weight = torch.ones(1, 1, 1, device='mps')\n"
        "for size in (65536, 65537):\n"
        "    try: print(F.conv1d(torch.ones(1, 1, size, device='mps'), weight).shape[-1])\n"
        "    except NotImplementedError as error: print(error)"
    )
    done = run_python("-c", code, env={"HF_MPS_SIMULATE": "m1-8gb"})
    assert done.stdout.splitlines() == ["65536", "Output channels > 65536 not supported at the MPS device. "], (
        done.stderr
    )
