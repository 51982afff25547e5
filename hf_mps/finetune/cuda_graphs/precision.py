"""The faster precision of a run, timed on one of its batches: on CUDA bfloat16 or TF32, on a CPU bfloat16 or float32.

Autocast saves arithmetic and adds casts: on one H100 an eager BERT trains fastest in TF32, and as CUDA graphs in
bfloat16; a CPU that multiplies bfloat16 (AVX512_BF16, AMX) trains MiniLM twice as fast in it. Forward and backward
alone are timed: the update is the same in both.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from hf_mps.core import cache
from hf_mps.core.choice import Choice
from hf_mps.core.files import write_json
from hf_mps.finetune.cuda_graphs.graphs import Graphs, Unmasked, as_they_are
from hf_mps.finetune.run.callbacks import finish
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.metal.device import machine

CANDIDATES = {"cuda": ("bf16", "tf32"), "cpu": ("bf16", "fp32")}
SETTINGS: dict[str, dict[str, bool]] = {"bf16": {"bf16": True}, "tf32": {"tf32": True}, "fp32": {}}
WARM, TIMED = {"cuda": 2, "cpu": 0}, {"cuda": 5, "cpu": 2}
"""Passes beside the first, which loads kernels. A CPU takes its time over each: 6 in all, of 200 steps or more."""
LEAST_GAIN = 0.15
"""Of float32's time, below which a CPU keeps float32: its numbers are worth more than that, and a trial is noisy."""


@dataclass(frozen=True)
class Trial:
    """What a candidate took: ms for forward and backward of one batch, by a graph where `recorded`."""

    name: str
    ms: float
    recorded: bool


@dataclass(frozen=True)
class Measured(Choice[str]):
    """The precision that a trial found, which took `seconds` in this process."""

    seconds: float = 0.0


