"""Two traces compared: each step's loss and gradient norm, the first module that differs, and the report of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.metal.device import simulated
from hf_mps.tools.dryrun.parity.trace import BACKWARD, GRADIENT, UPDATE, Digest, Key, Trace
from hf_mps.tools.dryrun.render import Report

SUMS = "float32 rounds at 1e-7; sums in another order, through some dozen layers, stay within a thousandth"
IN_HALF = "and the CPU's reference is float32; modules are compared in the first step"
TOLERANCES = {
    "fp32": Choice(1e-3, SUMS),
    "fp16": Choice(2e-2, f"float16 rounds at 1e-3, {IN_HALF}"),
    "bf16": Choice(1e-1, f"bfloat16 rounds at 8e-3, {IN_HALF}"),
}
# Gradients that are zero but for rounding (a key's bias in attention) are noise: a gradient smaller than this share of
# the whole gradient's norm is compared with that share.
NOISE_FLOOR = 1e-3
# Where terms as large as the loss cancel (the bias of a head over choices), rounding leaves this share of each: a
# gradient in which that is more than the tolerance is compared with as much of the loss as keeps it within.
ROUNDING = {"fp32": 1e-7, "fp16": 1e-3, "bf16": 8e-3}
# Adam moves a weight by its learning rate whatever the size of its gradient: where that is rounding, so is its sign.
# Updates are compared only where the gradient is more than this share of its largest value.
SIGNIFICANT_GRADIENT = 1e-2
# Adam also divides gradients of two steps by one another, rounding and all: updates get so many times the tolerance.
UPDATE_RTOL_FACTOR = 30


@dataclass(frozen=True)
class Step:
    """One optimizer step on both devices: (CPU's, device's) loss and gradient norm."""

    number: int
    losses: tuple[float, float]
    norms: tuple[float, float]
    floor: float = 0.0
    """The share of the loss that a smaller norm is compared with."""

    @property
    def rel_error(self) -> float:
        """Return the larger relative error of loss and gradient norm; infinite where one of the devices has a NaN."""
        return max(_relative(*self.losses), _relative(*self.norms, floor=self.floor * abs(self.losses[0])))


@dataclass(frozen=True)
class Divergence:
    """The first event that differs. `what` is its kind: input, forward, backward, gradient or update.

    `which` is the parameter, argument or call of `module`.
    """

    step: int
    what: str
    module: str
    which: str
    rel_error: float

    def __str__(self) -> str:
        return f"step {self.step}, {self.what}: {self.module} ({self.which}), off by {self.rel_error:.2g}"


@dataclass(frozen=True)
class Spread:
    """How far two equal runs on the device differ: they add up in another order each time.

    `steps` has each step's relative error; `first` is the first event that differs, by however little, and `beyond`
    the first that differs by more than the tolerance, which no order of adding up explains.
    """

    steps: tuple[float, ...]
    first: Divergence | None
    beyond: Divergence | None


@dataclass(frozen=True)
class Parity:
    """The verdict over some steps: `same`, or the first `divergence`; `tolerance` has its reason.

    `spread` is None where the device was not run twice: it had the CPU's results to the bit, or failed.
    """

    steps: tuple[Step, ...]
    divergence: Divergence | None
    tolerance: Choice[float]
    failure: str = ""
    spread: Spread | None = None

    @property
    def same(self) -> bool:
        """Whether everything is within the tolerance and the device's own spread, and its runs came to their end."""
        if self.divergence is not None or self.failure or (self.spread is not None and self.spread.beyond is not None):
            return False
        own = self.spread.steps if self.spread is not None else ()
        spreads = (*own, *(0.0 for _ in self.steps[len(own) :]))
        return all(s.rel_error <= self.tolerance.value + spread for s, spread in zip(self.steps, spreads, strict=True))


def once_or_twice(reference: Trace, on_device: Callable[[], Trace]) -> tuple[Trace, Trace | None]:
    """Return the device's trace, and that of a second run; None where the first run had the CPU's results to the bit.

    A device that adds in any order cannot be held to its own last bits.
    """
    metal = on_device()
    return metal, None if metal.failure or equal(reference, metal) else on_device()


def compare(reference: Trace, metal: Trace, precision: str = "fp32", again: Trace | None = None) -> Parity:
    """Compare the device's trace `metal` with the CPU's `reference`, within the tolerance of `precision`.

    `again` is a second run on the device: by as much as the two differ, `metal` may differ from the reference too.
    """
    tolerance = TOLERANCES[precision]
    share = ROUNDING[precision] / tolerance.value
    spread = None
    if again is not None:
        beyond = _first(metal, again, share, lambda key: _rounding(key, tolerance.value))
        steps = tuple(step.rel_error for step in _steps(metal, again, share))
        spread = Spread(steps, _first(metal, again, share, lambda _: 0.0), beyond)

    def allowed(key: Key) -> float:
        # Autocast hands a module a copy, whose gradient lacks that of the tensor's other readers; and Adam's first step
        # makes of a rounded gradient another weight.
        if precision != "fp32" and (key[1] == BACKWARD or key[0] > 1):
            return math.inf
        own = 0.0 if again is None or key not in again.events else _rel_error(metal, key, again, share)
        return _rounding(key, tolerance.value) + own

    failure = metal.failure or (again.failure if again is not None else "")
    divergence = _first(reference, metal, share, allowed)
    return Parity(_steps(reference, metal, share), divergence, tolerance, failure, spread)


def equal(first: Trace, second: Trace) -> bool:
    """Return whether two traces are the same to the bit."""
    told = [(each.losses, each.norms, each.failure, each.events.keys()) for each in (first, second)]
    pairs = ((digest.values, second.events[key].values) for key, digest in first.events.items())
    return told[0] == told[1] and all(bool((one == other).all()) for one, other in pairs)


