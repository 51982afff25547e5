"""A kernel's trial: it has to be as exact as PyTorch's own operators on this machine and no slower, or is not called.

The outcome is kept in the user's cache for a chip, a macOS, a torch and a kernel's own code. HF_MPS_TRAINING_KERNELS
overrules it. Nothing here draws from the user's generators.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_mps.core import cache, settings, status
from hf_mps.core.choice import Choice
from hf_mps.core.files import write_json
from hf_mps.core.patching import described
from hf_mps.metal.device import machine, probe
from hf_mps.metal.device.no_modes import no_modes

FAMILIES = {
    "clip": "clip",
    **dict.fromkeys(("layer-norm", "rms-norm", "residual-norm"), "norms"),
    **{name: name.replace("-", "_") for name in ("cross-entropy", "attention", "adam-8bit", "rotary")},
    **dict.fromkeys(("gelu", "swiglu"), "activations"),
}
"""Each kernel's name, and the module in this folder that has it."""
VARIABLE = "HF_MPS_TRAINING_KERNELS"
EXACT = 4
"""Epsilons of the largest value by which a result may be off where PyTorch's own is nearer."""
ROUNDS, LONGEST = 3, 0.02
"""Measured rounds of each side, and the seconds that a round should not exceed by much."""


@dataclass(frozen=True)
class Case:
    """A call as training makes it. `ours` and `stock` take the same tensors on the device; `stock` runs on a CPU too.

    `inputs` are made on the CPU; both sides may write into their own copies, which they return if so.
    """

    label: str
    inputs: Sequence[Tensor]
    ours: Callable[..., Sequence[Tensor]]
    stock: Callable[..., Sequence[Tensor]]


def case(label: str, inputs: Sequence[Tensor], dtype: torch.dtype, *sides: Callable[..., Sequence[Tensor]]) -> Case:
    """Return a case of `ours` and `stock` whose inputs are of a dtype, which the label names."""
    return Case(f"{label}, {str(dtype).removeprefix('torch.')}", [each.to(dtype) for each in inputs], *sides)


def both_ways(compute: Callable[..., Tensor], *given: Tensor) -> Sequence[Tensor]:
    """Return what a function makes of all tensors but the last, and their gradients where the last one arrives."""
    *inputs, upstream = (each.detach() for each in given)
    inputs = [each.requires_grad_() for each in inputs]
    found = compute(*inputs)
    return found.detach(), *torch.autograd.grad(found, inputs, upstream)


@dataclass(frozen=True)
class Row:
    """What a case showed: largest errors against float64 by the largest value, and the seconds of a call."""

    label: str
    error: float
    stock_error: float
    seconds: float
    stock_seconds: float
    right: bool


@dataclass(frozen=True)
class Outcome:
    """Whether a kernel is used here, why, and what it was measured at."""

    on: bool
    reason: str
    rows: tuple[Row, ...] = ()


_lock = threading.RLock()
_known: dict[str, Outcome] = {}
_overruled: dict[str, Outcome] = {}


def may_act(name: str) -> bool:
    """Return whether a kernel may be called: it won its trial here, or HF_MPS_TRAINING_KERNELS says so.

    The first question in a process reads the cache, or makes the trial. Raises UserError for a value of the variable
    that nobody knows.
    """
    asked = asked_for(name)
    if asked is not None:
        _overruled[name] = Outcome(asked.value, asked.reason)
    return outcome(name).on if asked is None else asked.value


def asked_for(name: str) -> Choice[bool] | None:
    """Return what HF_MPS_TRAINING_KERNELS says of a kernel, None where that leaves it to the trial."""
    value = settings.training_kernels(tuple(FAMILIES))
    if isinstance(value, bool):
        return Choice(value, f"{VARIABLE}={int(value)}")
    return Choice(False, f"{VARIABLE}=-{name}") if name in value else None


def outcome(name: str, *, anew: bool = False) -> Outcome:
    """Return a kernel's trial on this machine, made now where it never was, or `anew`."""
    with _lock:
        if anew or name not in _known:
            kept = None if anew else kept_outcome(name)
            _known[name] = kept or _made(name)
            if kept is None and _known[name].rows:  # a failure may be gone next time: a compiler that was missing
                _write(name, _known[name])
        return _known[name]


