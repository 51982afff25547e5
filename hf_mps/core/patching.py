"""What the layer puts into other people's libraries, declared: which attribute of which module, and by whom.

Whoever patches something (a guard, a sentinel, a shim, an integration) has a table `patches`. Its keys are targets,
"module:Class.attribute", or "aten::operator" for a kernel; its values say what is done there. `Patcher.install` arms
those that belong to a module once that was imported; nobody patches a library in any other way.

What is put around a function looks at a call, changes what goes in or comes out, or refuses it in a line for people.
Whatever else goes wrong in it ends in the library's own behaviour, and is never the caller's: the stock function is
called where it was not yet, and what it returned or raised is handed on where it was. It runs once in either case.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from hf_mps.core import notices
from hf_mps.core.errors import Notice, RunError, UserError
from hf_mps.core.text import summary

REFUSALS = (UserError, RunError, Notice)
"""What the layer raises on purpose; a Notice is raised only where the user turned warnings into errors."""


class OriginalCall:
    """The stock function during one call of what was put around it: whether it ran, and how that ended."""

    __slots__ = ("called", "error", "function", "result")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.called = function, False
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the call that the caller wants; what it returns counts, should anything go wrong afterwards."""
        try:  # as `foreign`, written out: Tensor.to comes through here
            self.result = self.function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        self.error, self.called = None, True
        return self.result

    def partial(self, *args: Any, **kwargs: Any) -> Any:
        """Make a call whose result is not yet the caller's: a layer of several, a file under another name."""
        return self.foreign(self.function, *args, **kwargs)

    def foreign(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call something else that is the library's or the user's: what it raises goes through as the stock's does."""
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        self.error = None
        return result


@dataclass(eq=False)
class Around:
    """One function of ours around one of a library's; `wrapper(stock, *arguments)` is called while `owner.on`.

    Where `when` is given, only for calls that `when(*arguments)` is true for: others cost little more than to ask.
    """

    owner: Any
    place: str
    """What it is around, as `Trainer.train`."""
    stock: Callable[..., Any]
    wrapper: Callable[..., Any]
    when: Callable[..., Any] | None = None

    def replacement(self) -> Callable[..., Any]:
        """The function that takes the stock one's place."""
        owner, stock = self.owner, self.stock

        @functools.wraps(stock)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if not owner.on:
                return stock(*args, **kwargs)
            call, theirs = OriginalCall(stock), None
            try:
                if self.when is None or self.when(*args, **kwargs):
                    return self.wrapper(call, *args, **kwargs)
            except REFUSALS:
                raise
            except Exception as error:
                # By identity: an error of ours may be of the same kind, and say the same.
                if error is call.error or is_late(error):
                    raise
                theirs = call.error
                owner.failed(error)
            finally:
                call.error = None  # an error that its own frames hold would keep their tensors alive
            if theirs is not None:
                try:
                    raise theirs
                finally:
                    del theirs
            return call.result if call.called else stock(*args, **kwargs)

        return replacement


def is_late(error: Exception) -> bool:
    """Whether the device raises it for work that it was given before, to whoever waits first: it is the program's.

    From torch 2.14 on Metal tells so of an index out of range. By its name, as nothing here imports torch.
    """
    return type(error).__name__ == "AcceleratorError"


def described(error: Exception) -> str:
    """Return an error in one line, with the line of the layer's own code that it came from."""
    ours = [each for each in traceback.extract_tb(error.__traceback__) if f"{os.sep}hf_mps{os.sep}" in each.filename]
    place = f" ({ours[-1].filename.rpartition(f'hf_mps{os.sep}')[2]}:{ours[-1].lineno})" if ours else ""
    return f"{summary(error)}{place}"


MISSING: Any = object()
"""What a library's attribute is where there is none."""
LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
"""The two names under which Lightning comes, with modules of each."""
CONNECTORS = (
    "lightning.fabric.connector:_Connector",
    "lightning_fabric.connector:_Connector",
    "lightning.pytorch.trainer.connectors.accelerator_connector:_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector:_AcceleratorConnector",
)
"""What reads `accelerator=`, `devices=` and `num_nodes=` of Lightning's Fabric and Trainer."""


class Declaration(NamedTuple):
    """One patch, as docs/patches.md lists it: `target` is "module:Class.attribute" or "aten::operator"."""

    kind: str
    """guard, sentinel, shim, integration, fallback or device."""
    name: str
    target: str
    way: str
    """around, in place of, given or registered: what is done to the target."""
    after: tuple[str, ...]
    """The modules after whose import it is done."""
    late: bool
    """Whether it is done only when its owner finds that it is needed."""


class Patch:
    """A function of the owner's around one of a library's, called as `method(stock, *given, *arguments)`.

    `method` is a function, or the name of one of the owner's. `after` names the module after whose import it is armed,
    where that is not the target's own; torch's modules are armed with torch. An `optional` target is missing in some
    releases. One that has to be the class's `own` is left alone where that inherits it. Where the wrapper is not the
    method itself, it is `through`, called as `through(method, stock, *arguments)`. `where()` says whether it is armed;
    a `late` one is armed by its owner (`Patcher.arm`), when that finds it needed.
    """

    way = "around"
    gives = False
    """Whether the attribute is one that the library lacks."""

    def __init__(
        self,
        method: Any,
        *given: Any,
        after: str | tuple[str, ...] = (),
        optional: bool = False,
        own: bool = False,
        through: Callable[..., Any] | None = None,
        where: Callable[[], bool] | None = None,
        late: bool = False,
    ) -> None:
        self.method, self.given = method, given
        self.after = (after,) if isinstance(after, str) else after
        self.optional, self.own = optional, own
        self.through, self.where, self.late = through, where, late

    def ours(self, owner: Patcher) -> Any:
        """Return what of the owner's is put at the target."""
        ours = getattr(owner.home, self.method) if isinstance(self.method, str) else self.method
        ours = functools.partial(ours, *self.given) if self.given else ours
        return functools.partial(self.through, ours) if self.through else ours

    def arm(self, owner: Patcher, target: str, module: ModuleType | None) -> None:
        """Put it there. Raises AttributeError where the library has no such attribute and it is not optional."""
        try:
            place, name = located(target, module)
        except AttributeError:
            if not self.optional:
                raise AttributeError(f"there is no {target}") from None
            return
        # As it lies in the class: getattr would bind a class method, and call a property.
        stock = vars(place).get(name, MISSING)
        stock = getattr(place, name, MISSING) if stock is MISSING and not self.own else stock
        if stock is MISSING and not (self.optional or self.own or self.gives):
            raise AttributeError(f"there is no {target}")
        self.put(owner, place, name, stock)

    def put(self, owner: Patcher, place: Any, name: str, stock: Any) -> None:
        """Change the attribute `name` of `place`, a module or a class; `stock` is MISSING where there is none."""
        if stock is not MISSING:
            owner.around(place, name, self.ours(owner))


class Put(Patch):
    """What `method(stock)` makes of the attribute takes its place; it returns `stock` to leave that, or MISSING."""

    way = "in place of"

    def put(self, owner: Patcher, place: Any, name: str, stock: Any) -> None:
        """Change the attribute."""
        new = self.ours(owner)(stock)
        if new is not stock and new is not MISSING:
            setattr(place, name, new)


class Give(Patch):
    """The library is given the attribute where it has none: `method` is the value, or its name in the owner."""

    way = "given"
    gives = True

    def put(self, owner: Patcher, place: Any, name: str, stock: Any) -> None:
        """Give it; a field of a dataclass is there without being an attribute of the class."""
        if stock is MISSING and name not in getattr(place, "__dataclass_fields__", {}):
            setattr(place, name, self.ours(owner))


class Register(Patch):
    """The target is a function that keeps what it is given; it is called with the owner's method, once.

    Where it keeps a table, `under` is the name that the method gets there; `keywords` are what else it is given.
    """

    way = "registered"

    def __init__(
        self, method: Any, *given: Any, under: str = "", keywords: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
        super().__init__(method, *given, **settings)
        self.under, self.keywords = under, dict(keywords or {})

    def arm(self, owner: Patcher, target: str, module: ModuleType | None) -> None:
        """Register it, unless that was done."""
        if target not in owner.registered:
            place, name = located(target, module)
            getattr(place, name)(*filter(None, (self.under,)), self.ours(owner), **self.keywords)
            owner.registered.add(target)


def located(target: str, module: ModuleType | None = None) -> tuple[Any, str]:
    """The module or class that has the attribute, and its name; `module` stands in for the one of its name.

    Raises AttributeError where a part of the path to it is not there.
    """
    name, _, path = target.partition(":")
    *parents, attribute = path.split(".")
    if module is not None and module.__name__ == name:
        place: Any = module
    else:
        place = sys.modules.get(name) or import_module(name)
    for parent in parents:
        place = getattr(place, parent)
    return place, attribute


def in_lightning(patches: Mapping[str, str | Patch]) -> dict[str, str | Patch]:
    """Return the same patches in both of Lightning's packages; the keys go on behind "lightning.pytorch."."""
    return {f"{package}.{target}": patch for package in LIGHTNING for target, patch in patches.items()}


class Patcher:
    """Somebody who patches libraries: `patches` says where, and `concerns` where a release needs it."""

    kind = "part"
    """The word for what it is, as the user reads it."""
    name: str

    def __init__(self) -> None:
        self.home: Any = self
        """What has the methods that its patches name."""
        self.arounds: list[Around] = []
        self.registered: set[str] = set()

    @property
    def patches(self) -> Mapping[str, str | Patch]:
        """Target -> what is done there; a method's name means that it is put around the function."""
        return {}

    def concerns(self, module: ModuleType) -> bool:
        """Whether what is patched after `module`, as it is installed here, is to be; asked once it was imported."""
        return True

    def around(self, place: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Have `wrapper(stock, *arguments)` called in place of the function `name` of a module or class.

        Several may be put around one function; the same one a second time does nothing. Raises AttributeError where the
        library has no such function.
        """
        replace(self.name, place, name, lambda stock: self.wrapped(f"{place.__name__}.{name}", stock, wrapper))

    def wrapped(
        self, where: str, stock: Callable[..., Any], wrapper: Callable[..., Any], owner: Any = None
    ) -> Callable[..., Any]:
        """The function that calls `wrapper(stock, *arguments)`; `where` names the stock one, as `Trainer.train`.

        It does while `owner.on`; where the wrapper fails, that is told, and the caller gets what stock makes. By
        default the owner is this patcher.
        """
        self.arounds.append(Around(owner or self, where, stock, wrapper))
        return self.arounds[-1].replacement()

    def after(self, module: str) -> dict[str, Patch]:
        """Return its patches that belong to `module`, by their targets, in their order."""
        return {target: patch for target, patch in self._table() if module in armed_after(target, patch)}

    def install(self, module: ModuleType) -> None:
        """Arm what is declared for `module`; touches no device, and a second call changes nothing."""
        if self.concerns(module):
            for target, patch in self.after(module.__name__).items():
                if not patch.late and (patch.where is None or patch.where()):
                    patch.arm(self, target, module)

    def arm(self, *targets: str) -> None:
        """Arm what was declared as late."""
        table = dict(self._table())
        for target in targets:
            table[target].arm(self, target, None)

    def unknown(self, module: ModuleType, error: Exception) -> None:
        """Called where `install` fails: this version of the library is not known."""
        raise error

    def declared(self) -> Iterator[Declaration]:
        """Yield each of its patches."""
        for target, patch in self._table():
            yield Declaration(self.kind, self.name, target, patch.way, armed_after(target, patch), patch.late)

    def _table(self) -> Iterator[tuple[str, Patch]]:
        for target, each in self.patches.items():
            yield target, each if isinstance(each, Patch) else Patch(each)


class Fallible(Patcher):
    """Somebody whose own faults cost a training nothing: they end in one line, and in the library's own behaviour."""

    title = "the {0.kind} {0.name}"
    """What the line calls it."""
    broken = False
    failure: str | None = None

    @property
    def on(self) -> bool:
        """Return whether it may act."""
        return not self.broken

    def say(self, line: str) -> None:
        """Tell the user, in the words of its kind."""
        notices.print_notice(line)

    def safely(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function while it is on; return its result, or None where that fails."""
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

        What it left in a library stays (`Safeguard.switched` is not called): something may be in the midst of using it.
        """
        if self.broken:
            return
        self.broken = True
        self.failure = f"failed: {described(error)}"
        line = f"{self.title.format(self)} {self.failure}; it is disabled for this process; training continues"
        try:
            self.say(line)
        # Where this program turns warnings into errors the line is printed.
        except Notice:
            print(f"hf_mps: {line}", file=sys.stderr)


def armed_after(target: str, patch: Patch) -> tuple[str, ...]:
    """Return the modules after whose import a patch is armed."""
    module = target.partition(":")[0]
    return patch.after or ("torch" if module.partition(".")[0] in ("aten", "torch") else module,)


class ModulePatcher(Patcher):
    """A file whose functions are around a library's: a shim or an integration, with `patches` and maybe `concerns`.

    A fault of a `safe` one's ends in the library's own behaviour, with one line (`hf_mps.core.patching`). Shims
    are not safe: what they refuse are the library's own errors, and a call in old words means nothing to stock.
    """

    patches: Mapping[str, str | Patch] = {}

    def __init__(
        self, kind: str, module: ModuleType, *, safe: bool, patches: Mapping[str, str | Patch] | None = None
    ) -> None:
        super().__init__()
        self.kind, self.name = kind, module.__name__.rpartition(".")[2]
        self.patches = module.patches if patches is None else patches
        self.home, self._safe = module, safe

    def concerns(self, module: ModuleType) -> bool:
        """Return what the file's own `concerns` says, where it has one."""
        return bool(getattr(self.home, "concerns", super().concerns)(module))

    def wrapped(
        self, where: str, stock: Callable[..., Any], wrapper: Callable[..., Any], owner: Any = None
    ) -> Callable[..., Any]:
        """Wrap the function; where the file is not safe, a wrapper's errors are the caller's."""
        return super().wrapped(where, stock, wrapper, Faults(where)) if self._safe else plainly(stock, wrapper)


class Faults:
    """Whose fault it is where a function of an integration fails: that one is off then."""

    def __init__(self, where: str) -> None:
        self.on = True
        self._where = where

    def failed(self, error: Exception) -> None:
        """Switch it off, and say so in one line."""
        self.on = False
        notices.print_notice(
            f"the wrapper around {self._where} failed: {described(error)}; it is disabled for this process; "
            "training continues"
        )


def replace(who: str, place: Any, name: str, made: Callable[[Any], Any]) -> None:
    """Put `made(stock)` in the place of a function, unless `who` has done so; several may do it, each around the last.

    A class method stays one: its class is the first argument of what is put there. Raises AttributeError where the
    library has no such function.
    """
    stock = place.__dict__[name] if name in place.__dict__ else getattr(place, name)
    of_class = isinstance(stock, classmethod)
    function = stock.__func__ if of_class else stock
    names = getattr(function, "hf_mps_patches", ())
    if who not in names:
        replacement = made(function)
        # The names of all before go along, since each wrapper hides the one that it is around.
        replacement.hf_mps_patches = (*names, who)
        setattr(place, name, classmethod(replacement) if of_class else replacement)


def plainly(stock: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that calls `wrapper(stock, *arguments)`, whose errors are the caller's."""

    @functools.wraps(stock)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(stock, *args, **kwargs)

    return replacement
