"""What the package's sources say, each read once: the trees are not kept, as a million nodes slow every collection."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests import CHECKOUT

PACKAGE = CHECKOUT / "hf_mps"


@dataclass(frozen=True)
class Call:
    """A call: where it is, the dotted name that is called (or ""), and its keywords' constants as text."""

    where: str
    function: str
    words: dict[str | None, str]


@dataclass
class Source:
    """A module: its imports (but for those that only a type checker reads), calls and functions."""

    path: Path
    lines: int
    imports: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    for_types: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    at_head: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    """Of the imports those that run when the module is imported: outside functions."""
    functions: dict[str, int] = field(default_factory=dict)
    """Each function's lines from its first statement on; of several with the same name the longest one's."""


@cache
def sources() -> dict[str, Source]:
    """Return every module of the package by its dotted name."""
    return {_module_name(path): _read(path) for path in sorted(PACKAGE.rglob("*.py"))}


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def _read(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    found = Source(path, text.count("\n"))
    for node, typed, later in _nodes(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            (found.for_types if typed else found.imports).append(node)
            if not typed and not later:
                found.at_head.append(node)
        elif isinstance(node, ast.Call):
            words = {word.arg: str(getattr(word.value, "value", "")) for word in node.keywords}
            found.calls.append(Call(f"{path.relative_to(CHECKOUT)}:{node.lineno}", _dotted(node.func), words))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.body[0].lineno + 1
            found.functions[node.name] = max(length, found.functions.get(node.name, 0))
    return found


def _nodes(node: ast.AST, typed: bool = False, later: bool = False) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Yield every node below one, whether only a type checker reads it, and whether it runs in a function alone."""
    for child in ast.iter_child_nodes(node):
        below = typed or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        called = later or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield child, below, called
        yield from _nodes(child, below, called)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{of}.{node.attr}" if (of := _dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""
