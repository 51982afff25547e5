"""A digest of the code behind a function: what a cache of its results has to be keyed by.

`datasets.fingerprint.Hasher` cannot serve. It pickles an imported function by its name, so a helper may change and the
hash does not, and it pickles what a closure holds, rows and their paths included. Hashing every file that is imported
would be safe and too much: a task's imports reach 48 to 79 of the 125 files below finetune, the plots among them. Here
the names are followed that the code itself uses.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

PLAIN = (str, int, float, bool, bytes, re.Pattern)
CONTAINERS = (dict, list, tuple, set, frozenset)


def digest(function: Callable[..., Any]) -> str:
    """Hash the source files of the function's own package that its code reaches, and the constants that it names.

    Followed are global names, attributes of modules, imports inside functions, methods of classes, and the types of
    what a closure or a partial holds; not the values there, which the caller's key has to name. The digest is the same
    in every process and wherever the package lies.
    """
    innermost: Any = function
    while isinstance(innermost, functools.partial):
        innermost = innermost.func
    innermost = inspect.unwrap(innermost)
    code = _Code(_top(getattr(innermost, "__module__", None) or type(innermost).__module__))
    code.visit(function)
    content = "\n".join(sorted({f"{name} {_file_digest(name)}" for name in code.modules} | code.constants))
    return hashlib.sha256(content.encode()).hexdigest()[:32]


class _Code:
    """The modules of one package that were reached, and the constants, as `name = value`."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.modules: set[str] = set()
        self.constants: set[str] = set()
        self._visited: dict[int, Any] = {}  # the values themselves too: the id of one that is gone is given anew
        self._looked_up: set[tuple[str, str]] = set()

    def visit(self, value: Any) -> None:
        """Follow a function, a class or an object; one of another package is passed over."""
        if id(value) in self._visited:
            return
        self._visited[id(value)] = value
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.visit(part)
        elif isinstance(value, MethodType):
            self.visit(value.__func__)
            self.visit(value.__self__)
        elif callable(value) and hasattr(value, "__wrapped__"):
            self.visit(value.__wrapped__)
        elif isinstance(value, (FunctionType, type)):
            if self._ours(value):
                self.modules.add(value.__module__)
                self._function(value) if isinstance(value, FunctionType) else self._class(value)
        elif self._ours(type(value)):
            self.visit(type(value))
            for attribute in getattr(value, "__dict__", {}).values():
                self.visit(attribute)

    def _function(self, function: FunctionType) -> None:
        names = set(_names(function.__code__))
        for name in names:
            if name in function.__globals__:
                self._named(name, function.__globals__[name], names)
        for name in _imports(function.__code__):
            if _top(name) == self.package:
                self._named(name, _imported(name), names)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # empty: a name that is bound later, or never
                self.visit(cell.cell_contents)

    def _class(self, kind: type) -> None:
        for base in kind.__mro__[1:]:
            self.visit(base)
        for member in vars(kind).values():
            for function in (member, *(getattr(member, name, None) for name in ("__func__", "fget", "func"))):
                if isinstance(function, FunctionType):
                    self.visit(function)

    def _named(self, name: str, value: Any, names: set[str]) -> None:
        """Follow what a name stands for: of a module the attributes in `names`, of a table everything in it."""
        if isinstance(value, PLAIN):
            self.constants.add(f"{name} = {value!r}")
        elif isinstance(value, CONTAINERS):
            for inner in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
                self._named(name, inner, names)
        elif not isinstance(value, ModuleType):
            self.visit(value)
        elif _top(value.__name__) == self.package:
            for attribute in names & set(vars(value)):
                if (value.__name__, attribute) not in self._looked_up:
                    self._looked_up.add((value.__name__, attribute))
                    self._named(f"{value.__name__}.{attribute}", vars(value)[attribute], names)

    def _ours(self, value: Any) -> bool:
        return _top(getattr(value, "__module__", None) or "") == self.package


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in `code` and the functions inside it."""
    yield from code.co_names
    for inner in _inside(code):
        yield from _names(inner)


def _imports(code: CodeType) -> Iterator[str]:
    """Yield what `code`, or a function inside it, imports when it runs: modules, and what it takes out of them."""
    module = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            module = str(instruction.argval)
            yield module
        elif instruction.opname == "IMPORT_FROM":
            yield f"{module}.{instruction.argval}"
    for inner in _inside(code):
        yield from _imports(inner)


def _imported(name: str) -> Any:
    """Return the module called `name`, or what a module holds under the last part of it."""
    around, _, last = name.rpartition(".")
    if around and last in vars(module := importlib.import_module(around)):
        return vars(module)[last]
    return importlib.import_module(name)


def _inside(code: CodeType) -> Iterator[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _top(module: str) -> str:
    return module.partition(".")[0]


def _file_digest(module: str) -> str:
    """The digest of a module's source; empty for one without a file, such as what a person types at the prompt."""
    path = getattr(sys.modules[module], "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