class MeasuredPrecision(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Keeps the choice in every checkpoint: a run that goes on trains as it began, whatever a new trial would say."""

    def __init__(self, value: str, reason: str) -> None:
        self.value, self.reason = value, reason

    def state(self) -> dict[str, Any]:
        """Return the choice as Trainer stores it."""
        return {"args": {"value": self.value, "reason": self.reason}, "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())


def stored(checkpoint: Path) -> Choice[str] | None:
    """Return what the run of this checkpoint measured when it began; None where it measured nothing."""
    content = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    found = content.get("stateful_callbacks", {}).get(MeasuredPrecision.__name__)
    return Choice(found["args"]["value"], found["args"]["reason"]) if found else None


def decide(trials: Sequence[Trial], shape: str) -> Choice[str]:
    """Choose the fastest candidate."""
    best = min(trials, key=lambda trial: trial.ms)
    exact = next((trial for trial in trials if trial.name == "fp32"), best)
    if best.ms > (1 - LEAST_GAIN) * exact.ms:
        best = exact
    others = ", ".join(f"{trial.name} {trial.ms:.1f}" for trial in trials if trial is not best)
    how = "as a CUDA graph" if best.recorded else "operator by operator"
    return Choice(best.name, f"measured: {best.ms:.1f} ms forward and backward {how} ({shape}), {others}")


def sample(prepared: Prepared, batch: int) -> dict[str, Any]:
    """Return a batch of training rows of the commonest length, collated as the run does."""
    rows = range(len(prepared.sample))
    counts = prepared.token_counts
    if counts is not None:
        middle = sorted(counts)[len(counts) // 2]
        rows = sorted(rows, key=lambda row: abs(counts[row] - middle))[:batch]  # type: ignore[assignment]
    collate = prepared.collator
    assert collate is not None
    return dict(Unmasked(collate)([prepared.sample[int(row)] for row in rows[:batch]]))


def measure(model: Any, batch: Mapping[str, Any], *, graphs: Callable[[], Graphs] | None, device: Any) -> list[Trial]:
    """Time each candidate on `batch`; `model`, which is on `device`, is as before afterwards, random state included.

    `graphs` makes those to record with; None times operator by operator. Raises RecordingFailed.
    """
    tensors = {name: value.to(device) for name, value in batch.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in batch.items() if name not in tensors}
    with untouched(model, device):
        model.train()
        return [_trial(name, model, tensors, others, graphs, device) for name in CANDIDATES[device.type]]


def _trial(
    name: str,
    model: Any,
    tensors: dict[str, Tensor],
    others: dict[str, Any],
    graphs: Callable[[], Graphs] | None,
    device: Any,
) -> Trial:
    def passes(inputs: dict[str, Tensor]) -> tuple[None]:
        autocast = torch.autocast(device.type, torch.bfloat16) if name == "bf16" else nullcontext()
        with autocast, as_they_are(inputs):
            loss = model(**inputs, **others)["loss"]
        loss.backward()
        model.zero_grad()
        return (None,)

    with _precision(name, device):
        passes(tensors)  # loads kernels
        if graphs is None:
            return Trial(name, _timed(lambda: passes(tensors), device), False)
        recorded = graphs()
        try:
            return Trial(name, _timed(lambda: recorded.run(name, tensors, passes), device), True)
        finally:
            recorded.clear()


def _timed(work: Callable[[], Any], device: Any) -> float:
    """Return the mean ms of `work` once it is warm."""
    for _ in range(WARM[device.type]):
        work()
    finish(device)
    begun = time.perf_counter()
    for _ in range(TIMED[device.type]):
        work()
    finish(device)
    return (time.perf_counter() - begun) / TIMED[device.type] * 1000


@contextmanager
def untouched(model: Any, device: Any) -> Iterator[None]:
    """Give a model its buffers, mode and empty gradients back, and every generator of random numbers its state."""
    training = model.training
    buffers = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)
        with torch.no_grad():
            for places, name, buffer, before in buffers:
                places[name] = buffer.copy_(before)
        model.zero_grad()
        model.train(training)
        if device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def _precision(name: str, device: Any) -> Iterator[None]:
    """Switch TF32 as TrainingArguments(tf32=True) does, and back."""
    from transformers.utils.import_utils import enable_tf32

    if device.type != "cuda" or name != "tf32":
        yield
        return
    backends: Any = torch.backends
    newer = hasattr(backends, "fp32_precision")
    before = backends.fp32_precision if newer else (backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32)
    products = backends.cuda.matmul.fp32_precision if newer else None
    enable_tf32(True)
    products_in_tf32()
    try:
        yield
    finally:
        if newer:
            backends.cuda.matmul.fp32_precision = products
            backends.fp32_precision = before
        else:
            backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = before


def products_in_tf32() -> None:
    """Name matrix products too which torch has a setting for, beside the one for all.

    On one H100 with torch 2.11 a training in a process that had tried TF32 before ran at float32's rate with
    TrainingArguments(tf32=True), which sets the one for all; why could not be found there.
    """
    backends: Any = torch.backends
    backends.cuda.matmul.fp32_precision = "tf32"


AGAIN = "kept for this machine and model; to measure again, remove {}"


# What was measured is kept in the user's cache: a stopwatch says something else under another load, and the precision
# changes a run's numbers, so a machine is asked once for a model and a batch.


def conditions(model: Any, shape: str, device: str, *, graphs: bool) -> dict[str, Any]:
    """Return what a trial depends on: chip, threads, PyTorch, the model's class and size, the shape of a batch."""
    return {
        "device": device,
        "chip": machine.chip(device),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "model": type(model).__name__,
        "parameters": sum(each.numel() for each in model.parameters()),
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "batch": shape,
        "graphs": graphs,
    }


def find_kept(asked: Mapping[str, Any], allowed: tuple[str, ...]) -> tuple[Choice[str], str] | None:
    """Return the precision that was measured under these conditions, and why steps could not be recorded; else None."""
    file = _file(asked)
    try:
        said = json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
    except (OSError, ValueError):
        return None
    if said.get("asked") != asked or said.get("value") not in allowed:
        return None
    return Choice(said["value"], f"{said['reason']}; {AGAIN.format(file)}"), str(said["without"])


def keep_measured(asked: Mapping[str, Any], measured: Choice[str], without: str) -> None:
    """Keep what was measured; where no file can be written the next run measures again."""
    file = _file(asked)
    if file is not None:
        with suppress(OSError):
            write_json(file, {"asked": asked, "value": measured.value, "reason": measured.reason, "without": without})


def kept_in() -> Path | None:
    """Return where what was measured is kept; None where the user has no home."""
    return cache.home("precision")


def _file(asked: Mapping[str, Any]) -> Path | None:
    name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    return None if (place := kept_in()) is None else place / f"{name}.json"
