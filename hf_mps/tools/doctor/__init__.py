"""`hf-mps doctor`: is this machine ready to train on Metal, and if not, what to type.

Every finding that is not well ends in a command or a link.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hf_mps.core.errors import UserError

if TYPE_CHECKING:
    from hf_mps.tools.doctor.findings import Finding

SECTIONS = ("machine", "metal", "memory", "versions", "environment", "guards")


def examine() -> dict[str, list[Finding]]:
    """Look at everything, section by section; imports torch and uses the device. Never raises for what it finds."""
    from hf_mps.layer.activation.activate import activate
    from hf_mps.tools.doctor import environment, guards, machine, metal, versions

    refused = ""
    try:
        activate()
    except UserError as error:  # a variable: the environment's section tells
        refused = str(error)
    return {
        "machine": machine.examine(),
        "metal": metal.examine(),
        "memory": machine.examine_memory(),
        "versions": versions.examine(),
        "environment": environment.examine(refused),
        "guards": guards.examine(),
    }


def run(*, trials: bool = False, json: bool = False) -> None:
    """Print the report, with each guard's trial of the device where asked for.

    Raises RunError (exit 1), which counts the problems, where there is one.
    """
    from hf_mps.core import status

    outcomes = None
    with status.shown("looking at this machine …"):
        sections = examine()
    from hf_mps.tools.doctor import findings, guards

    if trials:
        with status.shown("trying the device for every fault that a guard knows …"):
            outcomes = guards.try_all()
        sections["trials"] = guards.examine_trials(outcomes)
    findings.show(sections, {} if outcomes is None else {"trials": outcomes}, json=json)
    findings.stop_at_problems(sections)


def run_upgrade(release: str, *, json: bool = False) -> None:
    """Print what `release` would change in place of the installed torch; nothing is downloaded or tried.

    Raises UserError for what is no release, RunError (exit 1) where this machine cannot have it.
    """
    from hf_mps.layer.activation.activate import activate
    from hf_mps.tools.doctor import findings, upgrade

    with contextlib.suppress(UserError):  # a variable: `run` tells
        activate()
    found = upgrade.compared(release)
    sections = upgrade.sections(found)
    findings.show(sections, {"upgrade": found.values}, json=json)
    findings.stop_at_problems(sections)
