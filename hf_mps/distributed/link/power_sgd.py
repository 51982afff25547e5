"""PyTorch's PowerSGD hook over gradients in one order, so that a run that is resumed goes on to the last bit.

DistributedDataParallel forms its buckets anew after the first step of each process. The hook keeps errors and factors
as tensors in a bucket's order (powerSGD_hook.py): in a resumed run they would lie under other gradients. And a matrix
product rounds by where its operands lie, so that even the same numbers would come out otherwise in the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock

Pieces = dict[int, dict[str, Tensor]]
"""By a parameter's number in its model: its `error`, and where it is compressed the factor `q` of its last gradient."""


class PowerSGD:
    """The hook of one model; `state` is PyTorch's, once the hook is registered."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self.state: Any = None
        self._numbers: dict[int, int] = {}
        self._layouts: dict[int, tuple[int, ...]] = {}  # of each bucket, the numbers of its parameters
        self._shapes: list[torch.Size] = []
        self._pieces: Pieces = {}

    def register(self, model: Any) -> None:
        """Have the DistributedDataParallel `model` reduce its gradients by it."""
        parameters = list(model.parameters())
        self._numbers = {id(each): number for number, each in enumerate(parameters)}
        self._shapes = [each.shape for each in parameters]
        self.state = stock.PowerSGDState(process_group=None, **self._settings)
        model.register_comm_hook(self.state, lambda state, bucket: self._reduce(bucket))

    def kept(self) -> dict[str, Any]:
        """What a resumed run needs of this rank: `iter`, the hook's count of steps, and `pieces`."""
        return {"iter": self.state.iter, "pieces": self._pieces | self._taken_apart()}

    def go_on(self, kept: dict[str, Any]) -> None:
        """Go on from what `kept` returned."""
        self._forget()
        self.state.iter, self._pieces = kept["iter"], kept["pieces"]

    def _reduce(self, bucket: Any) -> Any:
        ordered = _Ordered(bucket, self._numbers)
        if self._layouts.get(ordered.index()) != ordered.layout:
            self._pieces |= self._taken_apart()
            self._forget()
            self._put_together(ordered.index(), ordered.layout, ordered.buffer())
        return stock.powerSGD_hook(self.state, ordered).then(lambda done: ordered.bring(done.value()))

    def _forget(self) -> None:
        state = self.state
        for one in (self._layouts, state.error_dict, state.p_memory_dict, state.q_memory_dict):
            one.clear()

    def _taken_apart(self) -> Pieces:
        """Copies of what the hook has in its buckets now."""
        found: Pieces = {}
        for index, layout in self._layouts.items():
            error, factor = (of.get(index) for of in (self.state.error_dict, self.state.q_memory_dict))
            if error is not None:
                sizes = [self._shapes[number].numel() for number in layout]
                found |= {
                    number: {"error": part.clone()} for number, part in zip(layout, error.split(sizes), strict=True)
                }
            if factor is not None:
                matrices = list(self._compressed(layout))
                for (number, *_), part in zip(matrices, factor.split([size for *_, size in matrices]), strict=True):
                    found.setdefault(number, {})["q"] = part.clone()
        return found

    def _put_together(self, index: int, layout: tuple[int, ...], like: Tensor) -> None:
        """Lay the pieces as the hook wants them in a bucket of these parameters, where there are any."""
        self._layouts[index] = layout
        state, pieces = self.state, [self._pieces.get(number, {}) for number in layout]
        if all("error" in piece for piece in pieces):
            state.error_dict[index] = torch.cat([piece["error"] for piece in pieces]).to(like.device)
        matrices = list(self._compressed(layout))
        if matrices and all("q" in self._pieces.get(number, {}) for number, *_ in matrices):
            factors = [self._pieces[number]["q"] for number, *_ in matrices]
            state.q_memory_dict[index] = torch.cat(factors).to(like.device)
            state.p_memory_dict[index] = like.new_empty(sum(size for _, size, _ in matrices))

    def _compressed(self, layout: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Each matrix that the hook compresses, with the sizes of its factors P and Q, in the order of these."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for number in layout:
            shape = self._shapes[number]
            rows, columns = shape[0] if shape else 1, shape[1:].numel()
            rank = min(rows, columns, self.state.matrix_approximation_rank)
            test: Any = stock._should_compress
            if test(rows, columns, rank, self.state.min_compression_rate)[0]:
                by_shape.setdefault((rows, columns), []).append(number)
        for (rows, columns), numbers in by_shape.items():
            rank = min(rows, columns, self.state.matrix_approximation_rank)
            yield from ((number, rows * rank, columns * rank) for number in numbers)


class _Ordered:
    """A bucket of DistributedDataParallel's with its gradients in the order of their parameters in the model."""

    def __init__(self, bucket: Any, numbers: dict[int, int]) -> None:
        found = sorted(
            (
                (numbers[id(each)], gradient)
                for each, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
            ),
            key=lambda one: one[0],
        )
        self.layout = tuple(number for number, _ in found)
        self.index, self.is_last = bucket.index, bucket.is_last
        self._bucket = bucket
        self._theirs = [gradient for _, gradient in found]
        self._sizes = [gradient.numel() for gradient in self._theirs]
        self._buffer = torch.cat([gradient.reshape(-1) for gradient in self._theirs])

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        parts = torch.split(self._buffer, self._sizes)
        return [part.view(each.shape) for part, each in zip(parts, self._theirs, strict=True)]

    def bring(self, reduced: Tensor) -> Tensor:
        """Lay the result where DistributedDataParallel wants it, and return that."""
        for part, each in zip(torch.split(reduced, self._sizes), self._theirs, strict=True):
            each.copy_(part.view(each.shape))
        found: Tensor = self._bucket.buffer()
        return found
