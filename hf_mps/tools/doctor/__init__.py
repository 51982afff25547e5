"""`hf-mps doctor`: whether this machine is ready to train on Metal; every problem ends in a command or a link."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hf_mps.core import status
from hf_mps.core.errors import UserError
from hf_mps.layer.activation.activate import activate, switch_on
from hf_mps.tools.doctor import findings


def examine(tried: dict[str, Any] | None = None) -> Iterator[tuple[str, list[findings.Finding]]]:
    """Examine everything, and yield each section's name and findings as soon as they are made.

    Imports torch and uses the device, and for the guards the libraries that they act on; never raises for what it
    finds. Where `tried` is given, the training kernels and the device's faults are tried, and it gets the outcomes.
    """
    from hf_mps.tools.doctor import environment, guards, machine, metal, versions

    activate()
    yield "machine", machine.examine()
    yield "metal", metal.examine()
    if tried is not None:
        status.now("trying the training kernels …")
        tried["training_kernels"] = metal.try_kernels()
    yield "training kernels", metal.training_kernels()
    yield "memory", machine.examine_memory()
    yield "versions", versions.examine()
    yield "environment", environment.examine()
    yield "guards", guards.examine()
    if tried is not None:
        status.now("trying the device for every fault that a guard knows …")
        tried["trials"] = guards.try_all()
        yield "trials", guards.examine_trials(tried["trials"])


def run(*, trials: bool = False, json: bool = False) -> None:
    """Print the report, with `trials` also those of guards and kernels.

    Raises UserError for a variable that is refused, RunError for problems (exit 1).
    """
    tried: dict[str, Any] = {}
    with status.shown("looking at this machine …"):
        switch_on()
        findings.show(examine(tried if trials else None), tried, json=json)


def run_upgrade(release: str, *, json: bool = False) -> None:
    """Print what `release` would change in place of the installed torch, without downloading or trying it.

    Raises UserError for a word that names no release, RunError (exit 1) where this machine cannot run it.
    """
    from hf_mps.tools.doctor import versions

    with contextlib.suppress(UserError):  # of a variable, which `run` reports
        activate()
    found = versions.compared(release)
    findings.show(versions.sections(found).items(), {"upgrade": found}, json=json)
