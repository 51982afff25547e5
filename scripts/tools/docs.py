"""Writes the pages of docs/ that follow from the code: commands, recipes, keys, hazards, patches, the rooms, and more.

python scripts/tools/docs.py            write the files
python scripts/tools/docs.py --check    exit code 1 where one of them is not what the code says
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
import typer.main

sys.path.insert(0, str(Path(__file__).resolve().parent))
import benchmarks_page
import first_hour
import hazards_page
import older_page
import patches_page
import rooms

from hf_mps.cli.main import app
from hf_mps.core import settings
from hf_mps.finetune import tasks
from hf_mps.finetune.recipe import catalogue, resolve
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.recipe.schema import Recipe

DOCS = Path(__file__).resolve().parents[2] / "docs"
MADE = "<!-- Written by scripts/tools/docs.py; change the code, not this file. -->"
COMPLETION = ("install_completion", "show_completion")
COMMON = ("--json", "--debug")
"""Options that the page explains once."""

COMMANDS = """
`hf-mps --install-completion` lets the shell complete verbs, recipes and the keys of a recipe; `hf-mps VERB --help` says
what this page says. `--debug` shows a failure's whole traceback, `--json` prints one JSON object. Several verbs take:
"""
RECIPES = """
`hf-mps finetune RECIPE [KEY=VALUE]...` runs a recipe, `--smoke` tries it in less than a minute with no network, and
`--plan` shows what it would do. `hf-mps recipes show RECIPE` prints its file: what to expect and by whose word,
commands, keys to change and hardware. `hf-mps recipes copy RECIPE` writes the file for you to change.
"""
KEYS = """
A recipe of your own is a YAML file: `hf-mps recipes copy text-classification` writes one to be changed,
`hf-mps finetune FILE.yaml` runs it, and `KEY=VALUE` behind it changes a key for one run. An unknown key, or a value of
the wrong kind, is refused in one line with the place in the file. `training` holds fields of transformers'
TrainingArguments, or of the task's own subclass, under their own names. `hf-mps recipes keys RECIPE` lists the keys of
one recipe.

In brackets are a key's values, then its default, which is `null` where none is named; in italics are its tasks.
"""
DEFAULTS = {"": "; required", "null": "", "empty": "; empty"}
"""How the page writes a key's default, where it is not the default itself."""


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with --check compare them; return the exit code."""
    stale = []
    for name, text in pages().items():
        path = DOCS / name
        if arguments == ["--check"]:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale:
        print(
            f"docs/{', docs/'.join(stale)}: not what the code says; next: python scripts/tools/docs.py", file=sys.stderr
        )
    return 1 if stale else 0


def pages() -> dict[str, str]:
    """The text of each page by its name in docs/."""
    written = {
        "commands.md": _titled("Commands", _commands()),
        "first-hour.md": _titled("The first hour on a Mac", first_hour.page()),
        "hazards.md": _titled("Hazards", hazards_page.lines()),
        "keys.md": _titled("Keys of a recipe", _keys()),
        "older-scripts.md": _titled("Older scripts", older_page.lines()),
        "patches.md": _titled("Patches", patches_page.lines()),
        "recipes.md": _titled("Recipes", _recipes()),
    }
    parts = {"benchmarks.md": benchmarks_page.page()}
    whole = {name: "\n".join(lines) + "\n" for name, lines in written.items()}
    return whole | parts | {"img/rooms.svg": rooms.picture()}


def _titled(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield from (f"# {title}", "", MADE, "")
    yield from lines


def _commands() -> Iterator[str]:
    yield COMMANDS.strip()
    commands = [*_walk(typer.main.get_command(app), "hf-mps")]
    shared = _shared(row for _, command in commands for row in _rows(command))
    yield from ("", *(f"- {word}: {says}" for word, says in shared.items()))
    for name, command in commands:
        yield from ("", f"## {name}", "", f"    {_usage(name, command, shared)}", "", *_help(command), "")
        for word, says in _rows(command):
            if shared.get(word) != says:
                yield f"- {word}: {says}" if says else f"- {word}"
    yield from ("", "## Environment variables", "", "A value that nobody reads is refused in one line.", "")
    yield from _table(("variable", "value and meaning"), [(f"`{name}`", says) for name, says in settings.KNOWN.items()])


def _walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Each verb with its full name; a group's own page only where it is called by itself."""
    for each, inner in sorted(getattr(command, "commands", {}).items()):
        if inner.hidden:  # it names what took its place
            continue
        if getattr(inner, "commands", None):
            yield from _walk(inner, f"{name} {each}")
        else:
            yield f"{name} {each}", inner


def _shared(rows: Iterable[tuple[str, str]]) -> dict[str, str]:
    """What more than two verbs have, with what it means to most of them; the page explains it once."""
    often = [row for row, times in Counter(rows).most_common() if times > 2]
    return dict(reversed(often))


