"""Every command that a page or a recipe shows is one that the command line takes, key for key."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise

import pytest

from hf_mps.cli import finetune
from hf_mps.core.errors import UserError
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.run.sweep import plan_sweep
from tests import CHECKOUT

VERB = re.compile(r"(?:python -m hf_mps\.finetune|hf-mps (?:finetune|plan|audit|parity)) +(?=[a-z])")
# What follows an option of ours is its value.
WITH_VALUE = ("--memory", "--task", "--steps", "--rows", "--length", "--torch-table", "--torch", "--ranks")


def _lines(text: str) -> Iterator[str]:
    """The lines of a page with those that go on in the next one joined to it, comment signs and prompts taken off."""
    joined = ""
    for line in text.splitlines():
        plain = re.sub(r"^\s*(#\s*)?(\$ )?(Command|Override)?\s*", "", line)
        goes_on = joined.endswith("\\")
        # A recipe's header goes on with key=value words alone.
        more = bool(joined) and re.match(r"'?[a-z_.]+=", plain) is not None
        if goes_on or more:
            joined = f"{joined.removesuffix(chr(92)).rstrip()} {plain}"
            continue
        yield joined
        joined = plain
    yield joined


def _commands() -> list[tuple[str, str]]:
    """Every shown command, without its program and verb, with the refusal that is shown below it (or "")."""
    found: dict[str, str] = {}
    for page in (*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").glob("*.md"), *(CHECKOUT / "recipes").rglob("*.yaml")):
        lines = [*_lines(page.read_text(encoding="utf-8")), ""]
        for line, below in pairwise(lines):
            shown = VERB.search(line)
            if shown is not None and "…" not in line:
                words = re.split(r"`|\s+#\s|\s{3,}", line[shown.end() :])[0].strip()
                found[words] = below.removeprefix("hf-mps: ") if below.startswith("hf-mps: command line") else ""
    return sorted(found.items())


COMMANDS = _commands()


def test_the_pages_show_commands() -> None:
    assert len(COMMANDS) > 60
    assert any("source_prefix" in shown for shown, _ in COMMANDS)
    assert any("--sweep" in shown for shown, _ in COMMANDS)
    assert any(refusal for _, refusal in COMMANDS)


@pytest.mark.parametrize(("shown", "refusal"), COMMANDS)
def test_a_shown_command_is_taken_or_refused_as_the_page_says(shown: str, refusal: str) -> None:
    words = finetune.swept(shlex.split(shown))
    positional: list[str] = []
    axes: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--sweep":
            axes.append(words.pop(0))
        elif word in WITH_VALUE:
            words.pop(0)
        elif not word.startswith("--"):
            positional.append(word)
    if "--task" in shown:  # a model of the hub, and no recipe
        return
    name, *overrides = positional
    if refusal:
        with pytest.raises(UserError) as error:
            load_recipe(name, overrides)
        assert str(error.value) == refusal
    elif axes:
        assert plan_sweep(load_recipe(name, overrides), axes).runs
    else:
        load_recipe(name, overrides)
