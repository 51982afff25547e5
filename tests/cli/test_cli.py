"""The command line: what starts without torch, how misuse ends, and that both spellings are one command."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

import hf_mps
from hf_mps.cli.main import main
from hf_mps.core import notices
from hf_mps.core.errors import UserError
from hf_mps.finetune.recipe import catalogue
from tests.remedies import COMMAND, works

Printed = pytest.CaptureFixture[str]

WITHOUT_TORCH = """
import subprocess
import sys
from hf_mps import autoload; from hf_mps.core import settings
from hf_mps.cli.main import main

assert main(["recipes", "list"]) == 0
assert main(["recipes", "show", "glue/mrpc"]) == 0
assert not {"rich", "hf_mps.finetune.recipe.schema"} & set(sys.modules)
assert main(["--help"]) == 0
assert main(["--version"]) == 0
assert main(["finetune", "--help"], program="python -m hf_mps.finetune") == 0
from hf_mps.finetune.recipe.resolve import load_recipe
assert load_recipe("glue/mrpc", ["training.learning_rate=3e-5"]).recipe.training["learning_rate"] == 3e-5
assert main(["finetune", "glue/mrpc", "training.warmup_ratio=0.1"]) == 2
heavy = [name for name in ("torch", "transformers", "datasets", "evaluate", "sklearn", "numpy") if name in sys.modules]
print("heavy:", heavy)
"""


def test_what_a_verb_has_to_say_is_a_line_and_names_no_line_of_the_program(
    monkeypatch: pytest.MonkeyPatch, capfd: Printed
) -> None:
    monkeypatch.setattr("hf_mps.cli.main._parse", lambda *_: lambda: notices.warn_user("a hazard", again=True))
    assert main(["doctor"]) == 0
    assert capfd.readouterr().err == "hf-mps: a hazard\n"


def test_help_version_lists_and_validation_import_nothing_heavy(run_python: Callable[..., object]) -> None:
    ended = run_python("-c", WITHOUT_TORCH)
    assert ended.returncode == 0, ended.stderr  # type: ignore[attr-defined]
    assert ended.stdout.endswith("heavy: []\n")  # type: ignore[attr-defined]


def test_both_spellings_are_one_command(run_python: Callable[..., object]) -> None:
    hf_mps_command = Path(sys.executable).parent / "hf-mps"
    assert hf_mps_command.is_file()
    for command in ((hf_mps_command, "finetune"), ("-m", "hf_mps.finetune")):
        ended = run_python(*command, "glue/mrcp")
        assert (ended.returncode, ended.stdout) == (2, "")  # type: ignore[attr-defined]
        assert ended.stderr == (  # type: ignore[attr-defined]
            snapshot(
                "hf-mps: 'glue/mrcp' is not a recipe; did you mean 'glue/mrpc'?; allowed: a recipe's name, or a path"
                " that ends in .yaml; next: hf-mps recipes list\n"
            )
        )


@pytest.mark.parametrize("arguments", [["--version"], ["finetune", "--version"]])
def test_the_version_is_printed(arguments: list[str], capsys: Printed) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"hf-mps {hf_mps.__version__}\n"


def test_help_names_the_command_as_it_was_called(capsys: Printed) -> None:
    assert main(["finetune", "--help"], program="python -m hf_mps.finetune") == 0
    assert "Usage: python -m hf_mps.finetune [OPTIONS]" in capsys.readouterr().out


def test_recipes_are_listed_with_their_purpose(capsys: Printed) -> None:
    assert main(["recipes", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    entries = catalogue.entries()
    assert [tuple(line.split(None, 1)) for line in lines] == [(entry.name, entry.purpose) for entry in entries]
    assert all(entry.purpose for entry in entries)


def test_a_recipe_is_shown_as_it_is_written(capsys: Printed) -> None:
    assert main(["recipes", "show", "quickstart"]) == 0
    assert capsys.readouterr().out == catalogue.find("quickstart").path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["finetune"], "Missing argument 'RECIPE'; next: hf-mps finetune --help"),
        (
            ["finetune", "quickstart", "--freshh"],
            "No such option: --freshh (Possible options: --fresh); next: hf-mps finetune --help",
        ),
        (
            ["plan", "quickstart", "--learning_rate", "1"],
            "No such option: --learning_rate; next: training.learning_rate=VALUE",
        ),
        (["finetune", "x", "--sweep"], "Option '--sweep' requires an argument; next: hf-mps finetune --help"),
        (["recipes", "shwo"], None),
        (["finetune", "quickstart", "sed=1"], None),
    ],
)
def test_misuse_ends_in_one_line_and_exit_code_2(arguments: list[str], line: str | None, capsys: Printed) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hf-mps: ")
    assert err.count("\n") == 1
    if line is not None:
        assert err == f"hf-mps: {line}\n"


def test_each_verb_shows_an_example_that_its_parser_takes() -> None:
    def verbs(command: Any) -> Iterator[Any]:
        for inner in getattr(command, "commands", {}).values():
            yield from verbs(inner) if getattr(inner, "commands", None) else [inner]

    shown = [verb.help or "" for verb in verbs(COMMAND) if not verb.hidden]
    assert len(shown) == 22
    for text in shown:
        assert not [part for part in text.split("\n\n") if "\n" in part]  # the terminal breaks the lines
        example = re.search(r"^Example: `(?:echo .* \| )?(hf-mps .*)`$", text, re.MULTILINE)
        assert example is not None, text
        works(example[1])


def test_a_tasks_name_leads_to_its_recipes(capsys: Printed) -> None:
    assert main(["finetune", "sft"]) == 2
    assert "did you mean 'sft/alpaca' or 'sft/chat' or 'sft/qlora'?; " in capsys.readouterr().err


def test_no_verb_shows_the_help(capsys: Printed) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert "finetune" in out + err
    assert "recipes" in out + err


def test_where_stderr_is_closed_nothing_of_it_comes_on_stdout(capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["finetune", "no-such-recipe"]) == 2
    assert main(["recipes", "keys", "quickstart"]) == 0
    out = capsys.readouterr().out
    assert out
    assert "hf-mps: " not in out


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(UserError):
        main(["finetune", "no-such-recipe", "--debug"])


def test_a_reader_that_has_seen_enough_ends_a_list_without_a_word() -> None:
    command = [sys.executable, "-m", "hf_mps", "recipes", "keys", "glue/mrpc"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        process.stdout.close()  # as `| head` does, before anything is written
        assert process.stderr.read() == ""


def test_the_keys_of_a_recipe_and_of_its_task_are_listed_with_defaults(capsys: Printed) -> None:
    assert main(["recipes", "keys", "glue/mrpc"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["recipes", "keys", "text-classification"]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    shown = [" ".join(line.split()) for line in lines if line.startswith(("seed ", "training.learning_rate "))]
    assert shown == snapshot(
        [
            "seed 42 whole number Draws new weights, the order of the rows and dropout: equal seeds give equal runs.",
            "training.learning_rate a number The initial learning rate for the optimizer",
        ]
    )
    # Every key has words of its own, but fields of transformers' that it does not describe.
    bare = [line.split()[0] for line in lines if not line.startswith("training.") and len(line.split("  ")) < 3]
    assert (bare, [line for line in lines if "Annotated" in line]) == ([], [])
    assert main(["recipes", "keys", "glue/mrcp"]) == 2
    assert "did you mean 'glue/mrpc'?" in capsys.readouterr().err


def test_a_second_interrupt_keeps_the_line_of_the_first(capsys: Printed) -> None:
    from hf_mps.core.errors import RunError, run_command

    def stopped() -> None:
        try:
            raise RunError("interrupted at step 3; kept: runs/my/checkpoint-3")
        finally:
            raise KeyboardInterrupt

    assert run_command(stopped) == 130
    assert capsys.readouterr().err == "hf-mps: interrupted at step 3; kept: runs/my/checkpoint-3\n"
