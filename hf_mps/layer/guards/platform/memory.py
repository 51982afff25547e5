"""Guards of memory.

memory-budget: a person is told before macOS begins to swap; no limit changes.
shape-growth: under memory pressure, blocks that the allocator keeps are given back.
memory-metrics: skip_memory_metrics=False reports a peak.
oom-text: the searches for a batch size know Metal's two errors.
"""

from __future__ import annotations

import inspect
import os
from time import monotonic
from types import ModuleType
from typing import Any

import torch

from hf_mps.core.choice import Choice
from hf_mps.core.patching import in_lightning
from hf_mps.core.text import gib
from hf_mps.layer.guards import training_hooks
from hf_mps.layer.guards.base import Guard, LibraryGuard
from hf_mps.layer.guards.platform.batches import tensors
from hf_mps.metal.device import machine, memory
from hf_mps.metal.device.memory import Peak

VARIABLE = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
PYTORCHS = 1.7
"""PyTorch's own limit, as a share of Metal's recommended maximum (MPSAllocator.h, default_high_watermark_ratio)."""
NEAR = 0.95
"""Share of the recommended maximum from which on the user is told."""
FULL = 0.03
"""Share of the machine's memory that is left when everything else has to be swapped out."""
EVERY = 1.0
"""Seconds between two looks; one takes some ten microseconds."""


class MemoryBudget(Guard):
    """Looks at the figures once a second, at a batch or an optimizer's step, and speaks once.

    It sets no limit. A lower one would end runs that stock PyTorch finishes by swapping a little, and
    set_per_process_memory_fraction moves the high watermark alone: on a Mac of 36 GB and more the machine's memory is
    below the low one (1.4 times the recommended maximum), above which PyTorch first collects what it keeps. Both could
    be set by environment variables before the allocator is made, but a process would hand them to its children, where
    they look like the user's word, and each step above a lower low watermark commits more often and takes longer.
    """

    name = "memory-budget"
    what = "PyTorch's limit, 1.7 times Metal's recommended maximum, is above the Mac's memory, so the Mac swaps instead"
    issue = "https://github.com/pytorch/pytorch/issues/105839"
    until = "PyTorch itself warns before a process takes more than Metal recommends"
    patches = {**training_hooks.after_steps("_look"), **training_hooks.batches("_at_batch")}

    def reset(self) -> None:
        """Also look anew."""
        super().reset()
        self._told, self._looked = False, 0.0

    def applies(self) -> Choice[bool]:
        """Return whether the machine's memory is known; the reason has PyTorch's limit beside it, whoever set that."""
        physical, recommended = _sizes()
        if not physical or not recommended:
            return Choice(False, "the machine's memory is not known")
        given = os.environ.get(VARIABLE)
        label = machine.present().label
        limit = f"takes up to {gib(PYTORCHS * recommended)}" if given is None else f"has the user's {VARIABLE}={given}"
        return Choice(
            True,
            f"tells before macOS swaps: PyTorch {limit}, the machine has {gib(physical)}{label}, of which "
            f"{gib(recommended)} are recommended",
        )

    def _at_batch(self, batch: Any) -> Any:
        self._look()
        return batch

    def _look(self) -> None:
        now = monotonic()
        if not self._told and now - self._looked >= EVERY:
            self._looked = now
            line = _warning()
            if line:
                self._told = True
                self.acted(line)


def _warning() -> str:
    """Return what is to be said of the memory now, or an empty string."""
    import psutil

    physical, recommended = _sizes()
    held = memory.driver("mps")
    if recommended and held > NEAR * recommended:
        most = f"{gib(recommended)}{machine.present().label}"
        what = f"this process holds {gib(held)} of GPU memory, and macOS recommends at most {most}"
    elif held > physical / 4 and psutil.virtual_memory().available < FULL * physical:
        left = gib(psutil.virtual_memory().available)
        what = f"{left} of {gib(physical)}{machine.present().label} are left, with {gib(held)} held here"
    else:
        return ""
    return (
        f"{what}: soon macOS swaps, and each step takes several times as long; next: a smaller batch with gradient "
        f"accumulation for the same one, gradient checkpointing, shorter sequences, or other programs closed"
    )


def _sizes() -> tuple[int, int]:
    """Bytes of the machine, and those that Metal recommends as a maximum."""
    return memory.total("mps"), memory.recommended("mps") or 0


MANY = 16
"""Lengths from which on a shorter list of them is suggested."""
PRESSURE = 0.7
"""Share of the recommended maximum that the process holds when it is time to give something back."""
GROWN = 0.1
"""Share of it by which memory has grown since the loop settled, and that is idle: less is not worth the wait."""
SETTLED = 4
"""Looks after which a loop of one shape holds all that it needs, the optimizer's state included."""
APART = 32
"""Looks between two releases: each waits for the GPU, and the next step has its memory mapped anew.

It also compiles its graphs anew: empty_cache forgets them (pytorch#181485), and so gives back what
they hold, the larger part where shapes are many.
"""


