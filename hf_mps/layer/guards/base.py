"""What guards and sentinels have in common, what a guard is, and how it tells a library's versions apart."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any

from hf_mps.core import notices
from hf_mps.core.choice import Choice
from hf_mps.core.patching import Fallible, Patch
from hf_mps.metal.device import faults
from hf_mps.metal.device.no_modes import no_modes


def names_in(function: Callable[..., Any]) -> frozenset[str]:
    """Names and short strings in the function's own code, under whatever was put around it."""
    code: CodeType = inspect.unwrap(function).__code__
    # A longer text is a docstring or a message, which may name what the function does not do.
    return frozenset((*code.co_names, *(text for text in code.co_consts if isinstance(text, str) and len(text) < 40)))


TRIED = "tried on the device"
"""How the reason of a verdict begins that comes of a trial."""


def tried(wrong: bool, faulty: str, right: str) -> Choice[bool]:
    """Return what a trial found: whether the device is wrong, in the words for that or for a device that is right."""
    return Choice(wrong, f"{TRIED}: {faulty if wrong else right}")


def _before(ours: Callable[..., Any], stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    ours(*args, **kwargs)
    return stock(*args, **kwargs)


def _behind(ours: Callable[..., Any], stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = stock(*args, **kwargs)
    ours(*args, **kwargs)
    return result


first, then = functools.partial(Patch, through=_before), functools.partial(Patch, through=_behind)
"""Have `method(*arguments)` called before the library's function, or once that is through; its result stands."""


class Safeguard(Fallible):
    """A guard or a sentinel: it has a name, can be switched off or suspended, and counts and reports what it did.

    A subclass has the sentences about it, its `patches`, and the way in which it reports.
    """

    name: str
    """As the kind's environment variable calls it."""
    what: str
    """The danger in one sentence, without a final full stop."""
    repeats = False
    """Whether a line may be said again: of another training."""

    def __init__(self) -> None:
        super().__init__()
        self.off_by_user = False
        self.suspended = 0
        self.times = 0
        self.lines: list[str] = []
        self.reset()

    def reset(self) -> None:
        """Set what it knows of trainings to what it is before the first; called where it is made, and by `forget`."""

    def switched(self, on: bool) -> None:
        """Called when it is suspended or resumed; for those that leave more than wrappers behind."""

    @property
    def on(self) -> bool:
        """Return whether it may act: it is not switched off by the user, not suspended, not broken."""
        return super().on and not self.off_by_user and not self.suspended

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Leave the library and the device for a while as they are without it, for a trial."""
        self.suspended += 1
        try:
            yield
        finally:
            self.suspended -= 1

    def forget(self) -> None:
        """Reset the counts, and enable it again where it had failed at its work."""
        self.times = 0
        self.lines.clear()
        if self.broken:
            self.broken, self.failure = False, None
        self.reset()

    def acted(self, line: str, *, aloud: bool = True) -> None:
        """Count an action and report it in one line; each distinct line is reported once.

        `aloud=False` is for actions that change nothing the user asked for: only the report and results.json have them.
        """
        self.times += 1
        known = line in self.lines
        if not known:
            self.lines.append(line)
        if aloud and (self.repeats or not known):
            self.say(line)

    def unknown(self, module: ModuleType, error: Exception) -> None:
        """Report in one line that this version of the library is not known; only this safeguard is lost."""
        self.failure = f"does not know this version of {module.__name__}: {type(error).__name__}: {error}"
        self.say(f"the {self.kind} {self.name} is not on: it {self.failure}")

    def standing(self, started: bool, acted: str, line: int) -> tuple[str, str] | None:
        """Return its state and the reason where they are the same for every kind, else None.

        `acted` is the kind's word for one that did something; `line` is which of its lines is shown.
        """
        if self.off_by_user or self.suspended:
            return "off by user", f"HF_MPS_{self.kind.upper()}S=-{self.name}" if self.off_by_user else "suspended"
        if not started:
            return "needless", "this PyTorch has no Metal device, or HF_MPS=0"
        if self.failure:
            return "failed", self.failure
        return (acted, self.lines[line]) if self.times else None


class Guard(Safeguard):
    """A known hazard and what is done about it; a subclass fills in the four sentences, `patches` and `applies`.

    A guard acts only where `on` is true, and only on tensors of the device `mps`. `name` is the guard's in
    HF_MPS_GUARDS, in docs/hazards.md and among the faults of tests/hazards.

    It warns (`acted`) where something is left for a person: the script gets something other than it asked for, a
    resumed run differs from the unbroken one, or the hazard remains and a next step is named. Where the script now does
    what it does on every other device, only the report and results.json have the line (`aloud=False`).

    What a user made (arguments, models, optimizers, loaders, batches) is as it was when stock returns, also by an
    exception; where a guard has to leave a change, a comment there says why. What it has to remember of a training it
    keeps by identity, or in an attribute `_hf_mps_…` of a Trainer or a loader, which nothing saves.
    """

    kind = "guard"
    always = ""
    """Why its fault is there wherever it is armed, for those whose fault nothing can tell."""
    untried = ""
    """Why no trial on the device can show its faults: "a trial would take 8 GB"."""
    trying = 0
    """How many trials run now: what a trial makes is no training, and no guard has to look at it."""

    def __init__(self) -> None:
        self.kernels: dict[str, Callable[[], None]] = {}  # operator -> what takes the kernel before it away again
        super().__init__()

    def reset(self) -> None:
        """Ask `applies` again when it is next needed."""
        self._verdict: Choice[bool] | None = None

    @property
    def issue(self) -> str:
        """Return the upstream issue, or the place in the library's source; by default that of its first fault."""
        return faults.FAULTS[self.faults[0]].issue

    @property
    def until(self) -> str:
        """When this file can be deleted; by default once its faults have ended in every release that is supported."""
        return f"the oldest supported torch is {faults.end(self.faults)}"

    @property
    def faults(self) -> tuple[str, ...]:
        """Return the faults of the device that it cures, by their names in hf_mps/metal/device/faults.py."""
        return faults.cured_by(self.name)

    def concerns(self, module: ModuleType) -> bool:
        """Return whether this Mac and torch may have one of its faults; a guard against a library's is always armed."""
        return not self.faults or faults.possible(*self.faults)

    def applies(self) -> Choice[bool]:
        """Return whether the fault is there and how that is known: by this Mac and torch, then by a trial."""
        if self.always:
            return Choice(True, self.always)
        found = faults.here(*self.faults)
        if found.value and self.untried:
            return Choice(True, f"{found.reason}; {self.untried}")
        return self.trial() if found.value else found

    def trial(self) -> Choice[bool]:
        """What trying the device says of the fault, whatever its chip and release; by default what `applies` says."""
        return self.applies()

    @property
    def needed(self) -> bool:
        """Return whether the guard is on and the fault is there; asks `applies` once."""
        return self.on and self.verdict().value

    def verdict(self) -> Choice[bool]:
        """Return what `applies` found, asked on the first call."""
        if self._verdict is None:
            self._verdict = self.tried(self.applies)
        return self._verdict

    def tried(self, look: Callable[[], Choice[bool]] | None = None) -> Choice[bool]:
        """Return what `trial`, or `look`, finds now, for those who want to know the device; the verdict stays."""
        Guard.trying += 1
        try:
            with no_modes():
                return (look or self.trial)()
        finally:
            Guard.trying -= 1

    def say(self, line: str) -> None:
        """Tell the user, with the upstream issue behind it."""
        notices.warn_user(line if self.failure else f"{line} ({self.name}: {self.issue})")

    def release(self, *targets: str) -> None:
        """Leave kernels of the device alone again: those of `targets`, or all where none is named."""
        for target in targets or tuple(self.kernels):
            self.kernels.pop(target, lambda: None)()


class LibraryGuard(Guard):
    """A guard against a fault that the source of an installed library shows, as no trial can."""

    faulty: str
    """What the report says of libraries that have the fault; {} stands for their names."""
    cured: str
    """What the report says of libraries that do by themselves what the guard does."""

    def __init__(self) -> None:
        super().__init__()
        self._cures: dict[str, bool] = {}

    def is_cured(self, module: ModuleType) -> bool | None:
        """Return whether a module of a library does what the guard does; None for one that does not tell."""
        raise NotImplementedError

    def applies(self) -> Choice[bool]:
        """Return whether one of the libraries that were imported has the fault."""
        lacking = [library for library, cured in self._cures.items() if not cured]
        words = self.faulty if lacking else self.cured
        return Choice(bool(lacking), words.format(" and ".join(lacking or self._cures)))

    def concerns(self, module: ModuleType) -> bool:
        """Return whether a library has the fault, as far as this module tells."""
        found = self.is_cured(module)
        if found is not None:
            library = module.__name__.partition(".")[0]
            self._cures["Lightning" if "lightning" in library else library] = found
            self._verdict = None
        return not found
