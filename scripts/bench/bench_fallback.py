"""The layer's fallback against PyTorch's copying one, in one process that alternates between them.

    python scripts/bench/bench_fallback.py
    python scripts/bench/bench_fallback.py --rounds 30 --operators channel_shuffle

For each operator and size: milliseconds a call of the bare CPU operator, of PyTorch's fallback and of the layer's, and
what each fallback adds to the CPU operator. Two bars: at 64 MB the layer adds at most a third of what PyTorch's adds,
and at 1 KB a call takes at most twice as long. Exit code 1 where one is missed. channel_shuffle stands for operators
without an out= form, whose result the CPU makes and the device must get by a copy: PyTorch makes two, and half of that
is the least; it is printed and not judged. Runs on a Mac or on the simulated device, whose synchronisation and copies
cost less than a Mac's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

# PyTorch reads its variable when it is loaded; the layer is registered and taken back here.
os.environ.update({"PYTORCH_ENABLE_MPS_FALLBACK": "1", "HF_MPS": "0", "HF_MPS_FALLBACK": "quiet"})

import measured_on
import torch
from steps import timed

WITHOUT_OUT = {"channel_shuffle"}
SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "64 MB": 64 << 20}
Call = Callable[[], Any]


def operators(size: int, device: str) -> dict[str, Call]:
    """A call of each operator on float32 tensors of `size` bytes: functional, in-place, reducing, several results."""
    count = size // 4
    flat = torch.rand(count, device=device) * 0.5 + 0.25
    channels = flat.view(1, 16, 4, -1)
    volume = flat.view(1, 1, 8, 8, -1)
    pooled = (8, 8, max(1, count // 256))
    return {
        "channel_shuffle": lambda: torch.channel_shuffle(channels, 4),
        "logit_": lambda: flat.logit_(0.3).clamp_(0.25, 0.75),
        "_adaptive_avg_pool3d": lambda: torch.nn.functional.adaptive_avg_pool3d(volume, pooled),
        "adaptive_max_pool3d": lambda: torch.nn.functional.adaptive_max_pool3d(volume, pooled, return_indices=True),
    }


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="alternations (default 15)")
    parser.add_argument("--operators", nargs="*", help="names as printed (default: all)")
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=list(SIZES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not torch.backends.mps.is_built():
        from hf_mps.metal import simulator

        simulator.load()
    print(measured_on.line())
    print(f"{'operator':<22}{'size':>6}{'CPU':>11}{'PyTorch':>11}{'hf_mps':>11}   time ratio  overhead ratio")
    missed = []
    for label in given.sizes:
        for name in operators(SIZES[label], "cpu"):
            if not given.operators or name in given.operators:
                bare, theirs, ours = measure(name, SIZES[label], given.rounds)
                missed += judge(name, label, bare, theirs, ours)
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


def measure(name: str, size: int, rounds: int) -> tuple[float, float, float]:
    """Median milliseconds a call of the bare CPU operator, PyTorch's fallback and the layer's."""
    from hf_mps.metal.fallback import registration

    on_cpu, on_device = operators(size, "cpu")[name], operators(size, "mps")[name]
    repeat = max(1, min(300, (64 << 20) // size))
    times: list[list[float]] = [[], [], []]

    def warm(call: Call) -> float:
        call()
        return timed(call, repeat)

    for _ in range(rounds):
        times[0].append(warm(on_cpu))
        times[1].append(warm(on_device))
        registration.start()
        times[2].append(warm(on_device))
        registration.stop()
    bare, theirs, ours = (statistics.median(each) for each in times)
    return bare, theirs, ours


def judge(name: str, label: str, bare: float, theirs: float, ours: float) -> list[str]:
    """Print a line; return what it misses."""
    ratio = ours / theirs
    overhead = (ours - bare) / (theirs - bare) if theirs > bare else float("nan")
    print(f"{name:<22}{label:>6}{bare:>11.4f}{theirs:>11.4f}{ours:>11.4f}{ratio:>13.2f}{overhead:>16.2f}", flush=True)
    if label == "1 KB" and ratio > 2:
        return [f"{name} at 1 KB takes {ratio:.2f} times as long as PyTorch's fallback (at most 2)"]
    if label == "64 MB" and overhead > 1 / 3 and name not in WITHOUT_OUT:
        return [f"{name} at 64 MB adds {overhead:.2f} of what PyTorch's fallback adds (at most 0.33)"]
    return []


if __name__ == "__main__":
    sys.exit(main())