class ShapeGrowth(Guard):
    """Looks at memory after each optimizer step and at batches of new shapes; counts the lengths of the batches.

    A loop of one shape holds the same after every step, whatever its size, and is left alone. Blocks of the step before
    lie idle between any two steps: only growth shows that they are for shapes that do not come again.
    """

    name = "shape-growth"
    what = "the allocator keeps whole buffers for each size, so memory grows with every new shape of a batch"
    # Whether it grows shows only as a loop runs.
    always = f"releases idle memory when it grows above {PRESSURE:.0%} of what is recommended"
    patches = {**training_hooks.after_steps("_look"), **training_hooks.batches("_at_batch")}

    def reset(self) -> None:
        """Also forget the shapes that have come, and what the loop held."""
        super().reset()
        self._shapes: set[tuple[Any, ...]] = set()
        self._lengths: set[tuple[Any, ...]] = set()  # the same without the number of rows, which a last batch changes
        self._begin(wait=0)

    def _begin(self, wait: int) -> None:
        self._looks, self._wait = 0, wait
        self._held = 0  # bytes when the loop had settled

    def _at_batch(self, batch: Any) -> Any:
        shape = tuple(each.shape for each in tensors(batch))
        if shape not in self._shapes:
            # Here too, as an evaluation has no optimizer's steps.
            if self._shapes:
                self._look()
            self._shapes.add(shape)
            before = len(self._lengths)
            self._lengths.add(tuple(each[1:] for each in shape))
            if before < len(self._lengths) == MANY:
                self.acted(
                    f"batches of {MANY} different lengths so far: Metal compiles graphs and keeps memory for each; "
                    "next: few fixed lengths, for example DataCollatorWithPadding(tokenizer, pad_to_multiple_of=64)"
                )
        return batch

    def _look(self) -> None:
        """Release idle memory where the process holds much, and more than when the loop had settled."""
        self._looks += 1
        if self._looks == SETTLED:
            self._held = memory.driver("mps")
        if self._looks <= max(SETTLED, self._wait):
            return
        driver, recommended = memory.driver("mps"), memory.recommended("mps") or 0
        idle = driver - memory.current("mps")
        if driver <= PRESSURE * recommended or min(driver - self._held, idle) <= GROWN * recommended:
            return
        torch.mps.empty_cache()
        self._begin(wait=APART)
        self.acted("under memory pressure, blocks kept for batches of other shapes were given back", aloud=False)


_PEAK = "_hf_mps_peak"


class MemoryMetrics(Guard):
    """Samples while Trainer's own thread watches the CPU's memory, and puts the peak where Trainer has words."""

    name = "memory-metrics"
    what = (
        "skip_memory_metrics=False puts words in the place of the peak on mps, on which log_metrics ends in a TypeError"
    )
    issue = (
        "https://github.com/huggingface/transformers/blob/main/src/transformers/trainer_utils.py (TrainerMemoryTracker)"
    )
    until = "torch.mps has max_memory_allocated and the oldest supported transformers uses it"
    patches = {
        # Two methods that do not look at who called them.
        "transformers.trainer:TrainerMemoryTracker.peak_monitor_func": "_watch",
        "transformers.trainer:TrainerMemoryTracker.stop": "_stop",
    }

    def applies(self) -> Choice[bool]:
        """Return whether torch has no peak for mps; transformers then has none either."""
        if hasattr(torch.mps, "max_memory_allocated"):
            return Choice(False, "torch.mps has max_memory_allocated")
        return Choice(True, "torch.mps has no call for a peak, so it is sampled")

    def _watch(self, stock: Any, tracker: Any) -> None:
        # It is None in a training on the CPU, which is to leave the device alone.
        if tracker.torch is None:
            stock(tracker)
            return
        with Peak("mps") as peak:
            setattr(tracker, _PEAK, peak)
            stock(tracker)

    def _stop(self, stock: Any, tracker: Any, stage: str) -> None:
        # A stage can be over before its thread has begun: what is held now is its peak then, here and on the CPU.
        peak = tracker.__dict__.pop(_PEAK, None) or Peak("mps")
        if getattr(tracker, "cur_stage", None) == stage and not hasattr(tracker, "cpu_mem_used_peak"):
            tracker.cpu_mem_used_peak = tracker.cpu_mem_used()
        if tracker.torch is not None:
            peak.sample()
        stock(tracker, stage)
        figures = (getattr(tracker, "gpu", None) or {}).get(stage, {})
        if isinstance(figures.get("peaked"), str):
            # As on CUDA it is the peak less what is held afterwards; both as the driver counts them.
            highest = peak.result.value
            figures["peaked"] = max(0, highest - peak.sample())
            self.acted(f"the peak of GPU memory in the metrics is {peak.result.reason}", aloud=False)


class OomText(LibraryGuard):
    """Looks at the errors that auto_find_batch_size, find_executable_batch_size and Tuner.scale_batch_size look at."""

    name = "oom-text"
    what = "searches for a batch size that fits end at the first one that does not: Metal's errors have other words"
    issue = "https://github.com/huggingface/accelerate/issues/4226"
    until = "should_reduce_batch_size of the oldest supported accelerate and Lightning's is_oom_error know both texts"
    faulty = "tried: a text of Metal's is unknown to {}"
    cured = "tried: Metal's texts are known to {}"
    patches = {
        "accelerate.utils.memory:should_reduce_batch_size": "_ours_too",
        # is_oom_error itself is imported by name elsewhere, and asks the first of these wherever it is.
        **in_lightning(
            {
                "utilities.memory:is_cuda_out_of_memory": "_ours_too",
                "utilities.memory:garbage_collection_cuda": "_collect",
            }
        ),
    }

    def is_cured(self, module: ModuleType) -> bool | None:
        """Return whether the library's own question knows Metal's words."""
        lightning = hasattr(module, "is_oom_error")
        question = module.is_oom_error if lightning else module.should_reduce_batch_size
        return all(map(inspect.unwrap(question), [RuntimeError(f"{words}1 GB") for words in memory.REFUSALS]))

    def _ours_too(self, stock: Any, error: BaseException) -> bool:
        if stock(error):
            return True
        if not memory.refused(error):
            return False
        self.acted("a batch that does not fit is followed by a smaller one, as on other devices", aloud=False)
        return True

    def _collect(self, stock: Any) -> None:
        stock()
        if torch.backends.mps.is_available():
            torch.mps.empty_cache()
