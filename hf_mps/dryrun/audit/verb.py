"""What `hf-mps audit` does with its command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hf_mps.core.errors import RunError, UserError


def run(
    words: Sequence[str],
    task: str | None,
    torch_table: Path | None,
    *,
    every: bool,
    json: bool,
    github: bool,
    badge: bool,
) -> None:
    """Audit what `words` name and print it in one form. Raises RunError (exit 1) where something was found."""
    from hf_mps.core import status
    from hf_mps.dryrun import audit as room
    from hf_mps.dryrun.audit import report, script

    if sum((json, github, badge)) > 1:
        raise UserError("--json, --github and --badge are three forms of one result; give one of them")
    if script.is_command(words):
        if task is not None:
            raise UserError("--task belongs to a model, and a script has its own; leave it out")
        found = script.audit(words, torch_table)
    else:
        from hf_mps.dryrun.resolve import find

        with status.shown("tracing a training step …"):
            found = room.audit(find(words[0], words[1:], task), torch_table)
    if json:
        print(report.for_programs(found))
    elif github:
        print(report.for_github(found))
    elif badge:
        print(report.badge(found))
    else:
        print(report.for_people(found, every=every))
    if found.found:
        names = ", ".join(entry.operator for entry in found.found)
        raise RunError(f"audit: {len(found.found)} of {len(found.entries)} operators do not run on Metal: {names}")
