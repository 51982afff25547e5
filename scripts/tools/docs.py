"""Writes the pages of docs/ that follow from the code: commands, recipes, keys, hazards, patches, the rooms, and more.

python scripts/tools/docs.py            write the files
python scripts/tools/docs.py --check    exit code 1 where one of them is not what the code says
"""

from __future__ import annotations

import re
import sys
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
from hf_mps.finetune.recipe import catalogue, keys
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.recipe.schema import Recipe

DOCS = Path(__file__).resolve().parents[2] / "docs"
MADE = "<!-- Written by scripts/tools/docs.py; change the code, not this file. -->"
COMPLETION = ("install_completion", "show_completion")


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
    yield "`hf-mps --install-completion` lets the shell complete verbs, recipes and the keys of a recipe."
    root = typer.main.get_command(app)
    for name, command in _walk(root, "hf-mps"):
        yield from ("", f"## {name}", "", *_help(command), "", f"    {_usage(name, command)}", "")
        rows = [_row(parameter) for parameter in command.params if parameter.name not in COMPLETION]
        if rows:
            yield from _table(("", "what it does"), rows)
    yield from ("", "## Environment variables", "")
    yield from _table(("variable", "value and meaning"), [(f"`{name}`", says) for name, says in settings.KNOWN.items()])
    yield from ("", "A value that nobody reads is refused in one line.")


def _walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Each verb with its full name; a group's own page only where it is called by itself."""
    for each, inner in sorted(getattr(command, "commands", {}).items()):
        if inner.hidden:  # it names what took its place
            continue
        if getattr(inner, "commands", None):
            yield from _walk(inner, f"{name} {each}")
        else:
            yield f"{name} {each}", inner


def _help(command: Any) -> list[str]:
    return [" ".join(part.split()) for part in (command.help or "").split("\n\n")]


def _usage(name: str, command: Any) -> str:
    words = [str(each.metavar or each.name.upper()) for each in command.params if each.param_type_name == "argument"]
    return " ".join([name, "[OPTION]...", *words])


def _row(parameter: Any) -> tuple[str, str]:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`", getattr(parameter, "help", None) or ""
    value = "" if getattr(parameter, "is_flag", False) else f" {parameter.metavar or parameter.name.upper()}"
    return f"`{parameter.opts[0]}{value}`", parameter.help or ""


def _recipes() -> Iterator[str]:
    yield "`hf-mps finetune RECIPE [KEY=VALUE]...` runs one; `hf-mps recipes copy RECIPE` writes its YAML for a change."
    yield "`--smoke` tries one out in less than a minute with no network, `--plan` tells what it would do."
    yield ""
    rows = []
    for entry in catalogue.entries():
        recipe = load_recipe(entry.name).recipe
        rows.append((f"[{entry.name}](#{_anchor(entry.name)})", entry.purpose, recipe.task, f"`{recipe.model}`"))
    yield from _table(("recipe", "for", "task", "model"), rows)
    for entry in catalogue.entries():
        header = [line for line in entry.path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        yield from ("", f"## {entry.name}", "", "```text", *(line.lstrip("#")[1:] for line in header), "```")


def _keys() -> Iterator[str]:
    yield "A recipe of your own is a YAML file: `hf-mps recipes copy text-classification` writes one to be changed,"
    yield "`hf-mps finetune FILE.yaml` runs it, and `KEY=VALUE` behind it changes a key for one run. A key that nobody"
    yield "knows, or a value of another kind, is refused in one line with the place in the file."
    yield ""
    yield from (f"Every recipe has these keys; `training` holds fields of {_arguments()}.", "")
    common = {key.name: key for key in keys.of_class(Recipe)}
    yield from _key_table(common.values())
    for task in tasks.names():
        own = [key for key in keys.of_task(task) if common.get(key.name) != key and key.name != "task"]
        yield from ("", f"## Keys of {task}", "", _class_words(task), "")
        yield from _key_table(own)


def _arguments() -> str:
    return "transformers' TrainingArguments, or of the task's own subclass, under their own names"


def _class_words(task: str) -> str:
    """The docstring of the task's recipe, on one line."""
    kind = tasks.find(task)
    words = re.sub(r"\s+", " ", kind.recipe_class.__doc__ or "").strip()
    source = kind.arguments_source
    return words + (f" `training` holds fields of {source[1]}." if source else "")


def _key_table(found: Iterable[keys.Key]) -> Iterator[str]:
    rows = [(f"`{key.name}`", key.kind, f"`{key.default}`" if key.default else "") for key in found]
    yield from _table(("key", "value", "default"), rows)


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