def _help(command: Any) -> list[str]:
    return [" ".join(part.split()) for part in (command.help or "").split("\n\n")]


def _usage(name: str, command: Any, shared: dict[str, str]) -> str:
    words = [str(each.metavar or each.name.upper()) for each in command.params if each.param_type_name == "argument"]
    common = [f"[{each}]" for each in COMMON if any(each in one.opts for one in command.params)]
    common += [f"[{word[1:-1]}]" for word, says in _rows(command) if word[1] == "-" and shared.get(word) == says]
    return " ".join([name, *common, "[OPTION]...", *words])


def _rows(command: Any) -> list[tuple[str, str]]:
    """What a verb takes, each with what it says of it."""
    found = command.params
    return [_row(each) for each in found if each.name not in COMPLETION and each.opts[0] not in COMMON]


def _row(parameter: Any) -> tuple[str, str]:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`", getattr(parameter, "help", None) or ""
    value = "" if getattr(parameter, "is_flag", False) else f" {parameter.metavar or parameter.name.upper()}"
    return f"`{parameter.opts[0]}{value}`", parameter.help or ""


def _recipes() -> Iterator[str]:
    yield RECIPES.strip()
    yield ""
    rows = []
    for entry in catalogue.entries():
        recipe = load_recipe(entry.name).recipe
        name = f'<a id="{_anchor(entry.name)}"></a>{entry.name}'
        rows.append((recipe.task, name, entry.purpose, f"`{recipe.model}`", _header(entry.path)))
    yield from _table(("task", "recipe", "for", "model", "expected"), sorted(rows, key=lambda row: row[0]))


def _header(path: Path) -> str:
    """Return the first clause of what the recipe's file expects."""
    lines = [line.lstrip("#").strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    start = next(number for number, line in enumerate(lines) if line.startswith("Expected"))
    end = next(
        (number for number, line in enumerate(lines) if number > start and re.match(r"[A-Z]\w+ {2,}", line)), None
    )
    words = " ".join(lines[start:end]).removeprefix("Expected").strip()
    clause = re.split(r"(?<=[\w)])(?:[:;] |\. |\.$)", words)[0]
    # A clause that ends within brackets ends before them.
    return clause if clause.count("(") == clause.count(")") else clause.rpartition(" (")[0]


def _keys() -> Iterator[str]:
    yield KEYS.strip()
    yield from ("", "## Keys of every recipe", "")
    common = {key.name: key for key in resolve.keys_of_class(Recipe)}
    yield from _key_items((key, ()) for key in common.values())
    tasks_of: dict[resolve.Key, list[str]] = {}
    for task in tasks.names():
        for key in resolve.keys_of_class(tasks.find(task).recipe_class):
            if common.get(key.name) != key and key.name != "task":
                tasks_of.setdefault(key, []).append(task)
    yield from ("", "## Keys of single tasks", "")
    yield from _key_items(sorted(tasks_of.items(), key=lambda each: each[0].name))
    yield from ("", "## What the tasks add", "")
    yield from _table(("task", "adds"), [(f"`{task}`", _class_words(task)) for task in tasks.names()])


def _class_words(task: str) -> str:
    """The docstring of the task's recipe, on one line."""
    kind = tasks.find(task)
    words = re.sub(r"\s+", " ", kind.recipe_class.__doc__ or "").strip()
    source = kind.arguments_source
    return words + (f" `training` holds fields of {source[1]}." if source and source[1] not in words else "")


def _key_items(found: Iterable[tuple[resolve.Key, Sequence[str]]]) -> Iterator[str]:
    first: dict[Sequence[str], str] = {}  # many tasks -> the first key that they have
    for key, those in found:
        default = DEFAULTS.get(key.default, f"; `{key.default}`")
        yield f"- `{key.name}` ({key.kind}{default}): {key.meaning}{_tasks(those, first, key)}"


def _tasks(those: Sequence[str], first: dict[Sequence[str], str], key: resolve.Key) -> str:
    """Return the tasks that have a key: the others where these are fewer, and many by an earlier key that they have."""
    others = [task for task in tasks.names() if task not in those]
    if not those:
        return ""
    if len(those) > 6 and first.setdefault(tuple(those), key.name) != key.name:
        return f" *Those of `{first[tuple(those)]}`.*"
    return f" *All but {', '.join(others)}.*" if len(others) < len(those) else f" *{', '.join(those)}.*"


def _anchor(name: str) -> str:
    """GitHub's anchor of a heading: small letters, digits, hyphens and underscores are kept."""
    return re.sub(r"[^\w-]", "", name.lower())


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"| {' | '.join('---' for _ in heads)} |"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
