"""A loop over the positions of a row is followed for a few of them: a scan of a thousand calls the same at each.

Where three of the first rounds call the same, those up to the last ones are left out: what the second of the three
keeps counts for all of them, and its calls, forward and backward, are counted so often. The last rounds are followed,
since most is held there. Every tensor has the size that it has in the whole loop.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

LEAST, FIRST, ALIKE, LAST = 64, 5, 3, 3
"""Rounds of a loop that is shortened, followed ones before those left out, equal ones among these, and last ones.

As many each time: a checkpointed layer has to keep the same tensors when it is run again.
"""
CODE = ("transformers.models.", "transformers_modules.")
_STACK = torch.stack


@dataclass
class Round:
    """What one round called, the storages it made, and where it began: autograd's number, and the recorder's mark."""

    number: int
    mark: Any
    seen: list[Any] = field(default_factory=list)
    made: list[tuple[int, Any]] = field(default_factory=list)


class Loops:
    """Shortens the loops of a model's code while a `Memory` follows it."""

    def __init__(self) -> None:
        self.memory: Any = None
        self.current: Round | None = None
        self.left_out = 0
        """Rounds so far that were not followed."""
        self._few = (0, 0, 0)  # rounds of the last loop that were followed, which one counts for others, for how many
        self._spans: list[tuple[int, int, int]] = []
        self._begun: Any = None

    @contextmanager
    def shortened(self, memory: Any, *models: Any) -> Iterator[None]:
        """Shorten the loops of the code of `models` while the context lasts."""
        self.memory, self.current, self._begun = memory, None, None
        self._spans.clear()
        names = {type(each).__module__ for model in models if model is not None for each in model.modules()}
        with ExitStack() as stack:
            for name in names:
                if name.startswith(CODE):
                    stack.enter_context(patch.dict(vars(sys.modules[name]), {"range": self._range}))
            stack.enter_context(patch.object(torch, "stack", self._stack))
            yield

    def saw(self, func: Any, result: Any) -> None:
        """An operator was called, and is not recorded yet."""
        if self.current is not None:
            shape = result.shape if isinstance(result, torch.Tensor) else None
            self.current.seen.append((func, shape, self.memory.place()))
        elif self._spans and self.memory.recorder and (node := torch._C._current_autograd_node()) is not None:
            number, (low, high, count) = node._sequence_nr(), self._spans[-1]
            if low <= number < high and self._begun is None:
                self._begun = self.memory.recorder.mark()
            elif number < low:
                if self._begun is not None:
                    self.memory.recorder.repeat(self._begun, count)
                self._begun = None
                self._spans.pop()

    def _range(self, *given: int) -> Any:
        whole = range(*given)
        return self._rounds(whole) if len(whole) >= LEAST and self.current is None else whole

    def _rounds(self, whole: range) -> Iterator[int]:
        memory, rounds, place, counts = self.memory, list[Round](), 0, -1
        try:
            while place < len(whole):
                mark = memory.recorder.mark() if memory.recorder else None
                self.current = one = Round(torch._C._autograd._get_sequence_nr(), mark)
                yield whole[place]
                rounds.append(one)
                place += 1
                skipped = len(whole) - LAST - place
                if counts >= 0 and one.seen != rounds[counts].seen:
                    raise RuntimeError("the rounds of a loop differ")
                if len(rounds) == FIRST and self._alike(rounds[-ALIKE:]):
                    counts = len(rounds) - 2
                    self._leave_out(rounds[-2], one, skipped)
                    place += skipped
            self._few = len(rounds), counts, len(whole) - len(rounds)
        finally:
            self.current = None

    def _alike(self, rounds: Sequence[Round]) -> bool:
        first, *others = rounds
        kept = [[self.memory.kept(key, made) for key, made in one.made] for one in rounds[:2]]
        return bool(first.seen) and all(one.seen == first.seen for one in others) and kept[0] == kept[-1]

    def _leave_out(self, one: Round, last: Round, count: int) -> None:
        self.left_out += count
        for key, made in one.made:
            self.memory.multiply(key, made, count + 1)
        if self.memory.recorder:
            self.memory.recorder.repeat(last.mark, count)
        if torch.is_grad_enabled() and torch._C._current_autograd_node() is None:
            self._spans.append((one.number, last.number, count))

    def _stack(self, tensors: Any, dim: int = 0, **settings: Any) -> Any:
        rounds, counts, count = self._few
        if not count or settings or len(tensors) != rounds:
            return _STACK(tensors, dim, **settings)
        joined: Any = _Stack.apply
        return joined(dim, counts, count, *tensors)


class _Stack(torch.autograd.Function):
    """torch.stack of a loop's results, one of which counts for those that were left out."""

    @staticmethod
    def forward(ctx: Any, dim: int, place: int, count: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.given = dim, place + 1, count
        return _STACK([*tensors[:place], *[tensors[place]] * (count + 1), *tensors[place + 1 :]], dim)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        dim, place, count = ctx.given
        parts = [upstream.select(dim, number) for number in range(upstream.shape[dim])]  # as torch.stack's own
        return None, None, None, *parts[:place], *parts[place + count :]
