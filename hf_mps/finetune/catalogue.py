"""The recipes that come with hf_mps: where they lie, what they are called, what each is for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hf_mps.errors import UserError, nearest

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Entry:
    """A recipe on disk: its name as people say it (`glue/mrpc`), its file, and the first sentence of its header."""

    name: str
    path: Path
    purpose: str


def folder() -> Path:
    """The folder of the recipes: inside the installed package, or beside it in a checkout.

    Raises UserError where neither is there, which is a broken installation.
    """
    package = Path(__file__).resolve().parent.parent
    for place in (package / "recipes", package.parent / "recipes"):
        if place.is_dir():
            return place
    raise UserError("the recipes of hf_mps are missing; next: pip install --force-reinstall hf-mps")


def entries() -> list[Entry]:
    """Every recipe below `folder()`, at any depth, in the order of their names."""
    root = folder()
    files = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES)
    return [Entry(path.relative_to(root).with_suffix("").as_posix(), path, _purpose(path)) for path in files]


def find(recipe: str) -> Entry:
    """The recipe called `recipe`, or the user's own YAML file at that path.

    Raises UserError where neither exists, with the nearest name.
    """
    path = Path(recipe).expanduser()
    if path.suffix in SUFFIXES:
        if not path.is_file():
            raise UserError(f"{recipe}: there is no such recipe file; next: hf-mps recipes list")
        return Entry(path.stem, path, _purpose(path))
    known = {entry.name: entry for entry in entries()}
    if recipe not in known:
        allowed = f"{', '.join(known)}, or a path that ends in .yaml"
        raise UserError(f"'{recipe}' is not a recipe; allowed: {allowed}{_near(recipe, list(known))}")
    return known[recipe]


def _near(recipe: str, known: list[str]) -> str:
    """The nearest name, also for somebody who leaves the folder out: `mrpc` for `glue/mrpc`."""
    short = {name.rpartition("/")[2]: name for name in known}
    words = nearest(recipe, known) or nearest(recipe, short)
    for last, name in short.items():
        words = words.replace(f"'{last}'", f"'{name}'")
    return words


def _purpose(path: Path) -> str:
    """The first comment line of a recipe, which says what it is for; empty for a file that has none."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline().strip()
    return first.lstrip("# ").rstrip(".") if first.startswith("#") else ""
