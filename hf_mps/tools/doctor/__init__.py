"""`hf-mps doctor`: whether this machine is ready to train on Metal; every problem ends in a command or a link."""

from __future__ import annotations

import contextlib
from typing import Any

from hf_mps.core import status
from hf_mps.core.errors import UserError
from hf_mps.layer.activation.activate import activate
from hf_mps.tools.doctor import findings


def examine() -> dict[str, list[findings.Finding]]:
    """Examine everything, section by section. Imports torch and uses the device; never raises for what it finds."""
    from hf_mps.tools.doctor import environment, guards, machine, metal, versions

    refused = ""
    try:
        activate()
    except UserError as error:  # of a variable, which the environment's section reports
        refused = str(error)
    return {
        "machine": machine.examine(),
        "metal": metal.examine(),
        "training kernels": metal.training_kernels(),
        "memory": machine.examine_memory(),
        "versions": versions.examine(),
        "environment": environment.examine(refused),
        "guards": guards.examine(),
    }


def run(*, trials: bool = False, json: bool = False) -> None:
    """Print the report, with `trials` also those of guards and kernels. Raises RunError for problems (exit 1)."""
    also: dict[str, Any] = {}
    with status.shown("looking at this machine …"):
        sections = examine()
    from hf_mps.tools.doctor import guards, metal

    if trials:
        with status.shown("trying the device for every fault that a guard knows, and the training kernels …"):
            also = {"trials": guards.try_all(), "training_kernels": metal.try_kernels()}
        # Looked at again: the trials just made have outcomes to tell.
        sections["training kernels"] = metal.training_kernels()
        sections["trials"] = guards.examine_trials(also["trials"])
    findings.show(sections, also, json=json)


def run_upgrade(release: str, *, json: bool = False) -> None:
    """Print what `release` would change in place of the installed torch, without downloading or trying it.

    Raises UserError for a word that names no release, RunError (exit 1) where this machine cannot run it.
    """
    from hf_mps.tools.doctor import upgrade

    with contextlib.suppress(UserError):  # of a variable, which `run` reports
        activate()
    found = upgrade.compared(release)
    findings.show(upgrade.sections(found), {"upgrade": found.values}, json=json)
