"""Two courses held against each other: each step's loss and gradient norm, and the first module that differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_mps.core.choice import Choice
from hf_mps.dryrun.parity.digest import Digest
from hf_mps.dryrun.parity.events import GRADIENT, UPDATE, Course, Key

TOLERANCES = {
    "fp32": Choice(
        1e-3, "float32 rounds at 1e-7; sums in another order, through some dozen layers, stay within a thousandth"
    ),
    "fp16": Choice(2e-2, "float16 rounds at 1e-3, and the CPU's reference is float32"),
    "bf16": Choice(1e-1, "bfloat16 rounds at 8e-3, and the CPU's reference is float32"),
}
# Gradients that are zero but for rounding (a key's bias in attention) are noise: what is smaller than this share of
# the whole gradient's norm is held against that share.
NOISE = 1e-3
# Where terms as large as the loss cancel (the bias of a head over choices), float32 leaves 1e-7 of each: within the
# tolerance of this share of the loss.
CANCELLED = 1e-4
# Adam moves a weight by its learning rate whatever the size of its gradient: where that is rounding, so is its sign.
TELLING = 1e-2
# And it divides gradients of two steps by one another, rounding and all: updates may differ by so many times more.
LOOSER = 30


@dataclass(frozen=True)
class Step:
    """One optimizer step on both devices; `off` is the larger relative difference of the two."""

    number: int
    losses: tuple[float, float]
    norms: tuple[float, float]

    @property
    def off(self) -> float:
        """Of loss and gradient norm the larger difference, relative; infinite where one is no number."""
        return max(_relative(*self.losses), _relative(*self.norms))


@dataclass(frozen=True)
class Divergence:
    """Where the two first differ: the step, what (input, forward, backward, gradient, update), module, which of its."""

    step: int
    what: str
    module: str
    which: str
    off: float

    def __str__(self) -> str:
        return f"step {self.step}, {self.what}: {self.module} ({self.which}), off by {self.off:.2g}"


@dataclass(frozen=True)
class Spread:
    """How far two equal runs on the device differ from each other: they add up in another order each time.

    `steps` has, for each, the larger relative difference of loss and gradient norm; `first` is what differs first, by
    however little, and `beyond` what differs by more than the tolerance, which no order explains.
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
        return all(s.off <= self.tolerance.value + spread for s, spread in zip(self.steps, spreads, strict=True))


def once_or_twice(reference: Course, on_device: Callable[[], Course]) -> tuple[Course, Course | None]:
    """What the device does, and what it does a second time; None where the first had the CPU's results to the bit.

    A device that adds in any order cannot be held to its own last bits.
    """
    found = on_device()
    return found, None if found.failure or equal(reference, found) else on_device()


def compare(reference: Course, found: Course, precision: str = "fp32", again: Course | None = None) -> Parity:
    """Hold the device's course `found` against the CPU's `reference`; the tolerance is that of `precision`.

    `again` is a second run on the device: by what the two differ, `found` may differ from the reference too.
    """
    tolerance = TOLERANCES[precision]
    spread = None if again is None else _spread(found, again, tolerance.value)

    def allowed(key: Key) -> float:
        own = 0.0 if again is None or key not in again.events else _off(found, key, again)
        return _rounding(key, tolerance.value) + own

    failure = found.failure or (again.failure if again is not None else "")
    return Parity(_steps(reference, found), _first(reference, found, allowed), tolerance, failure, spread)


def equal(one: Course, other: Course) -> bool:
    """Whether two courses are the same to the bit."""
    if (one.losses, one.norms, one.failure) != (other.losses, other.norms, other.failure):
        return False
    return one.events.keys() == other.events.keys() and all(
        bool((digest.values == other.events[key].values).all()) for key, digest in one.events.items()
    )


def _spread(found: Course, again: Course, tolerance: float) -> Spread:
    return Spread(
        tuple(step.off for step in _steps(found, again)),
        _first(found, again, lambda _: 0.0),
        _first(found, again, lambda key: _rounding(key, tolerance)),
    )


def _steps(reference: Course, found: Course) -> tuple[Step, ...]:
    losses = zip(reference.losses, found.losses, strict=False)  # the device's run may have ended early
    norms = zip(reference.norms, found.norms, strict=False)
    return tuple(Step(number, *both) for number, both in enumerate(zip(losses, norms, strict=True), 1))


def _rounding(key: Key, tolerance: float) -> float:
    return tolerance * (LOOSER if key[1] == UPDATE else 1)


def _first(reference: Course, found: Course, allowed: Callable[[Key], float]) -> Divergence | None:
    """The first event that differs by more than is allowed, in the reference's order, by its innermost module."""
    differing: Divergence | None = None
    for key in reference.events:
        if key not in found.events:
            if differing is not None or found.failure:
                break  # the device's run ended here
            continue
        off = _off(reference, key, found)
        step, what, module, which = key
        if differing is None and off > allowed(key):
            differing = Divergence(step, what, module, which, off)
        elif differing is not None:
            # A module hands what it was given to its first part: theirs is the same tensor, and the nearer name.
            inside = module.startswith(f"{differing.module}.") or differing.module[:1].isupper()
            here = (step, what) == (differing.step, differing.what) == (step, "backward")
            if off <= allowed(key) or not (inside and here):
                break
            differing = Divergence(step, what, module, which, off)
    return differing


def _off(reference: Course, key: Key, found: Course) -> float:
    step, what, module, which = key
    ours, theirs = reference.events[key], found.events[key]
    norm = reference.norms[step - 1] if len(reference.norms) >= step else 0.0
    loss = abs(reference.losses[step - 1]) if len(reference.losses) >= step else 0.0
    if what == GRADIENT or what == "backward":
        return ours.off(theirs, floor=max(NOISE * norm, CANCELLED * loss))
    if what == UPDATE:
        gradient = reference.events.get((step, GRADIENT, module, which))
        if gradient is None:
            return 0.0
        size = gradient.values.abs()
        largest = float(size.max()) if size.numel() else 0.0
        telling = size > TELLING * max(largest, NOISE * norm, CANCELLED * loss)
        if not bool(telling.any()):
            return 0.0
        return Digest(float("nan"), ours.values[telling]).off(Digest(float("nan"), theirs.values[telling]))
    return ours.off(theirs)


def _relative(one: float, other: float) -> float:
    if not (one == one and other == other) or float("inf") in (abs(one), abs(other)):
        return 0.0 if repr(one) == repr(other) else float("inf")
    return abs(one - other) / max(abs(one), 1e-12)
