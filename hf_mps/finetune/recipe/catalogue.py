"""The recipes that come with hf_mps: their folder, their names, and what each is for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hf_mps.core.errors import UserError, nearest, user_path

SUFFIXES = (".yaml", ".yml")
WORD = re.compile(r"[\w-]+")


@dataclass(frozen=True)
class Entry:
    """A recipe on disk: its name (`glue/mrpc`) and its file."""

    name: str
    path: Path

    @property
    def purpose(self) -> str:
        """The recipe's first comment line, which says what it is for; empty for a file without one."""
        first = self.path.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
        return first.lstrip("# ").rstrip(".") if first.startswith("#") else ""


def folder() -> Path:
    """Return the folder of the recipes: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def entries() -> list[Entry]:
    """Return every recipe below `folder()`, at any depth, sorted by name."""
    root = folder()
    files = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES)
    return [Entry(path.relative_to(root).with_suffix("").as_posix(), path) for path in files]


def find(recipe: str) -> Entry:
    """Return the recipe called `recipe`, or the user's own YAML file at that path.

    Raises UserError, with the nearest name, where neither exists.
    """
    path = user_path(recipe)
    if path.suffix in SUFFIXES:
        if not path.is_file():
            raise UserError(f"{recipe}: no such recipe file; next: hf-mps recipes list")
        return Entry(path.stem, path)
    known = {entry.name: entry for entry in entries()}
    if recipe not in known:
        # Those of the folder `sft`, or the nearest name, also for who leaves the folder out: `mrpc` for `glue/mrpc`.
        word = recipe.lower().rstrip("/")
        short = {name.rpartition("/")[2]: name for name in known}
        near = nearest(word, known) or nearest(word, short)
        for last, name in short.items():
            near = near.replace(f"'{last}'", f"'{name}'")
        # Whoever names a task or a model (`ner`, `vit`) means a recipe whose purpose has the word.
        spoken = [name for name, entry in known.items() if word in WORD.findall(entry.purpose.lower())]
        if several := [name for name in known if name.startswith(f"{word}/")] or ([] if near else spoken[:3]):
            near = f"; did you mean {' or '.join(map(repr, several))}?"
        allowed = "allowed: a recipe's name, or a path that ends in .yaml; next: hf-mps recipes list"
        raise UserError(f"'{recipe}' is not a recipe{near}; {allowed}")
    return known[recipe]


def own_name(recipe: str) -> Path:
    """Return the file name of a copy of the recipe: `mrpc.yaml` for `glue/mrpc`."""
    return Path(find(recipe).name.rpartition("/")[2] + SUFFIXES[0])


def copy(recipe: str, file: Path | None = None) -> Path:
    """Copy the recipe into `file` (default: `own_name`), with commands that name that file, and return its path.

    Raises UserError for a file that exists, has another ending than a recipe, or cannot be written.
    """
    entry, target = find(recipe), file or own_name(recipe)
    if target.suffix not in SUFFIXES:
        raise UserError(f"{target}: a recipe is not found by that name; allowed: one that ends in .yaml")
    text = entry.path.read_text(encoding="utf-8")
    text = text.replace(f"hf_mps.finetune {entry.name}", f"hf_mps.finetune {target}")
    try:
        with target.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise UserError(f"{target} exists already, and a copy never overwrites a file; give another name") from None
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from error
    return target
