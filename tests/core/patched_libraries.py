"""Imports every library that is patched and prints, as JSON, how its modules differ from what is declared.

    python -m tests.core.patched_libraries

`missing`: declared for a module that was imported, not put there, and not called needless by who declares it.
`undeclared`: a function or value of ours in a module or class of theirs that nobody declares.
`again`: what another `install` changed; each run of a process arms the parts of its step once more.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch  # noqa: F401  switches the layer on

import hf_mps
from hf_mps.core.patching import MISSING, Give, Patcher, Register, located
from hf_mps.distributed.metal import backend
from hf_mps.layer import integrations
from hf_mps.layer.fused_step import switch
from hf_mps.layer.guards import kernel_overrides

LIBRARIES = ("torch", "transformers", "accelerate", "lightning", "datasets", "evaluate", "huggingface_hub")
LIBRARIES += ("lightning_fabric", "pytorch_lightning")
OURS = hf_mps.__path__[0]


def main() -> None:
    for name in ("lightning.pytorch", "pytorch_lightning", "evaluate", *integrations.table()):
        with suppress(ImportError):
            importlib.import_module(name)
    switch.arm()
    patchers = integrations.patchers()
    declared = [(patcher, target) for patcher in patchers for target in patcher.patches]
    missing = [f"{patcher.name}: {target}" for patcher, target in declared if not is_there(patcher, target)]
    known = {identity(value_at(target)) for _, target in declared if not target.startswith("aten::")}
    undeclared = [place for place, value in of_ours() if identity(value) not in known]
    kernels = {f"aten::{name}" for name in kernel_overrides._places}
    kernels |= {put.place for patcher in patchers for put in patcher.arounds if put.place.startswith("aten::")}
    undeclared += sorted(kernels - {target for _, target in declared})
    again = changed_by_another_install(patchers)
    print(json.dumps({"declared": len(declared), "missing": missing, "undeclared": undeclared, "again": again}))


def changed_by_another_install(patchers: list[Patcher]) -> list[str]:
    """Targets that hold another function or value after each patcher armed what it declares once more."""
    again = [patcher for patcher in patchers if patcher.kind != "device"]  # that one's `install` is its own
    install(again)  # also in the models that were imported since
    targets = {each.target for patcher in again for each in patcher.declared() if not each.target.startswith("aten::")}
    before = {target: value_at(target) for target in targets}
    install(again)
    return sorted(target for target, value in before.items() if not is_same(value_at(target), value))


def install(patchers: list[Patcher]) -> None:
    for patcher in patchers:
        for name in {name for each in patcher.declared() for name in each.after if name in sys.modules}:
            patcher.install(sys.modules[name])


def is_same(one: Any, other: Any) -> bool:
    return bool(one == other) if type(one) is dict else identity(one) == identity(other)


def is_there(patcher: Patcher, target: str) -> bool:
    """Whether the patch is in its place, or need not be: its module is absent, it comes late, or it is needless."""
    declared = next(each for each in patcher.declared() if each.target == target)
    modules = [sys.modules[name] for name in declared.after if name in sys.modules]
    if declared.late or not modules:
        return True
    patch = patcher.after(modules[0].__name__)[target]
    if patch.where is not None and not patch.where():
        return True
    if target.startswith("aten::"):
        there = target in patcher.registered or target in getattr(patcher, "kernels", ())
    elif isinstance(patch, Register):
        there = target in patcher.registered
    else:
        value = value_at(target)
        # A library of today has what a shim would give, or lacks what is patched in others.
        has_its_own = isinstance(patch, Give) or patch.optional or patch.own
        there = patcher.name in getattr(bare(value), "hf_mps_patches", ()) or is_ours(value) or has_its_own
        there = there or (type(value) is dict and holds_ours(value))
    return there or not any(patcher.concerns(module) for module in modules)


def holds_ours(table: dict[Any, Any]) -> bool:
    """Whether a table has something of ours: a function or class, or the name of the backend."""
    entries = (*table, *table.values())
    return backend.NAME in entries or any(map(is_ours, entries))


def value_at(target: str) -> Any:
    with suppress(AttributeError, ImportError):
        place, name = located(target)
        return vars(place).get(name, getattr(place, name, MISSING))
    return MISSING


def bare(value: Any) -> Any:
    """A function without what a class has around it. Asks by type, as some values of torch answer anything else."""
    if type(value) in (staticmethod, classmethod, MethodType):
        return value.__func__
    return value.fget if type(value) is property else value


def identity(value: Any) -> object:
    """What a function has in common with copies that a library makes of it (transformers' auto classes)."""
    function = bare(value)
    closure = function.__closure__ if type(function) is FunctionType else None
    return tuple(map(id, closure)) if closure else id(function)


def is_ours(value: Any) -> bool:
    function = bare(value)
    if type(function) is FunctionType:
        file = function.__code__.co_filename
        return file.startswith(OURS) and "simulator" not in file
    kind = value if type(value) is type else type(value)
    module = str(kind.__module__)
    return module.startswith("hf_mps.") and ".simulator" not in module


def of_ours() -> Iterator[tuple[str, Any]]:
    """Each function and value of ours in the libraries' modules, and in the classes that these define."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in LIBRARIES or not isinstance(module, ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if issubclass(type(value), type) and value.__module__ == name:
                yield from ((f"{name}:{attribute}.{each}", of) for each, of in vars(value).items() if is_ours(of))
            elif is_ours(value):
                yield f"{name}:{attribute}", value


if __name__ == "__main__":
    main()
