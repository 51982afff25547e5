"""Each command of docs/first-hour.md works, here on the simulated device, and what it finds is judged rightly."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import typer.main

from hf_mps.cli.main import app
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.metal.simulator import strictness
from tests import CHECKOUT
from tests.scripts import script

first_hour, on_a_mac = script("first_hour"), script("on_a_mac")
STEPS = {step.name: step for step in first_hour.STEPS}


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    code = on_a_mac.main(list(arguments))
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


# These start processes, or import transformers: each night, and on Macs.
SLOW = ("evaluation", "fork", "workers")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in SLOW)) for name in on_a_mac.EXPERIMENTS]
)
def test_each_experiment_finds_the_simulated_device_as_expected(
    name: str, simulated: None, untouched: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert STEPS[name].command == f"python scripts/tools/on_a_mac.py {name}"
    code, found = told(capsys, name, "--steps", "2")
    assert found["experiment"] == name
    assert found["as_expected"] is not False, found
    assert code == 0
    assert first_hour.by_experiment(code, json.dumps(found), "") is found["as_expected"]


def test_a_fault_of_the_device_is_seen(
    simulated: None, untouched: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with strictness.on("large-k"):
        _, gradient = told(capsys, "head-gradient", "--steps", "1")
        assert gradient["error_stock"] > 1
        assert gradient["error_with_guard"] < 1e-3
    with strictness.off():
        _, gradient = told(capsys, "head-gradient", "--steps", "1")
        assert gradient["error_stock"] < 1e-3
    monkeypatch.setattr(on_a_mac, "CLOSE", 0.0)
    assert told(capsys, "head-gradient", "--steps", "1")[0] == 1


def test_every_command_is_one_that_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for step in first_hour.STEPS:
        variables, words = first_hour.split(step.command)
        assert set(variables) <= {"HF_HUB_OFFLINE"}
        assert words[0] == sys.executable
        if words[1] == "-m":
            package, verb, rest = words[2], words[3], words[4:]
            assert importlib.util.find_spec(f"{package}.__main__") is not None
            context = verbs[verb].make_context(verb, list(rest), resilient_parsing=False)
            if verb != "doctor":
                load_recipe(next(word for word in rest if not word.startswith("-")), [])
            assert context is not None
        elif words[1].endswith(".py"):
            assert Path(words[1]).is_file()


@pytest.mark.parametrize(
    ("judge", "code", "out", "err", "right"),
    [
        ("silent", 0, "", "", True),
        ("silent", 0, "", "a warning", False),
        ("figures", 1, "0.98", "", None),
        ("figures", 2, "", "no such option", False),
        ("by_code", 1, "", "", False),
        ("by_experiment", 0, 'noise\n{"as_expected": null}', "", None),
        ("by_experiment", 1, "Traceback", "", False),
        ("by_trials", 0, '{"trials": [{"verdict": "faulty", "listed": true}]}', "", True),
        ("by_trials", 0, '{"trials": [{"verdict": "right", "listed": false}]}', "", True),
        ("by_trials", 0, '{"trials": [{"verdict": "not tried", "listed": true}]}', "", True),
        ("by_trials", 0, '{"trials": [{"verdict": "faulty", "listed": false}]}', "", False),
        ("by_trials", 0, '{"trials": [{"verdict": "right", "listed": true}]}', "", False),
        ("by_trials", 1, '{"trials": [{"verdict": "ended", "listed": true}]}', "", False),
        ("by_trials", 0, '{"trials": [{"verdict": "failed", "listed": false}]}', "", False),
        ("by_trials", 1, '{"trials": []}', "", False),
    ],
)
def test_a_verdict_is_of_what_was_printed(judge: str, code: int, out: str, err: str, right: bool | None) -> None:
    assert getattr(first_hour, judge)(code, out, err) is right


def test_one_file_has_every_step_and_none_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "mine.json"
    place = tmp_path / "talks.py"
    place.write_text(f"print({str(CHECKOUT)!r} + '/x')", encoding="utf-8")

    def step(name: str, command: str) -> object:
        return first_hour.Step(name, "…", command, "…")

    died = step("dies", "python -c 'import os; print(1, flush=True); os.abort()'")
    talks = step("talks", f"python {place}")
    said = step("said", """python -c 'import json; print(json.dumps({"as_expected": True}))'""")
    monkeypatch.setattr(first_hour, "STEPS", (died, talks, said))
    monkeypatch.setenv("HF_MPS", "0")
    assert first_hour.main(["--output", str(output)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("not as expected: dies, talks")
    report = json.loads(output.read_text(encoding="utf-8"))
    assert [(each["step"], each["verdict"]) for each in report["steps"]] == [
        ("dies", "not as expected"),
        ("talks", "not as expected"),
        ("said", "as expected"),
    ]
    assert report["steps"][0]["exit_code"] == -6
    assert report["steps"][0]["told"] == "1\n"
    assert report["steps"][1]["told"] == "…/x\n"
    assert report["of"]["torch"] == str(torch.__version__)
    assert set(report["of"]) >= {"chip", "macos", "virtual", "simulated", "commit"}
    with pytest.raises(SystemExit):
        first_hour.main(["--output", str(output)])
    assert "is there already; next: --output another.json" in capsys.readouterr().err
    assert json.loads(output.read_text(encoding="utf-8")) == report


@pytest.mark.slow
def test_the_steps_run_as_they_are_typed(simulated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    found = [first_hour.run(STEPS[name]) for name in ("import", "out-of-range")]
    assert [each["verdict"] for each in found] == ["as expected"] * 2, found
    assert found[1]["told"]["experiment"] == "out-of-range"
