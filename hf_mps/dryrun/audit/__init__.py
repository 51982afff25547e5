"""`hf-mps audit`: which operators of a training step have a Metal kernel, without a Mac and without weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import first_line

if TYPE_CHECKING:
    from hf_mps.dryrun.audit.record import Record
    from hf_mps.dryrun.audit.report import Audit
    from hf_mps.dryrun.resolve import Target
    from hf_mps.dryrun.step import TrainingStep


def audit(target: Target, torch_table: Path | None = None) -> Audit:
    """Look at one training step of `target`, in real size with fake tensors; where those cannot run, a small real one.

    Imports torch and makes a simulated device where there is no Metal. Raises UserError for what cannot be looked at.
    """
    from hf_mps.dryrun import metal
    from hf_mps.dryrun.failures import told
    from hf_mps.operators.support import OperatorSupport

    device, release = metal.present(), OperatorSupport(torch_table)
    with told(target.resolved):
        return _audit(target, device, release)


def _audit(target: Target, device: Choice[str], release: Any) -> Audit:
    from hf_mps.dryrun import prepare
    from hf_mps.finetune.smoke.fake import needs_numbers

    facts: dict[str, Choice[Any]] = {"device": device}
    with prepare.weightless(target) as parts:
        try:
            step = prepare.step(parts, device, fake=True)
            seen = operators(step)
            return result(target.name, seen, release, facts | step.facts | {"tensors": FAKE})
        except Exception as error:
            if not needs_numbers(error):
                raise
            why = f"{type(error).__name__}: {first_line(error)}"
    with prepare.small(target, device) as parts:
        step = prepare.step(parts, device, fake=False)
        seen = operators(step)
        told = Choice("real", f"a small real step; fake tensors cannot run this one: {why}")
        return result(target.name, seen, release, facts | step.facts | {"tensors": told})


FAKE = Choice("fake", "shapes and dtypes in real size, without numbers and memory")


def operators(step: TrainingStep) -> Record:
    """Take one step and return what was recorded of it."""
    from hf_mps.dryrun.audit.record import Record

    record = Record(step.where)
    step.run(1, watch=record)
    return record


def result(target: str, record: Record, release: Any, facts: Mapping[str, Choice[Any]]) -> Audit:
    """The audit of what was recorded, what Metal lacks first."""
    import torch

    from hf_mps.dryrun.audit.report import Audit, Entry, link
    from hf_mps.operators.support import FOUND

    merged: dict[str, dict[tuple[str, str], int]] = {}
    dtypes: dict[str, set[Any]] = {}
    for seen in record.seen.values():
        name = release.kernel_owner(seen.name)
        # The out= form stands for its operator where it is the one that Metal lacks.
        name = name if release.kind(name) == "fallback" else seen.name
        places = merged.setdefault(name, {})
        for place, calls in seen.places.items():
            places[place] = places.get(place, 0) + calls
        dtypes.setdefault(name, set()).update(seen.dtypes)
    entries = []
    for name, places in merged.items():
        refused = [dtype for dtype in dtypes[name] if dtype in (torch.float64, torch.complex128)]
        kind = release.kind(name, map(str, refused))
        named = tuple(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes[name]))
        ordered = sorted(((*place, calls) for place, calls in places.items()), key=lambda each: -each[2])
        entries.append(Entry(name, kind, sum(places.values()), named, tuple(ordered), link(kind)))
    entries.sort(key=lambda entry: (entry.kind not in FOUND, -entry.calls, entry.operator))
    return Audit(target, tuple(entries), facts)
