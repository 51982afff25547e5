"""A recipe's YAML as plain values, with the line of every key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line

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