def _steps(reference: Trace, metal: Trace, share: float) -> tuple[Step, ...]:
    losses = zip(reference.losses, metal.losses, strict=False)  # the device's run may have ended early
    norms = zip(reference.norms, metal.norms, strict=False)
    return tuple(Step(number, *both, share) for number, both in enumerate(zip(losses, norms, strict=True), 1))


def _rounding(key: Key, tolerance: float) -> float:
    return tolerance * (UPDATE_RTOL_FACTOR if key[1] == UPDATE else 1)


def _first(reference: Trace, metal: Trace, share: float, allowed: Callable[[Key], float]) -> Divergence | None:
    """The first event that differs by more than is allowed, in the reference's order, by its innermost module."""
    differing: Divergence | None = None
    for key in reference.events:
        if key not in metal.events:
            if differing is not None or metal.failure:
                break  # the device's run ended here
            continue
        error = _rel_error(reference, key, metal, share)
        step, what, module, which = key
        if differing is None and error > allowed(key):
            differing = Divergence(step, what, module, which, error)
        elif differing is not None:
            # A module hands what it was given to its first part: theirs is the same tensor, and the nearer name.
            inside = module.startswith(f"{differing.module}.") or differing.module[:1].isupper()
            here = (step, what) == (differing.step, differing.what) == (step, BACKWARD)
            if error <= allowed(key) or not (inside and here):
                break
            differing = Divergence(step, what, module, which, error)
    return differing


def _rel_error(reference: Trace, key: Key, metal: Trace, share: float) -> float:
    step, what, module, which = key
    ours, theirs = reference.events[key], metal.events[key]
    norm = reference.norms[step - 1] if len(reference.norms) >= step else 0.0
    loss = abs(reference.losses[step - 1]) if len(reference.losses) >= step else 0.0
    # What is smaller than both is rounding of something larger, on either device.
    floor = max(max(NOISE_FLOOR, share) * norm, share * loss)
    if what in (GRADIENT, BACKWARD):
        return ours.rel_error(theirs, floor=floor)
    if what == UPDATE:
        if (gradient := reference.events.get((step, GRADIENT, module, which))) is None:
            return 0.0
        size = gradient.values.abs()
        significant = size > SIGNIFICANT_GRADIENT * max(float(size.max()) if size.numel() else 0.0, floor)
        mine, other = (Digest(float("nan"), each.values[significant]) for each in (ours, theirs))
        return mine.rel_error(other)
    return ours.rel_error(theirs)


def _relative(first: float, second: float, floor: float = 0.0) -> float:
    if not (first == first and second == second) or float("inf") in (abs(first), abs(second)):
        return 0.0 if repr(first) == repr(second) else float("inf")
    return abs(first - second) / max(abs(first), floor, 1e-12)


def report(target: str, parity: Parity, facts: Mapping[str, Choice[Any]]) -> Report:
    """Return a line for each step, and the verdict with the tolerance's reason."""
    spread = parity.spread
    return Report(
        "parity",
        target,
        facts,
        list(_lines(parity)),
        {
            "same": parity.same,
            "tolerance": parity.tolerance,
            "steps": [
                {"step": step.number, "loss": step.losses, "grad_norm": step.norms, "off": step.rel_error}
                for step in parity.steps
            ],
            "divergence": _values(parity.divergence),
            "spread": spread
            and {"steps": spread.steps, "first": _values(spread.first), "beyond": _values(spread.beyond)},
            "failure": parity.failure or None,
        },
        problem="" if parity.same else verdict(parity),
    )


def verdict(parity: Parity) -> str:
    """One line: the same, or where they first differ; it says where no Mac's GPU took part."""
    spread = parity.spread
    if parity.same:
        told = f"the same: {len(parity.steps)} steps, within {parity.tolerance.value:g}"
    elif spread is not None and spread.beyond is not None:
        told = f"different: two runs on mps differ from each other, first at {spread.beyond}"
    elif parity.divergence is not None or parity.failure:
        first = f", first at {parity.divergence}" if parity.divergence is not None else ""
        told = f"different{first}" + (f"; the run on mps ended: {parity.failure}" if parity.failure else "")
    else:
        worst = max(parity.steps, key=lambda step: step.rel_error)
        told = f"different: loss or gradient norm of step {worst.number} is off by {worst.rel_error:.2g},"
        told += " and no module's values are"
    return told + (" (mps is simulated)" if simulated() else "")


def _lines(parity: Parity) -> Iterator[str]:
    yield from ("", "step     loss on cpu     loss on mps   grad norm cpu   grad norm mps       off")
    for step in parity.steps:
        numbers = "  ".join(f"{number:>14.7g}" for number in (*step.losses, *step.norms))
        yield f"{step.number:>4}  {numbers}  {step.rel_error:>8.1e}"
    yield from ("", verdict(parity), f"tolerance {parity.tolerance.value:g}: {parity.tolerance.reason}")
    spread = parity.spread
    if spread is not None and spread.first is None:
        yield "spread 0: two runs on mps are equal to the bit"
    elif spread is not None:
        yield (
            f"spread {max(spread.steps, default=0.0):.1e} of loss or gradient norm: two runs on mps differ,"
            f" first at {spread.first}; Metal adds in any order where an index repeats, as in embedding's backward"
        )


def _values(divergence: Divergence | None) -> dict[str, Any] | None:
    if divergence is None:
        return None
    values = vars(divergence).copy()
    return values | {"off": values.pop("rel_error")}
