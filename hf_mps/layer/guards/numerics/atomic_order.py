"""atomic-order: under torch.use_deterministic_algorithms(True) the device adds up in one order."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from hf_mps.core.choice import Choice
from hf_mps.core.patching import OriginalCall
from hf_mps.layer.guards.base import Guard, tried
from hf_mps.layer.guards.kernel_overrides import Kernel
from hf_mps.layer.guards.numerics.ordered_sums import ORDERED

# Those that stay as they are: kernels of these names in the macOS wheels of torch 2.13 to 2.15 add with atomic
# operations. Under the flag F.interpolate has no use for trilinear's and nearest3d's.
UNORDERED = (
    "upsample_bicubic2d_backward",
    "upsample_nearest3d_backward",
    "_upsample_nearest_exact3d_backward",
    "upsample_trilinear3d_backward",
    "max_pool3d_with_indices_backward",
    "avg_pool3d_backward",
    "_embedding_bag_dense_backward",
    "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
)


PASSES = 8


class AtomicOrder(Guard):
    """Puts kernels before the device's from the first call on that asks for determinism; they look at the flag.

    Metal adds in any order where an index repeats. Under the flag torch does so all the same (embedding's backward), or
    raises an error (index_put_ and scatter_add): these get a fixed order. What has none says so once.
    """

    name = "atomic-order"
    what = (
        "two runs with one seed differ in their last bits, also under use_deterministic_algorithms(True): embedding's"
        " backward adds in any order"
    )
    until = "the oldest supported torch sums in order under that flag (pytorch#161029 and pull request #197506)"
    patches = {
        # Around the two functions that set the flag: a program that never calls them pays nothing.
        "torch:use_deterministic_algorithms": "_asked",
        "torch:set_deterministic_debug_mode": "_asked",
        **{f"aten::{name}": Kernel("_ordered", name, late=True) for name in ORDERED},
        **{f"aten::{name}": Kernel("_unordered", name, late=True) for name in UNORDERED},
    }

    _put = False

    def trial(self) -> Choice[bool]:
        """Whether equal backward passes of an embedding differ; what it does under the flag does not depend on that."""
        with self.left_alone():
            runs = [_embedding_gradient() for _ in range(PASSES)]
        passes = f"{PASSES} equal backward passes of an embedding"
        agree = all(torch.equal(each, runs[0]) for each in runs)
        return tried(not agree, f"{passes} differ", f"{passes} agree to the bit")

    def install(self, module: ModuleType) -> None:
        """Also look whether the flag was set before."""
        super().install(module)
        self._follow()

    def switched(self, on: bool) -> None:
        """Also where the flag was set while it was suspended."""
        if on:
            self.safely(self._follow)

    def _asked(self, stock: OriginalCall, *args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        self._follow()

    def _follow(self) -> None:
        if self._put or not torch.are_deterministic_algorithms_enabled():
            return
        self._put = True
        for target in (f"aten::{name}" for name in (*ORDERED, *UNORDERED)):
            if torch._C._dispatch_has_kernel_for_dispatch_key(target, "MPS"):
                self.arm(target)

    def _ordered(self, name: str, stock: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        if not torch.are_deterministic_algorithms_enabled():
            return stock(*args, **kwargs)
        # What it raises is the device's: no memory, a late error.
        found = stock.foreign(ORDERED[name], *args, **kwargs)
        if found is None:
            return stock(*args, **kwargs)
        self.acted("rows that share an index are added in one order: use_deterministic_algorithms(True)", aloud=False)
        return found

    def _unordered(self, name: str, stock: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        found = stock(*args, **kwargs)
        if torch.are_deterministic_algorithms_enabled():
            self.acted(f"{name} adds in any order on Metal, also under use_deterministic_algorithms: two runs differ")
        return found


def _embedding_gradient() -> Any:
    """Of 64 words that repeat 64 times each; its terms are not exact in float32."""
    words = torch.arange(64 * 64, device="cpu").remainder_(64)
    grad = torch.arange(64.0 * 64 * 16, device="cpu").remainder_(997).add_(1).reciprocal_().view(64 * 64, 16)
    return torch.ops.aten.embedding_dense_backward(grad.to("mps"), words.to("mps"), 64, -1, False).cpu()
