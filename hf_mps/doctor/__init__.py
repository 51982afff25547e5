"""`hf-mps doctor`: is this machine ready to train on Metal, and if not, what to type.

Every finding that is not well ends in a command or a link.
"""

from __future__ import annotations

from hf_mps.core.errors import RunError
from hf_mps.doctor.finding import Finding

SECTIONS = ("machine", "metal", "memory", "versions", "environment", "guards")


def examine() -> dict[str, list[Finding]]:
    """Look at everything, section by section; imports torch and uses the device. Never raises for what it finds."""
    from hf_mps.activation import activate
    from hf_mps.doctor import environment, guards, machine, memory, metal, versions

    # What switches the layer on may itself refuse a variable: the environment's section says so.
    refused = _refusal(activate.activate)
    return {
        "machine": machine.examine(),
        "metal": metal.examine(),
        "memory": memory.examine(),
        "versions": versions.examine(),
        "environment": environment.examine(refused),
        "guards": guards.examine(),
    }


def run(*, trials: bool = False, json: bool = False) -> None:
    """Print the report, with each guard's trial of the device where asked for.

    Raises RunError (exit 1), which counts the problems, where there is one.
    """
    from hf_mps.core import status
    from hf_mps.doctor import report

    tried = None
    with status.shown("looking at this machine …"):
        found = examine()
    if trials:
        from hf_mps.doctor import trials as room

        with status.shown("trying the device for every fault that a guard knows …"):
            tried = room.run()
        found["trials"] = room.findings(tried)
    report.print_report(found, tried, json=json)
    problems = [finding for findings in found.values() for finding in findings if finding.state == "problem"]
    if problems:
        names = ", ".join(dict.fromkeys(finding.name for finding in problems))
        raise RunError(f"doctor: {len(problems)} to mend: {names}; next: {problems[0].next}")


def _refusal(work: object) -> str:
    from hf_mps.core.errors import UserError

    try:
        assert callable(work)
        work()
    except UserError as error:
        return str(error)
    return ""
