#!/usr/bin/env python3
"""Private names of other libraries that hf_mps uses: finds them, and tries the table of them against a release.

    python scripts/tools/private_names.py                   against the installed releases
    python scripts/tools/private_names.py --newest          against the newest that pip has, without installing them
    python scripts/tools/private_names.py --found           what the sources use, with the files that do

The table is private_names.yaml beside this file. A release is read, never imported: a Python name is looked for in its
module's syntax tree, one of C++ in the stubs and shared libraries of the wheel. Exit code 1 where a name is gone, or
where hf_mps uses one that the table lacks.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Any

import yaml

from hf_mps.core.releases import numbers

CHECKOUT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".yaml")
DOCUMENTED = {"_asdict", "_current_frames", "_fields", "_getframe", "_replace"}
"""Names of Python's own that its documentation offers."""
PLATFORM = ("--only-binary=:all:", "--platform=macosx_14_0_arm64", "--python-version=3.12", "--implementation=cp")
"""The wheels that a Mac gets: those of torch for Linux are ten times as large."""

PATH = re.compile(r"[\w.]+:[\w.]+|(torch|transformers|accelerate|trl|peft|datasets|lightning)(\.\w+)+")
"""A text that names something of another library: a patch's target, or a module."""
COMPILED = (".pyi", "libtorch_python.so", "libtorch_python.dylib")
"""The files in which a name of torch's C++ is: the stubs lack some."""


@dataclass(frozen=True)
class Row:
    """A private name: `place` is "module", "module:Class", "modules", "C++" or "operators", as the table explains.

    One that ends in "(from 2.15 on)" is not looked for in releases before.
    """

    library: str
    place: str
    name: str
    breaks: str

    @property
    def words(self) -> list[str]:
        """The names as a source spells them: a module's path has several."""
        return self.name.split(".")


@cache
def table() -> tuple[Row, ...]:
    """The rows of private_names.yaml."""
    given: dict[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return tuple(
        Row(library, place, name, breaks)
        for library, places in given["names"].items()
        for place, names in places.items()
        for name, breaks in names.items()
    )


@cache
def listed_words() -> set[str]:
    """Every name that a row of the table covers."""
    return {word for row in table() for word in row.words}


def tried() -> dict[str, str]:
    """Library -> the releases in which its rows were tried."""
    releases: dict[str, str] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))["tried"]
    return releases


# What hf_mps uses ------------------------------------------------------------------------------------------------


def is_private(name: object) -> bool:
    """Whether a name is somebody's own: one underscore, and not ours (`_hf_mps_…`)."""
    return isinstance(name, str) and bool(re.fullmatch(r"_(?!_)(?!hf_mps)[A-Za-z]\w*", name)) and name not in DOCUMENTED


@cache
def used() -> dict[str, set[str]]:
    """Private names of others in hf_mps's sources -> the files that use them."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((CHECKOUT / "hf_mps").rglob("*.py"))}
    own = {name for tree in trees.values() for name in defined(tree)}
    known = listed_words()
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name, sure in mentioned(tree):
            # A name that hf_mps defines too is another library's where the table says so, or where it cannot be ours.
            if is_private(name) and (sure or name in known or name not in own):
                found.setdefault(name, set()).add(str(path.relative_to(CHECKOUT)))
    return found


def unlisted() -> list[str]:
    """The private names that hf_mps uses and the table lacks."""
    return sorted(set(used()) - listed_words())


def defined(tree: ast.AST) -> Iterator[str]:
    """The names that a file defines, attributes of its own objects included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def mentioned(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """The private names that a file reads, and what it wraps or imports; whether they are surely another library's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            mine = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            yield node.attr, False if mine else ast.unparse(node.value).startswith(("torch.", "transformers."))
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("hf_mps"):
            yield from ((part, True) for part in (node.module or "").split(".") if node.module != "__future__")
            yield from ((alias.name, True) for alias in node.names)
        elif isinstance(node, ast.Call) and re.fullmatch("(get|has|set|del)attr", getattr(node.func, "id", "")):
            yield from ((str(each.value), False) for each in node.args[1:2] if isinstance(each, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if PATH.fullmatch(node.value):
                yield from ((part, True) for part in re.split("[.:]", node.value))
            elif node.value in listed_words():
                yield node.value, True
        elif isinstance(node, ast.JoinedStr):
            text = ast.unparse(node)[2:-1]
            if re.fullmatch(r"[\w.{}\[\]]*(:|\}\.)[\w.{}]+", text):  # a target whose module is a constant
                yield from ((part, True) for part in re.split(r"[.:]", re.sub(r"\{[^}]*\}", "", text)))


# What a release has ----------------------------------------------------------------------------------------------


@dataclass
class Release:
    """The files of a release of a library, by their paths from site-packages on; nothing of it is imported."""

    library: str
    version: str
    paths: dict[str, Path]
    _read: dict[str, bytes] = field(default_factory=dict)
    _trees: dict[str, Any] = field(default_factory=dict)

    def has(self, row: Row) -> bool:
        """Whether the release has a row's name where the table says that it is."""
        if row.place == "modules":
            path = row.name.replace(".", "/")
            return any(name in (f"{path}.py", f"{path}/__init__.py") for name in self.paths)
        if row.place in ("C++", "operators"):
            files = COMPILED if row.place == "C++" else ("torchgen/packaged/ATen/native/native_functions.yaml",)
            return any(row.name.encode() in self.bytes_of(name) for name in self.paths if name.endswith(files))
        module, _, inside = row.place.partition(":")
        tree = self.tree(module)
        for part in filter(None, inside.split(".")):
            classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == part)
            tree = next(classes, None) if tree is not None else None
        return tree is not None and row.name in {*defined(tree), *listed(tree)}

    def bytes_of(self, name: str) -> bytes:
        """What a file holds; read once."""
        if name not in self._read:
            self._read[name] = self.paths[name].read_bytes()
        return self._read[name]

    def tree(self, module: str) -> Any:
        """The syntax tree of a module, or None; parsed once."""
        if module not in self._trees:
            base = module.replace(".", "/")
            path = self.paths.get(f"{base}.py") or self.paths.get(f"{base}/__init__.py")
            self._trees[module] = None if path is None else ast.parse(path.read_text(encoding="utf-8"))
        return self._trees[module]


