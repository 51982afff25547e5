"""How much memory a device has, holds now, and held at most. All figures in bytes.

Metal has no call for a peak (torch/mps/__init__.py), nor has a process for its resident memory that can be set back, so
both are sampled; CUDA counts its own.
"""

from __future__ import annotations

import gc
import os
import threading

from hf_mps.core.choice import Choice
from hf_mps.metal.device import machine

INTERVAL = 0.05
REFUSALS = ("MPS backend out of memory", "Invalid buffer size: ")
"""How Metal's errors of too little memory begin: in all, and for one tensor (MPSAllocator.mm, alloc_buffer_block).

The second comes above MTLDevice.maxBufferLength, which attention over a long batch meets first on a small Mac.
"""

JOINED = "2.14"
"""The release whose allocator joins what is free (pytorch pull request 188045)."""


def beside_live(torch: str) -> str:
    """Return what the process holds beside live tensors on Metal with a release of torch, for people who plan.

    The heaps: torch, MPSAllocator.h, kSmallHeap, kLargeHeap and kXLargeHeapU; one of 1 GB serves the buffers from 10 to
    512 MB. The simulated device counts them so (simulator/native/heaps.cpp): after some steps of one shape its driver
    held 0.62 GiB more than the most that was live for GPT-2 (3.45 GiB), 0.76 for MiniLM (1.35), 0.93 for a small ViT
    (1.31), 0.92 for a tiny BERT (0.09). No real Mac has reported a fixed shape's peak yet: the 11.3 GB beside 1.5 of
    karpathy/nanochat#838 compare the driver with what is live after a step, when its activations are gone
    (karpathy/nanochat pull request 839). Changing shapes are on record: 72 GB beside 6.7 with torch 2.13
    (kyutai-labs/pocket-tts pull request 255). MPSGraph's memory grows with the shapes too, by 13.7 GB over 315 of them
    (pytorch#181485): torch.mps.driver_allocated_memory() after the first steps is the truth on a Mac.
    """
    heaps = "a Mac's driver holds 0.6 to 0.9 GiB more in heaps that are not full, and MPSGraph's scratch"
    from packaging.version import Version

    if Version(torch) >= Version(JOINED):
        return heaps
    return (
        f"{heaps}; before torch {JOINED} it grows with each new shape of a batch (72 GB beside 6.7 in "
        "kyutai-labs/pocket-tts#255) until the guard shape-growth gives memory back"
    )


def total(device: str) -> int:
    """Return the bytes a device has in all: a GPU's own memory, or the machine's where CPU and GPU share it."""
    if device != "cuda":
        return machine.present().memory
    import torch

    return int(torch.cuda.mem_get_info()[1])


def recommended(device: str) -> int | None:
    """Return the bytes a process should use: Metal's recommendedMaxWorkingSetSize on mps, None elsewhere.

    PyTorch refuses at 1.7 times this figure; macOS swaps long before.
    """
    if device != "mps":
        return None
    import torch

    return int(torch.mps.recommended_max_memory())


def refused(error: BaseException) -> bool:
    """Return whether an error says that Metal lacks the memory a program asked for."""
    return isinstance(error, RuntimeError) and str(error).startswith(REFUSALS)


def current(device: str) -> int:
    """Return the bytes that tensors hold on a GPU now; on the CPU the resident memory of the process."""
    return _figure(device, mps="current_allocated_memory", cuda="memory_allocated")


def driver(device: str) -> int:
    """Return the bytes the process holds of the device now, free blocks and Metal's graphs included."""
    return _figure(device, mps="driver_allocated_memory", cuda="memory_reserved")


def _figure(device: str, **functions: str) -> int:
    if device not in functions:
        import psutil

        return int(psutil.Process().memory_info().rss)
    import torch

    return int(getattr(getattr(torch, device), functions[device])())


def release(device: str) -> None:
    """Give back what finished work held on `device`, before more is begun. Imports torch."""
    import torch

    gc.collect()
    if device != "cpu":
        getattr(torch, device).empty_cache()


class Peak:
    """The largest `driver` figure between entering and leaving, as a context manager or by `start` and `stop`.

    On Metal the allocator keeps what was freed, so a sample after a step still shows what the step needed; a light
    thread catches what is given back in between (empty_cache, memory pressure, the CPU's own). `sample` adds a point.
    On CUDA the driver figure is exact and no thread runs.
    """

    def __init__(self, device: str, interval: float = INTERVAL) -> None:
        """Watch `device` ('mps', 'cuda', 'cpu'), every `interval` seconds."""
        self._device = device
        self._interval = interval
        self._bytes = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def result(self) -> Choice[int]:
        """The peak so far in bytes, and how it was found."""
        if self._device == "cuda":
            return Choice(self._bytes, "counted by CUDA's allocator")
        what = "Metal memory of the process" if self._device == "mps" else "resident memory of the process"
        return Choice(self._bytes, f"{what}, sampled every {self._interval * 1000:.0f} ms and at each step")

    def start(self) -> None:
        """Begin anew."""
        self._bytes = 0
        if self._device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
        self.sample()
        if self._device != "cuda" and self._thread is None:
            self._over.clear()
            self._thread = threading.Thread(target=self._watch, name="hf_mps memory", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread and take a last sample."""
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None
        self.sample()

    def sample(self) -> int:
        """Take a sample now and return it, in bytes."""
        with _reading:
            if self._device == "cuda":
                import torch

                now = int(torch.cuda.max_memory_reserved())
            else:
                now = driver(self._device)
            self._bytes = max(self._bytes, now)
        return now

    def _watch(self) -> None:
        while not self._over.wait(self._interval):
            self.sample()

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


# A data loader may fork while the thread holds the allocator's lock inside torch: its child could then never free a
# tensor. A fork waits for the sample to end.
_reading = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_reading.acquire, after_in_parent=_reading.release, after_in_child=_reading.release)
