"""Recipes as files: those that come with hf_mps, what each is for, and its YAML as plain values with lines of keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hf_mps.core.errors import UserError, nearest, user_path
from hf_mps.core.text import first_line

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


Values = dict[str, Any]
DEEPEST = 20
FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
# More than any key takes: 64 bits have 19.
DIGITS = 18
# Characters of a wrong value that a line repeats.
SHOWN = 200


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain scalars. PyYAML reads 1.1, where `no` is false, `2e-5` is text, `010` is 8 and `1:30` is 90."""


# SafeLoader's resolvers are those of YAML 1.1, so this class begins with none.
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", FLOAT, list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


@dataclass
class Document:
    """A recipe before validation: its values, and where each dotted key was given.

    `path` is None for a recipe without a file; `overridden` holds the dotted keys of the command line.
    """

    values: Values
    path: Path | None = None
    lines: dict[str, int] = field(default_factory=dict)
    overridden: frozenset[str] = frozenset()
    twice: list[tuple[int, str]] = field(default_factory=list)
    """Keys given again, of which YAML keeps the last: the line, and the whole sentence."""

    def where(self, key: str) -> str:
        """Return the origin of `key`: `command line`, or the file with the line of the key or the nearest section
        around it.
        """
        parts = key.split(".")
        for end in range(len(parts), 0, -1):
            around = ".".join(parts[:end])
            if around in self.overridden:
                return "command line"
            if around in self.lines:
                return f"{self.path}:{self.lines[around]}"
        if any(other.startswith(f"{key}.") for other in self.overridden):  # a section that the command line began
            return "command line"
        return str(self.path) if self.path else "command line"


def read_yaml(path: Path, *, lenient: bool = False) -> Document:
    """Read the recipe at `path`. Raises UserError for a file that cannot be read, is no YAML or repeats a key.

    With `lenient` repeated keys are left in `twice` for the caller to report.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    try:
        values = plain(text)
        lines: dict[str, int] = {}
        twice: list[tuple[int, str]] = []
        _walk(yaml.compose(text, Loader=_Loader), "", lines, twice)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise UserError(f"{place}: is not valid YAML: {problem(error)}") from error
    if not isinstance(values, dict):
        kind = "nothing" if values is None else f"a {type(values).__name__}"
        raise UserError(f"{path}: a recipe is a mapping of keys to values, this file holds {kind}")
    if twice and not lenient:
        line, words = twice[0]
        raise UserError(f"{path}:{line}: {words}")
    return Document(values, path, lines, twice=twice)


def plain(text: str) -> Any:
    """Return `text` as YAML 1.2: dicts, lists, text, numbers, true, false and None. Raises yaml.YAMLError."""
    # First what no recipe needs and no reader handles well: values nested deeper than any recipe's or inside themselves
    # (PyYAML parses without recursion but builds values with it), tags that ask for another type, and the character 0,
    # which no path may have.
    open_anchors: list[str | None] = []
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            open_anchors.pop()
        if wrong := _odd(event, open_anchors):
            mark: Any = event.start_mark
            raise yaml.composer.ComposerError(None, None, wrong, mark)
    return yaml.load(text, Loader=_Loader)


def _odd(event: Any, open_anchors: Sequence[str | None]) -> str:
    """Return what is odd about a parser's event inside collections of these anchors, as a clause; empty for nothing."""
    if len(open_anchors) > DEEPEST:
        return f"values more than {DEEPEST} deep; write it flatter"
    if isinstance(event, yaml.AliasEvent) and event.anchor in open_anchors:
        return f"*{event.anchor} contains itself; write it flatter"
    # int() refuses from 4,300 digits on, and a float holds none of more than 308.
    digits = event.value.lstrip("+-") if getattr(event, "implicit", False) == (True, False) else ""
    if len(digits) > DIGITS and digits.isdigit():
        return f"an integer of {len(digits):,} digits; allowed: up to {DIGITS}, or the digits in quotation marks"
    if isinstance(event, yaml.ScalarEvent) and "\0" in event.value:
        return "a text with the character 0; leave it out"
    if getattr(event, "tag", None) not in (None, "!", "tag:yaml.org,2002:str"):
        return f"a tag, {event.tag}; allowed: plain values"
    return ""


def _walk(node: yaml.Node | None, prefix: str, lines: dict[str, int], twice: list[tuple[int, str]]) -> None:
    """Note the line of every key below `node`, and each repeated key: YAML would drop the first silently."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        line = key_node.start_mark.line + 1
        if key in lines:
            twice.append((line, f"{key} is given twice, first in line {lines[key]}; give it once"))
        lines.setdefault(key, line)
        _walk(value_node, f"{key}.", lines, twice)


def problem(error: yaml.YAMLError) -> str:
    """Return what is wrong with a text that is no YAML, as a clause, and what is allowed."""
    words = first_line(getattr(error, "problem", None) or error)
    return words if "; " in words else f"{words}; allowed: a value of YAML, or a text in quotation marks"
