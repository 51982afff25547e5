"""What is sorted and where the result goes: what the ways of sorting share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_mps.kernels.release import Release


@dataclass(frozen=True)
class Work:
    """A sort of `given` along `dim` into `values` and `indices`: all ranks, or `count` of them from `offset` on."""

    release: Release
    given: Tensor
    values: Tensor
    indices: Tensor
    dim: int
    descending: bool
    stable: bool
    offset: int = 0
    count: int = 0

    @property
    def size(self) -> int:
        """Elements of a row."""
        return int(self.given.shape[self.dim])

    @property
    def rows(self) -> int:
        """Rows to sort."""
        return self.given.numel() // self.size

    def dense(self) -> Work:
        """This, or the same into contiguous tensors that are still to be copied."""
        if self.values.is_contiguous() and self.indices.is_contiguous():
            return self
        shape = self.values.shape
        return replace(
            self,
            values=torch.empty(shape, dtype=self.values.dtype, device=self.values.device),
            indices=torch.empty(shape, dtype=torch.int64, device=self.values.device),
        )

    def rows_of(self, *, last: bool) -> Tensor:
        """The rows as a matrix, in place where strides allow; else a contiguous copy with the dimension last."""
        if not last:
            return self.given.movedim(self.dim, -1).contiguous().view(self.rows, self.size)
        source = self.given if self.dim == self.given.dim() - 1 else self.given.movedim(self.dim, -1).contiguous()
        try:
            return source.view(self.rows, self.size)
        except RuntimeError:
            return source.contiguous().view(self.rows, self.size)

    def scratch(self, values: torch.dtype, indices: torch.dtype) -> tuple[Tensor, Tensor]:
        """Room for every row's values and places between two launches."""
        device = self.given.device
        shape = (self.rows, self.size)
        return torch.empty(shape, dtype=values, device=device), torch.empty(shape, dtype=indices, device=device)

    def finish(self, values: Tensor, indices: Tensor) -> None:
        """Copy sorted rows to the outputs, their dimension where it was."""
        shape = [*self.given.movedim(self.dim, -1).shape]
        self.values.copy_(values.view(shape).movedim(-1, self.dim))
        self.indices.copy_(indices.view(shape).movedim(-1, self.dim))
