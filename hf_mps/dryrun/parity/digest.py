"""A tensor in short: its norm and some thousand of its values, enough to tell two devices' results apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KEPT = 4096


@dataclass(frozen=True)
class Digest:
    """`norm` over all values, `values` at most KEPT of them, evenly spread, as float64 on the CPU."""

    norm: float
    values: Any

    def off(self, other: Digest, floor: float = 0.0) -> float:
        """How far `other` is from this one: the larger difference of norm and values, by this one's size or `floor`.

        Infinite where the shapes differ, or one holds a NaN or an infinity and the other does not.
        """
        if self.values.shape != other.values.shape:
            return float("inf")
        both = self.values.isfinite() & other.values.isfinite()
        if not bool((self.values.isfinite() == other.values.isfinite()).all()):
            return float("inf")
        ours, theirs = self.values[both], other.values[both]
        spread = float((ours - theirs).norm() / max(float(ours.norm()), floor, 1e-30))
        whole = abs(self.norm - other.norm) / max(self.norm, floor, 1e-30)
        return max(spread, whole) if whole == whole else spread


def digest(tensor: Any) -> Digest:
    """The digest of a tensor on any device; waits for the device."""
    import torch

    flat = tensor.detach().reshape(-1)
    count = flat.numel()
    some = flat if count <= KEPT else flat[torch.arange(KEPT, device=flat.device) * (count - 1) // (KEPT - 1)]
    norm = float(torch.linalg.vector_norm(flat.float())) if count else 0.0
    return Digest(norm, some.to("cpu").double())
