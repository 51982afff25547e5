"""What a guard is, and the way in which one is put around a function of somebody else's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_mps.choice import Choice
from hf_mps.guards import notice


class Guard:
    """A known hazard and what is done about it; a subclass fills in the four sentences and the two methods.

    A guard acts only where `on` is true, and only on tensors of the device `mps`.
    """

    name: str
    """As HF_MPS_GUARDS, the simulator's hazards and METAL.md call it."""
    what: str
    """The hazard in one sentence, without a final full stop."""
    issue: str
    """The upstream issue, or the place in the library's source."""
    until: str
    """When this file can be deleted."""

    def __init__(self) -> None:
        self.off_by_user = False
        self.suspended = 0
        self.failure: str | None = None
        self.times = 0
        self.lines: list[str] = []
        self._verdict: Choice[bool] | None = None

    def applies(self) -> Choice[bool]:
        """Whether the installed libraries have the fault, and how that is known; may use the device."""
        raise NotImplementedError

    def install(self, module: ModuleType) -> None:
        """Put the guard into `module`, as the catalogue names it; touches no device."""
        raise NotImplementedError

    def switched(self, on: bool) -> None:
        """Called when the guard is suspended or resumed; for guards that leave more than wrappers behind."""

    @property
    def on(self) -> bool:
        """Whether the guard may act: not switched off by the user, not suspended."""
        return not self.off_by_user and not self.suspended

    @property
    def needed(self) -> bool:
        """Whether the guard is on and the fault is there; asks `applies` once."""
        return self.on and self.verdict().value

    def verdict(self) -> Choice[bool]:
        """Return what `applies` found, asked on the first call."""
        if self._verdict is None:
            self._verdict = self.applies()
        return self._verdict

    def forget(self) -> None:
        """Ask `applies` anew when next needed, and begin to count again."""
        self._verdict = None
        self.times = 0
        self.lines.clear()

    def acted(self, line: str, *, aloud: bool = True) -> None:
        """Note that the guard did something, and say it in one line, each distinct line once.

        Not `aloud` is for what changes nothing that the user asked for: it stands in the report and in results.json.
        """
        self.times += 1
        if line in self.lines:
            return
        self.lines.append(line)
        if aloud:
            notice.say(f"{line} ({self.name}: {self.issue})")


def around(guard: Guard, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace `owner.name` by a function that calls `wrapper(stock, *arguments)` while the guard is on.

    Several guards may be put around one function; the same guard a second time does nothing. Raises AttributeError
    where the library has no such function.
    """
    stock = owner.__dict__[name] if name in owner.__dict__ else getattr(owner, name)
    guards = getattr(stock, "hf_mps_guards", ())
    if guard.name in guards:
        return

    @functools.wraps(stock)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if guard.on:
            return wrapper(stock, *args, **kwargs)
        return stock(*args, **kwargs)

    replacement.hf_mps_guards = (*guards, guard.name)  # type: ignore[attr-defined]
    setattr(owner, name, replacement)
