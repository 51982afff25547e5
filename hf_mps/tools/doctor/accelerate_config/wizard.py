"""The questions, what is written and why; on a terminal, or without a question."""

from __future__ import annotations

import json as jsons
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError
from hf_mps.core.files import plain
from hf_mps.tools.doctor.accelerate_config import file, repairs
from hf_mps.tools.doctor.accelerate_config.file import Values
from hf_mps.tools.doctor.accelerate_config.repairs import Machines, Repair

PRECISIONS = ("no", "bf16", "fp16")
SHOWN_AS = {"fp32": "no"}


@dataclass(frozen=True)
class Outcome:
    """What `hf-mps config` found in the file at `path` and did with it."""

    path: Path
    existing: Values | None
    repairs: list[Repair]
    choices: dict[str, Choice[Any]] = field(default_factory=dict)
    written: bool = False
    backup: Path | None = None

    def print_json(self) -> None:
        """Print it as one JSON object."""
        from hf_mps.metal.device import simulated

        values = {"config_file": self.path, "existed": self.existing is not None, "simulated": simulated()}
        values |= {name: getattr(self, name) for name in ("repairs", "choices", "written", "backup")}
        print(jsons.dumps(plain(values), indent=2))

    def print(self) -> None:
        """Print for people what was done, and what to type next."""
        if self.written:
            print(f"written: {self.path}" + (f"; the old one is {self.backup}" if self.backup else ""))
        else:
            print(f"{self.path}: nothing to repair")
        where = "" if self.path == file.default_place() else f" --config_file {self.path}"
        if others := repairs.next_words(self.choices):
            print(f"{others}{where} script.py")
            return
        print(f"next: accelerate test{where}, then accelerate launch{where} script.py")


def check(path: Path, *, json: bool = False) -> None:
    """Look at the file and change nothing. Raises RunError (exit 1) where something is to be repaired.

    Raises UserError for a file that is not understood.
    """
    existing = file.read(path)
    needed = repairs.find(existing) if existing is not None else []
    if json:
        Outcome(path, existing, needed).print_json()
    elif existing is None:
        print(f"{path}: there is {repairs.NO_FILE}")
    elif not needed:
        print(f"{path}: nothing to repair")
    if needed:
        raise RunError(f"{path}: {repairs.reasons(needed)}; next: hf-mps config --config_file {path}")


def run(path: Path, *, yes: bool, json: bool = False, said: Machines | None = None) -> None:
    """Settle every key, show what changes, write the file and say what to type next; `yes` takes every default.

    `said` is what the command line says of several Macs. Raises UserError where there is no Metal to configure for,
    where the file is not understood, and where a question would have to be asked of nobody.
    """
    facts = _metal_or_refuse()
    existing = file.read(path)
    if not yes and not sys.stdin.isatty():
        raise UserError("config asks its questions on a terminal, and stdin is none; next: hf-mps config --yes")
    if not json:
        print(*facts, sep="\n")
    choices = _settle(existing, said or Machines(), yes=yes)
    values, needed = _values(existing, choices)
    outcome = Outcome(path, existing, needed)
    if existing is None or values != repairs.apply(existing, []) or needed:
        if not json:
            # The difference to the file that is there, or the whole of a new one; each line with its reason.
            reasons = {repair.key: repair.reason for repair in needed}
            reasons = {key: choice.reason for key, choice in choices.items()} | reasons
            before = existing or {}
            print(f"{path} ({'new' if existing is None else 'changes'}):")
            for key in sorted(before.keys() | values.keys()):
                old, new = before.get(key), values.get(key)
                if key in before and old == new:
                    continue
                if key in before:
                    print(f"  - {key}: {jsons.dumps(old)}")
                if key in values:
                    reason = f"    # {reasons[key]}" if key in reasons else ""
                    print(f"  + {key}: {jsons.dumps(new)}{reason}")
        if not yes and not typer.confirm("Write it?", default=True):
            print(f"{path} stays as it is")
            return
        outcome = Outcome(path, existing, needed, choices, written=True, backup=file.write(path, values))
    outcome.print_json() if json else outcome.print()


def _metal_or_refuse() -> list[str]:
    """Return the machine in a few lines. Raises UserError where Metal is not there."""
    from hf_mps.metal.device import choice, facts

    on_metal = choice.metal(owned=True)
    if not on_metal.value:
        raise UserError(f"config writes for Metal, and there is none: {on_metal.reason}")
    return facts.facts("mps").lines()


def _settle(existing: Values | None, said: Machines, *, yes: bool) -> dict[str, Choice[Any]]:
    """Return each answer with its reason: a file's own where it has one that holds, then the user's."""
    from hf_mps.metal.device import precision

    before = repairs.apply(existing, repairs.find(existing)) if existing is not None else {}
    metal = Choice(False, "train on the Metal GPU; Trainer, Accelerate and Lightning then agree on mps")
    if not yes and not typer.confirm("Train on the Metal GPU (no: on the CPU)?", default=True):
        metal = Choice(True, "your answer; set HF_MPS_DEVICE=cpu as well, or TrainingArguments stays on mps")
    default = precision.default("mps")
    chosen = Choice(SHOWN_AS.get(default.value, default.value), default.reason)
    if existing is not None:
        chosen = Choice(before["mixed_precision"] or "no", "the file says so")
    if not yes:
        chosen = _ask_precision(chosen)
    of_file = Machines.of(existing or {})
    several = said.over(of_file)
    if not yes and said == Machines():
        several = several.asked()
    return {"use_cpu": metal, "mixed_precision": chosen, **several.choices(of_file)}


def _ask_precision(default: Choice[str]) -> Choice[str]:
    from hf_mps.metal.device import precision

    print(f"Precision: {', '.join(PRECISIONS)}. {default.value} is proposed: {default.reason}.")
    while True:
        answer = str(typer.prompt("Mixed precision", default=default.value)).strip().lower()
        if answer == default.value:
            return default
        try:
            return Choice(answer, precision.requested("fp32" if answer == "no" else answer, "mps").reason)
        except UserError as error:
            print(error)


def _values(existing: Values | None, choices: dict[str, Choice[Any]]) -> tuple[Values, list[Repair]]:
    """Return what is to be written, and what of the existing file had to be repaired for it."""
    answered = {key: choice.value for key, choice in choices.items()}
    before = existing or {}
    needed = repairs.find(before, on_metal=not answered["use_cpu"])
    values = repairs.apply(before, needed) | answered
    return {key: value for key, value in values.items() if key not in answered or value is not None}, needed
