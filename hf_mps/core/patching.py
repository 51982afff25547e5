"""What the layer puts into other people's libraries: things with a name, which can be off, suspended and counted.

Guards and sentinels are such things; each kind has a registry of its own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Generic, TypeVar

from hf_mps.core.errors import Notice, UserError, nearest
from hf_mps.core.stock import REFUSALS, Around, described, is_late


class Installed:
    """One thing of its kind; a subclass has the sentences about it, `install`, and how it says what it did."""

    name: str
    """As the kind's environment variable calls it."""
    what: str
    """The danger in one sentence, without a final full stop."""
    kind = "part"
    """The word for what it is, as the user reads it."""
    repeats = False
    """Whether a line may be said again: of another training."""

    def __init__(self) -> None:
        self.off_by_user = False
        self.suspended = 0
        self.broken = False
        self.failure: str | None = None
        self.arounds: list[Around] = []
        self.times = 0
        self.lines: list[str] = []

    def install(self, module: ModuleType) -> None:
        """Put it into `module`, as the catalogue names it; touches no device."""
        raise NotImplementedError

    def say(self, line: str) -> None:
        """Tell the user, in the words of the kind."""
        raise NotImplementedError

    def switched(self, on: bool) -> None:
        """Called when it is suspended or resumed; for those that leave more than wrappers behind."""

    @property
    def on(self) -> bool:
        """Whether it may act: not switched off by the user, not suspended, not broken."""
        return not self.off_by_user and not self.suspended and not self.broken

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """What it stands around or before is for a while as the library and the device have it: for a trial."""
        self.suspended += 1
        try:
            yield
        finally:
            self.suspended -= 1

    def forget(self) -> None:
        """Begin to count again, and on again where it had failed at its work."""
        self.times = 0
        self.lines.clear()
        if self.broken:
            self.broken, self.failure = False, None

    def safely(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call something of its own while it is on: what that returns, or None where it fails. Refusals pass."""
        if not self.on:
            return None
        try:
            return function(*args)
        except REFUSALS:
            raise
        except Exception as error:
            if is_late(error):
                raise
            self.failed(error)
            return None

    def failed(self, error: Exception) -> None:
        """Switch itself off for the rest of the process and say so, once: a fault of ours is not the user's.

        What it left in a library stays (`switched` is not called): something may be in the midst of using it.
        """
        if self.broken:
            return
        self.broken = True
        self.failure = f"failed: {described(error)}"
        self._say_failure(f"the {self.kind} {self.name} {self.failure}; it is off from here on, and all else goes on")

    def _say_failure(self, line: str) -> None:
        try:
            self.say(line)
        except Notice:  # warnings are errors here: then it is printed
            print(f"hf_mps: {line}", file=sys.stderr)

    def acted(self, line: str, *, aloud: bool = True) -> None:
        """Note that it did something, and say it in one line, each distinct line once.

        Not `aloud` is for what changes nothing that the user asked for: it stands in the report and in results.json.
        """
        self.times += 1
        known = line in self.lines
        if not known:
            self.lines.append(line)
        if aloud and (self.repeats or not known):
            self.say(line)


def around(thing: Installed, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace `owner.name` by a function that calls `wrapper(stock, *arguments)` while the thing is on.

    Several may be put around one function; the same one a second time does nothing. A wrapper that fails switches its
    thing off, and the caller gets what stock does (`hf_mps.core.stock`). Raises AttributeError where the library
    has no such function.
    """
    stock = owner.__dict__[name] if name in owner.__dict__ else getattr(owner, name)
    names = getattr(stock, "hf_mps_installed", ())
    if thing.name in names:
        return
    put = Around(thing, f"{owner.__name__}.{name}", stock, wrapper)
    replacement = put.replacement()
    replacement.hf_mps_installed = (*names, thing.name)  # type: ignore[attr-defined]
    setattr(owner, name, replacement)
    thing.arounds.append(put)


T = TypeVar("T", bound=Installed)


class Registry(Generic[T]):
    """All things of one kind in this process: which are on, and what they did.

    `package` holds a file for each, its name with underscores, with the thing itself in the file's `attribute`;
    `after` names for each module of a library what is installed once that was imported.
    """

    def __init__(
        self, kind: str, module: Callable[[str], str], attribute: str, after: Mapping[str, tuple[str, ...]]
    ) -> None:
        self.kind = kind
        self.after = after
        self.names = tuple(dict.fromkeys(name for names in after.values() for name in names))
        self._module, self._attribute = module, attribute
        self._things: dict[str, T] = {}
        self._off: frozenset[str] = frozenset()
        self._started = False

    def start(self, off: frozenset[str] = frozenset()) -> None:
        """Install those that concern torch itself; `off` names those that the user wants off. Once in a process.

        Those that concern a library follow when it is imported (hf_mps.integrations).
        """
        if self._started:
            return
        self._started, self._off = True, off
        self.install(sys.modules["torch"])

    def started(self) -> bool:
        """Whether they were switched on in this process."""
        return self._started

    def install(self, module: ModuleType) -> None:
        """Install what the catalogue names for `module`; one that fails costs itself alone, in one notice."""
        for name in self.after.get(module.__name__, ()) if self._started else ():
            thing = self.get(name)
            if thing.off_by_user:
                continue
            try:
                thing.install(module)
            except Exception as error:
                thing.failure = f"does not know this version of {module.__name__}: {type(error).__name__}: {error}"
                thing.say(f"the {self.kind} {name} is not on: it {thing.failure}")

    def get(self, name: str) -> T:
        """Return one by its name. Raises UserError for one that there is not."""
        if name not in self.names:
            raise UserError(f"{name} is no {self.kind}; there are {', '.join(self.names)}{nearest(name, self.names)}")
        if name not in self._things:
            thing: T = getattr(importlib.import_module(self._module(name)), self._attribute)
            thing.off_by_user = name in self._off
            self._things[name] = thing
        return self._things[name]

    @contextmanager
    def suspend(self, *names: str) -> Iterator[None]:
        """Switch single ones off for a while, or all where no name is given. Raises UserError for a wrong name."""
        things = [self.get(name) for name in names or self.names]
        for thing in things:
            thing.suspended += 1
            thing.switched(False)
        try:
            yield
        finally:
            for thing in things:
                thing.suspended -= 1
                thing.switched(thing.on)

    def standing(self, thing: T, acted: str, line: int) -> tuple[str, str] | None:
        """The state of one and its reason where those are the same for every kind, else None.

        `acted` is the kind's word for one that did something; `line` is which of its lines is shown.
        """
        if thing.off_by_user or thing.suspended:
            return "off by user", f"HF_MPS_{self.kind.upper()}S=-{thing.name}" if thing.off_by_user else "suspended"
        if not self._started:
            return "needless", "this PyTorch has no Metal device, or HF_MPS=0"
        if thing.failure:
            return "failed", thing.failure
        return (acted, thing.lines[line]) if thing.times else None

    def that_acted(self) -> list[T]:
        """Those that did something in this process, in the catalogue's order."""
        loaded = (self._things[name] for name in self.names if name in self._things)
        return [thing for thing in loaded if thing.times]


def waits_for(registry: Registry[Any], name: str) -> str | None:
    """In words which imports `name` waits for, or None where one of its modules is there."""
    modules = [module for module, names in registry.after.items() if name in names]
    if any(module in sys.modules for module in modules):
        return None
    return f"for the import of {' or '.join(modules)}"


def table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Name, state and reason of each, a line each, in columns."""
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {state:<{widths[1]}}  {reason}" for name, state, reason in rows)