def known() -> dict[str, Outcome]:
    """Return what this process was told of the kernels that it asked for, without a trial."""
    return {**_known, **_overruled}


def family(name: str) -> Any:
    """Return the module that has a kernel."""
    return import_module(f"hf_mps.metal.training_kernels.{FAMILIES[name]}")


def _made(name: str) -> Outcome:
    status.now(f"trying a Metal kernel of hf_mps on this device: {name} …")
    try:
        with no_modes():
            rows = tuple(_tried(family(name).cases(name)))
    except Exception as error:
        return Outcome(False, f"it failed: {described(error)}")
    wrong = [row for row in rows if not row.right]
    if wrong:
        row = wrong[0]
        return Outcome(False, f"{row.label}: off by {row.error:.1e}, and PyTorch's own by {row.stock_error:.1e}", rows)
    ratio = sum(row.stock_seconds for row in rows) / sum(row.seconds for row in rows)
    if ratio < 1:
        return Outcome(False, f"it takes {1 / ratio:.1f} times as long as PyTorch's own operators here", rows)
    return Outcome(True, f"as exact as PyTorch's own operators and {ratio:.1f} times as fast here", rows)


def _tried(cases: Iterator[Case]) -> Iterator[Row]:
    for each in cases:
        error, stock_error = errors(each)
        right = error <= max(2 * stock_error, EXACT * torch.finfo(each.inputs[0].dtype).eps)
        yield Row(each.label, error, stock_error, *_timed(each), right=right)
        if not right:  # the others need no trial any more
            return


def errors(case: Case) -> tuple[float, float]:
    """Return the largest error of our results and of PyTorch's, by the largest value of each in float64."""
    exact = case.stock(*(each.double() for each in case.inputs))
    found = []
    for side in (case.ours, case.stock):
        results = side(*(each.to("mps") for each in case.inputs))
        off = [
            float((one.detach().cpu().double() - two.detach()).abs().max() / two.detach().abs().max().clamp(min=1e-30))
            for one, two in zip(results, exact, strict=True)
        ]
        found.append(max(off) if not any(map(math.isnan, off)) else math.inf)  # max() would lose a NaN
    return found[0], found[1]


def _timed(case: Case) -> tuple[float, float]:
    """The median seconds of a call by each side, in turn, so that a busy machine slows both."""
    given = [each.to("mps") for each in case.inputs]
    sides = (case.ours, case.stock)
    calls = [max(1, min(20, int(LONGEST / max(_seconds(side, given, 1), 1e-6)))) for side in sides]
    rounds = [
        [_seconds(*each) / each[2] for each in zip(sides, (given, given), calls, strict=True)] for _ in range(ROUNDS)
    ]
    return statistics.median(row[0] for row in rounds), statistics.median(row[1] for row in rounds)


def _seconds(side: Callable[..., Any], given: Sequence[Tensor], count: int) -> float:
    # Before and behind: the device computes later than it is asked to, and its work is what counts.
    torch.mps.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        side(*given)
    torch.mps.synchronize()
    return time.perf_counter() - start


def _place(name: str) -> Path | None:
    folder = cache.home("training_kernels")
    return None if folder is None else folder / f"{name}.json"


def _key(name: str) -> list[str | None]:
    return [*probe.trial_of(machine.present()), family(name).SOURCE.digest]


def kept_outcome(name: str) -> Outcome | None:
    """Return the outcome that the cache has for this machine, torch and kernel, without a trial."""
    place = _place(name)
    try:
        kept = json.loads(place.read_text(encoding="utf-8")) if place is not None else {}
        if kept["of"] != _key(name):
            return None
        found = kept["outcome"]
        return Outcome(bool(found["on"]), str(found["reason"]), tuple(Row(**row) for row in found["rows"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(name: str, found: Outcome) -> None:
    place = _place(name)
    if place is not None:
        with contextlib.suppress(OSError):  # without a cache every process tries it anew
            write_json(place, {"of": _key(name), "outcome": asdict(found)})
