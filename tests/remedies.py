"""What a line for people has to hold: what came, what is allowed, and a command that works when typed."""

from __future__ import annotations

import re
import shlex
from typing import Any

import typer.main

from hf_mps.cli.main import app
from hf_mps.finetune import tasks
from hf_mps.finetune.recipe import overrides, resolve

REMEDIES = (
    *("there is no such", "allowed: ", "next: ", "next, ", "did you mean", "give ", "leave ", "in its place"),
    *("write it", "add it"),
)
COMMAND: Any = typer.main.get_command(app)
KEYS = {task: [key.name for key in resolve.keys_of_recipe(task)] for task in tasks.names()}
SECTIONS = {name.partition(".")[0] for names in KEYS.values() for name in names}


def complaint(error: Exception, *came: str) -> None:
    """Fail unless the error is one line that names one of `came`, what is allowed, and commands that work."""
    line = str(error)
    assert "\n" not in line
    assert len(line) < 2500, line
    assert not came or any(word in line for word in came), (came, line)
    assert any(words in line for words in REMEDIES), line
    for said in re.findall(r"next(?:, [^:;]*)?: ([^;]+)", line):
        works(said.strip())


def works(said: str) -> None:
    """Fail for a command of hf-mps that its parser refuses, and for an override that no recipe has."""
    words = shlex.split(said.partition(", or ")[0], posix=False)
    if words[:1] == ["hf-mps"]:
        with COMMAND.make_context("hf-mps", words[1:]) as group:
            name, command, rest = COMMAND.resolve_command(group, words[1:])
            while hasattr(command, "resolve_command"):
                name, command, rest = command.resolve_command(group, rest)
            if rest != ["--help"]:
                command.make_context(name, rest, parent=group)
    elif words and re.fullmatch(r"[a-z_.]+=.*", words[0]):
        (key,) = overrides.parse(words[:1], "text-classification")
        assert key.partition(".")[0] in SECTIONS, said
