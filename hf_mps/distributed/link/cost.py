"""What a training step sends over the link between hosts, and how long that takes; arithmetic alone, no torch.

The model: PyTorch's DistributedDataParallel reduces gradients in buckets of 25 MiB, the first of 1 MiB
(torch/csrc/distributed/c10d/reducer.hpp), each by a ring (gloo/allreduce.cc; NCCL's for large ones), in which every one
of n ranks sends 2(n-1)/n of the bytes and waits 2(n-1) times for its neighbour's first byte: Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_mps.core.text import duration

MIB = 2**20
FIRST_BUCKET, BUCKET = 1 * MIB, 25 * MIB
NONE, FP16, BF16, POWERSGD = "none", "fp16", "bf16", "powersgd"
RANK = 1
"""PowerSGD's rank: PyTorch's default, and what Vogels et al., 2019, find enough beside error feedback."""
LEAST_RATE = 2
"""PowerSGD leaves a matrix whole that it would not make this many times smaller (`min_compression_rate`)."""
BACKWARD = 2 / 3
"""The backward pass's share of a step: two products of matrices for each one of the forward pass."""
LOCAL_STEPS = 8
"""The number of local steps that is weighed where the recipe names none."""


@dataclass(frozen=True)
class Link:
    """A link between two hosts: bits a second, and seconds from one to the other."""

    bandwidth: float
    latency: float

    def all_reduce(self, size: float, calls: int, ranks: int) -> float:
        """Return the seconds that `calls` all-reduces of `size` bytes together take over a ring of `ranks`."""
        if ranks < 2:
            return 0.0
        return calls * 2 * (ranks - 1) * self.latency + 8 * traffic(size, ranks) / self.bandwidth

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e9:.3g} Gbit/s, {1e3 * self.latency:.3g} ms"


def traffic(size: float, ranks: int) -> float:
    """Return the bytes that each rank sends in a ring's all-reduce of `size` bytes."""
    return 2 * (ranks - 1) / ranks * size


@dataclass(frozen=True)
class Gradients:
    """The gradients of a model: the shape of each trained parameter, all of `width` bytes an element."""

    shapes: Sequence[tuple[int, ...]]
    width: int = 4

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def buckets(self) -> int:
        """How many buckets DistributedDataParallel reduces, without rounding to whole parameters."""
        size = self.elements * self.width
        return 1 + max(0, math.ceil((size - FIRST_BUCKET) / BUCKET)) if size else 0

    def sent(self, compression: str, width: int | None = None) -> tuple[int, int]:
        """Return the bytes that a step reduces under a compression, and by how many calls."""
        width = width or self.width
        if compression in (FP16, BF16):
            return self.elements * min(2, width), self.buckets
        if compression != POWERSGD:
            return self.elements * width, self.buckets
        elements = 0
        for shape in self.shapes:
            rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
            small = RANK * (rows + columns)
            whole = len(shape) < 2 or small * LEAST_RATE >= rows * columns
            elements += math.prod(shape) if whole else small
        return elements * width, 3 * self.buckets  # what stays whole, then P, then Q (powerSGD_hook)


@dataclass(frozen=True)
class Way:
    """A way to bring ranks together, with what a step sends (bytes a rank) and how long that takes (seconds)."""

    words: str
    sent: float
    seconds: float

    @property
    def amount(self) -> str:
        return f"{self.sent / MIB:.3g} MiB in {brief(self.seconds)}"

    def __str__(self) -> str:
        return f"{self.words} {self.amount}"


def ways(gradients: Gradients, link: Link, ranks: int, local_steps: int = LOCAL_STEPS) -> dict[str, Way]:
    """Return every way that a recipe's `link` section offers, with what a step costs on average."""
    found = {}
    for compression in (NONE, BF16, POWERSGD):
        size, calls = gradients.sent(compression)
        words = "as it is" if compression == NONE else f"link.compression={compression}"
        found[compression] = Way(words, traffic(size, ranks), link.all_reduce(size, calls, ranks))
    size, calls = gradients.elements * gradients.width, len(gradients.shapes)  # LocalSGD reduces each weight by itself
    seconds = link.all_reduce(size, calls, ranks) / local_steps
    found["local_steps"] = Way(f"link.local_steps={local_steps}", traffic(size, ranks) / local_steps, seconds)
    return found


def step(compute: float, sending: float) -> float:
    """Return the seconds of a step that computes for `compute` and sends for `sending` seconds.

    DistributedDataParallel sends while the backward pass runs, which takes BACKWARD of a step; what is left over is
    waited for.
    """
    backward = BACKWARD * compute
    return compute - backward + max(backward, sending)


def advice(found: Mapping[str, Way]) -> str:
    """Return in one clause from which step on each way costs nothing, as it is sent while the step computes."""
    least = {name: brief(way.seconds / BACKWARD) for name, way in found.items()}
    return f"nothing is waited for where a step computes for {least[NONE]}, with bf16 {least[BF16]}"


def brief(seconds: float) -> str:
    """Seconds in words, `12 ms` below a second."""
    return duration(seconds) if seconds >= 0.9995 else f"{1e3 * seconds:.3g} ms"
