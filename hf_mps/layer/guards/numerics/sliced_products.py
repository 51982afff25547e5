"""sliced-products: a matrix product into a slice or into gaps is computed into memory of its own and copied."""

from __future__ import annotations

from functools import partial
from typing import Any

from hf_mps.core.original_call import OriginalCall
from hf_mps.layer.guards.kernel_overrides import Kernel, Tried

OPERATORS = {
    **dict.fromkeys(("mm.out", "bmm.out", "addmm.out", "addmm_"), ("sliced-products", "gapped-products")),
    **dict.fromkeys(("baddbmm.out", "baddbmm_"), ("sliced-baddbmm", "gapped-baddbmm")),
}
"""Operator -> its faults in hf_mps/metal/device/faults.py."""


class SlicedProducts(Tried):
    """Stands before the products that write into a given tensor, below autograd, until a trial finds them right.

    On macOS 14 `torch.mm(a, b, out=buffer[1])` leaves the buffer as it was, and on macOS 15 a product into a part of
    each row is mis-written. Since torch 2.14 only baddbmm does this. Products that make their result (`a @ b`) are
    not touched.
    """

    name = "sliced-products"
    what = (
        "before macOS 26 a matrix product that is written into a slice or between other columns (out=, addmm_) is lost"
        " or lands beside its place; since torch 2.14 only baddbmm's is"
    )
    until = "baddbmm checks its result's memory as mm does since torch 2.14"
    given = "slices as results"

    @property
    def patches(self) -> dict[str, Kernel]:
        """Its kernels before the device's."""
        return {
            f"aten::{name}": Kernel("_copied", name, when=_sliced, faults=faults) for name, faults in OPERATORS.items()
        }

    def _copied(self, name: str, stock: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        import torch

        if not self.needed:
            self.release()
            return stock(*args, **kwargs)
        self.acted("products into slices of a tensor are computed apart and copied there", aloud=False)
        place = kwargs.pop("out", args[0])
        found = stock.foreign(getattr(torch, name.removesuffix(".out").removesuffix("_")), *args, **kwargs)
        return place.resize_(found.shape).copy_(found)


def _sliced(*args: Any, out: Any = None, **_: Any) -> bool:
    """Whether the result's memory has an offset or gaps; of another dtype it is an error of the operator's own."""
    place = args[0] if out is None else out
    return place.dtype == args[-1].dtype and (place.storage_offset() > 0 or not place.is_contiguous())


def _right(name: str) -> bool:
    """Whether it writes into the second of two matrices, and into the first half of each row, and nowhere else."""
    import torch

    def written(device: str) -> Any:
        one = torch.arange(64.0, device=device).view(8, 8)
        pair = (one.unsqueeze(0),) * 2 if name.startswith("b") else (one, one)
        matrices, columns = torch.zeros(2, *pair[0].shape, device=device), torch.cat([pair[0] * 0] * 2, -1)
        for place in (matrices[1], columns[..., :8]):
            getattr(torch, name)(*pair[: "add" in name], *pair, out=place)
        return torch.cat([matrices.flatten(), columns.flatten()]).cpu()

    return torch.allclose(written("mps"), written("cpu"), rtol=1e-2)


GUARD = SlicedProducts({name: partial(_right, name) for name in ("mm", "bmm", "addmm", "baddbmm")})