def listed(tree: ast.AST) -> Iterator[str]:
    """Names that a module imports, declares, slots or writes as texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            yield (node.asname or node.name).rpartition(".")[2]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Attribute):
            yield node.attr


def installed(library: str) -> Release | None:
    """The release that is installed here, or None."""
    try:
        found = {str(each): Path(str(each.locate())) for each in files(library) or ()}
        return Release(library, version(library), found)
    except PackageNotFoundError:
        return None


def downloaded(requirement: str, folder: Path) -> Release:
    """A release from pip, the newest of a bare name, downloaded into `folder` without what it needs."""
    library = requirement.partition("==")[0]
    target = folder / library
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={target}", *PLATFORM]
    subprocess.run([*command, requirement], check=True)
    wheel = next(target.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    found = {str(path.relative_to(target)): path for path in target.rglob("*") if path.is_file()}
    return Release(library, wheel.name.split("-")[1], found)


def gone(release: Release, rows: Iterable[Row]) -> list[Row]:
    """The rows whose name a release lacks."""
    ours = [row for row in rows if row.library == release.library and since(row) <= numbers(release.version)]
    return [row for row in ours if not release.has(row)]


def since(row: Row) -> tuple[int, ...]:
    """The first release that has a row's name; (0,) where all that were tried do."""
    found = re.search(r"\(from ([\d.]+) on\)$", row.breaks)
    return numbers(found[1]) if found else (0,)


def users(names: dict[str, set[str]], row: Row) -> list[str]:
    """The files that use what a row names."""
    return sorted(names.get(row.words[-1], set()))


def main() -> int:
    """Print what is gone or not in the table; return 1 where there is anything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--newest", action="store_true", help="try the newest releases that pip has")
    parser.add_argument("--found", action="store_true", help="list what the sources use")
    parser.add_argument("libraries", nargs="*", help="only these, with --newest also as transformers==5.0.0")
    given = parser.parse_args()
    names = used()
    if given.found:
        for name, users in sorted(names.items()):
            print(name, *sorted(users))
        return 0
    missing = unlisted()
    for name in missing:
        print(f"{name}: not in {TABLE.name}; used by {', '.join(sorted(names[name]))}")
    broken = 0
    with tempfile.TemporaryDirectory() as folder:
        for library in given.libraries or tried():
            if library == "python":
                continue
            release = downloaded(library, Path(folder)) if given.newest else installed(library)
            if release is None:
                print(f"{library}: not installed")
                continue
            rows = gone(release, table())
            broken += len(rows)
            count = sum(row.library == release.library for row in table())
            print(f"{release.library} {release.version}: {count} names, {len(rows)} gone")
            for row in rows:
                print(
                    f"  {row.place} {row.name}: {row.breaks}; used by {', '.join(sorted(names.get(row.name, ['?'])))}"
                )
    return 1 if missing or broken else 0


if __name__ == "__main__":
    sys.exit(main())
