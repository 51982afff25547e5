"""Runs cases on a release's kernels, a line of JSON each; a process of its own, started by run.py.

    python -m scripts.conformance.worker capture FILE
    python -m scripts.conformance.worker run TASK

The first writes PyTorch's samples as calls into FILE. The second reads TASK (run.py's `Task` as JSON), and notes in its
file `note` which case and kernel run at the moment, so that a crash has a name; HF_MPS_KERNELS says the release.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_mps.core import notices
from hf_mps.metal.kernels import launch, running
from hf_mps.metal.kernels.rules import RULES, Dispatch, Rule
from hf_mps.metal.kernels.runtime import Kernel, OutOfBounds
from scripts.conformance import calls, capture, cases, oracle, reproduction
from scripts.conformance.cases import Case

NOTE_BYTES = 512


def main(arguments: list[str]) -> None:
    """Do one of the two."""
    torch.set_num_threads(1)
    launch.load()
    with notices.ignoring():
        _do(arguments)


def _do(arguments: list[str]) -> None:
    if arguments[0] == "capture":
        found = capture.captured(cases.wanted())
        torch.save([tuple(call) for call in found], arguments[1])
        return
    task = json.loads(Path(arguments[1]).read_text())
    with torch.serialization.safe_globals([complex]):
        known = [calls.Call(*each) for each in torch.load(task["calls"], weights_only=True)]
    dispatch = running()
    assert dispatch is not None, "HF_MPS_KERNELS is not set"
    noted = _Note(Path(task["note"]))
    Kernel.launch = noted.launching(Kernel.launch)  # type: ignore[method-assign]
    left_out = set(task["done"])
    share = (task["share"], task["shares"])
    for case in cases.every(known, frozenset(task["operators"]), task["case"], share, quick=task["quick"]):
        if case.name not in left_out:
            noted.case(case.name)
            report = checked(case, dispatch)
            print(json.dumps(report or {"name": case.name, "outcome": "no case"}), flush=True)


class _Note:
    """The case and the kernel that run now, where another process finds them after a crash."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self._case = ""

    def case(self, name: str) -> None:
        self._case = name
        self._write("")

    def launching(self, launch: Callable[..., None]) -> Callable[..., None]:
        def noted(kernel: Kernel, *arguments: Any, **options: Any) -> None:
            self._write(kernel.name)
            launch(kernel, *arguments, **options)

        return noted

    def _write(self, kernel: str) -> None:
        os.pwrite(self._handle, f"{self._case}\n{kernel}\n".encode().ljust(NOTE_BYTES), 0)


def _family(rule: Rule) -> str:
    """The file of `launch/` that a rule is in; the rules of one function differ by what `partial` fixes."""
    function = rule.function.func if isinstance(rule.function, partial) else rule.function
    return str(function.__module__.rpartition(".")[2])


def checked(case: Case, dispatch: Dispatch) -> dict[str, Any] | None:
    """What one case gave; None where PyTorch refuses its arguments on the CPU too."""
    call, ledger = case.call, dispatch.ledger
    torch.manual_seed(5)
    expected = oracle.wanted(call)
    if expected is None:
        return None
    given = calls.on(call, "mps")
    ledger.clear()
    report: dict[str, Any] = {**case._asdict(), "family": _family(RULES[case.rule]), "operator": call.operator}
    del report["call"]
    try:
        found = [None if each is None else each.cpu() for each in calls.run(given)]
        error = None
    except Exception as raised:
        found, error = [], raised
    report["kernels"] = sorted(ledger.kernels)
    if isinstance(error, OutOfBounds):
        return {**report, "outcome": "out of bounds", "detail": str(error), **_pasted(case, dispatch)}
    if not ledger.operators[call.operator]:
        reasons = [reason for (operator, reason) in ledger.reasons if operator == call.operator]
        return {**report, "outcome": "refused", "detail": reasons[0] if reasons else f"not launched: {error}"}
    if error is not None:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return {**report, "outcome": "raises", "detail": text, **_pasted(case, dispatch)}
    random = torch.Tag.nondeterministic_seeded in calls.overload(call.operator).tags
    verdict = oracle.verdict(found, expected, random=random)
    report |= {"error": verdict.error, "own_error": verdict.own_error, "elements": _elements(case)}
    if verdict.agrees:
        return {**report, "outcome": "agrees", "conditioned": verdict.conditioned}
    return {**report, "outcome": "differs", "detail": verdict.detail, **_pasted(case, dispatch)}


def _pasted(case: Case, dispatch: Dispatch) -> dict[str, Any]:
    return {
        "origin": case.call.origin,
        "elements": _elements(case),
        "reproduction": reproduction.program(case.call, dispatch.release.version, case.name),
    }


def _elements(case: Case) -> int:
    return sum(each.numel() for each in case.call.tensors)


if __name__ == "__main__":
    main(sys.argv[1:])
