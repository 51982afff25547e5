"""How a guard puts its own kernel before the device's, and still calls that one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch

from hf_mps.core.choice import Choice
from hf_mps.core.notices import overriding
from hf_mps.core.patching import Around, OriginalCall, Patch, Patcher
from hf_mps.layer.guards.base import Guard, tried
from hf_mps.metal.device.faults import possible
from hf_mps.metal.operators.dispatcher import registered_kernel

Function = Callable[..., Any]

# Those that were taken away, which may be in the midst of a call: they are not freed.
_running: list[Any] = []


class Tried(Guard):
    """A guard whose kernels stand where release, chip and macOS may have one of its `faults`, until a trial is over."""

    given = ""
    """What its operators are given in the trial: "permuted tensors"."""
    trials: Mapping[str, Callable[[], bool]] = {}
    """What says for each operator, when it is called, whether the device is right."""

    def reset(self) -> None:
        """Also what the trial found."""
        super().reset()
        self._wrong: frozenset[str] = frozenset()

    def trial(self) -> Choice[bool]:
        """Return whether one of the operators is wrong."""
        with self.left_alone():
            self._wrong = frozenset(name for name, right in self.trials.items() if not right())
        named = ", ".join(name for name in self.trials if not self._wrong or name in self._wrong)
        differ = "differs" if len(self._wrong) == 1 else "differ"
        faulty = f"{named} {differ} from the CPU on {self.given}"
        return tried(bool(self._wrong), faulty, f"{named} are right on {self.given}")

    def forget(self) -> None:
        """Also put back the kernels that the trial took away."""
        super().forget()
        self.release()
        self.install(torch)


class Kernel(Patch):
    """A kernel of a guard's before the device's: the target is "aten::mm", the method is called below autograd.

    A call for which `when(*arguments)` is false goes to the device's at once, at the price of that question. One that
    `says` what it does is called only where the fault is there, and counts. What is not to stay is taken away again by
    `Guard.release`. With `faults` it is armed only where one of them may be.
    """

    way = "before the kernel of"

    def __init__(
        self,
        method: Any,
        *given: Any,
        when: Function | None = None,
        says: str = "",
        faults: tuple[str, ...] = (),
        **settings: Any,
    ) -> None:
        self.when, self.says, self.faults = when, says, faults
        super().__init__(method, *given, where=(lambda: possible(*faults)) if faults else None, **settings)

    def arm(self, owner: Patcher, target: str, module: ModuleType | None) -> None:
        """Put it there, unless it is; `Guard.release` takes it away."""
        assert isinstance(owner, Guard)
        if target not in owner.kernels:
            name = target.removeprefix("aten::")
            ours = self.ours(owner)
            ours = partial(_while_needed, owner, self.says, ours) if self.says or isinstance(owner, Tried) else ours
            owner.kernels[target] = before(owner, name, ours, when=self.when)


def _while_needed(guard: Guard, says: str, ours: Function, stock: Function, *args: Any, **kwargs: Any) -> Any:
    if guard.needed:
        if says:
            guard.acted(says, aloud=False)
        return ours(stock, *args, **kwargs)
    if isinstance(guard, Tried):  # the device is right, and its kernels are left alone
        guard.release()
    return stock(*args, **kwargs)


def in_place_of(function: Function, stock: OriginalCall, *args: Any, **kwargs: Any) -> Any:
    """Call a function in the kernel's place; what it raises is the device's. For `Patch.through`."""
    return stock.foreign(function, *args, **kwargs)


class _Place:
    """One operator before whose kernel one of ours stands, which calls those of all guards in their order.

    A kernel in Python costs 2.5 µs a call, most of which PyTorch needs to make Python's arguments: a second guard at
    the same operator costs a tenth of that.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.stock = registered_kernel(f"aten::{name}")
        self.layers: list[Around] = []
        # A kernel lives as long as the library object that it was registered with.
        self._library: Any = None

    def register(self) -> None:
        """Have the operator call the layers that there are now."""
        if self._library is not None:
            _running.append(torch.library.get_kernel(f"aten::{self._name}", "MPS"))
            self._library.reset()
            self._library = None
        # The first guard is innermost: each calls the one that was put there before it, or the device.
        call = self.stock
        for around in self.layers:
            around.stock = call
            call = around.replacement()
        if self.layers:
            # Not torch.library.Library, which remembers the name and refuses whoever registers a kernel there later.
            self._library = torch._C._dispatch_library("IMPL", "aten", "MPS", __file__)
            # PyTorch warns, once in a process, that a kernel takes another's place: it is meant to.
            with overriding():
                self._library.impl(self._name, "MPS", call)


_places: dict[str, _Place] = {}


def before(guard: Guard, name: str, wrapper: Function, *, when: Function | None = None) -> Callable[[], None]:
    """Have operator `name` (`mm`, `addmm.out`) call `wrapper(stock, *arguments)` on the device, below autograd.

    `stock` is the kernel that was there; a wrapper that fails ends in it, as around any function. A call for which
    `when(*arguments)` is false goes to it at once, at the price of that question. What is returned takes the wrapper
    away, and may be called from inside it. Raises RuntimeError where this torch has no such operator or kernel.
    """
    if name not in _places:
        _places[name] = _Place(name)
    place = _places[name]
    around = Around(guard, f"aten::{name}", place.stock, wrapper, when)
    lists = place.layers, guard.arounds
    for each in lists:
        each.append(around)
    place.register()

    def back() -> None:
        for each in lists:
            each.remove(around)
        place.register()

    return back
