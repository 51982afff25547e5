"""A memory plan for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.device.memory import DRIVER
from hf_mps.dryrun.memory.machine import GIB, Machine
from hf_mps.dryrun.memory.options import Option
from hf_mps.dryrun.memory.trace import PARTS
from hf_mps.dryrun.memory.tracer import Estimate

SHOWN = 3
BESIDE = f"live memory, of tensors alone: {DRIVER}; Python and PyTorch hold some hundred megabytes more"


@dataclass(frozen=True)
class MemoryPlan:
    """Whether the step of `estimate` fits `machine`; `largest` is the most rows that do, `options` make it fit."""

    target: str
    machine: Machine
    estimate: Estimate
    largest: int
    options: tuple[Option, ...] = ()
    facts: Mapping[str, Choice[Any]] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """fits, swaps or "does not fit"."""
        return self.machine.verdict(self.estimate.bytes)

    def as_dict(self) -> dict[str, Any]:
        """The plan in JSON's types, sizes in bytes."""
        from hf_mps.core.files import plain
        from hf_mps.device import simulated

        return {
            "target": self.target,
            "simulated": simulated(),
            "facts": plain(dict(self.facts)),
            "machine": {**plain(self.machine), "comfortable": self.machine.comfortable},
            "verdict": self.verdict,
            "estimate": _estimate(self.estimate),
            "largest_batch": self.largest,
            "options": [
                {
                    "overrides": list(each.overrides),
                    "reason": each.reason,
                    "largest_batch": each.largest,
                    "estimate": _estimate(each.estimate),
                }
                for each in self.options
            ],
        }


def for_programs(plan: MemoryPlan) -> str:
    """One JSON object, sizes in bytes."""
    return json.dumps(plan.as_dict(), indent=2)


def for_people(plan: MemoryPlan) -> str:
    """The peak with its parts, what the machine has, the largest batch, and what would make it fit."""
    machine, found = plan.machine, plan.estimate
    facts = {**plan.facts, "batch": Choice(_shape(found, found.rows), _step(found))}
    told = f"{gib(machine.recommended)} recommended for one process, {gib(machine.memory)} in all"
    facts["machine"] = Choice(machine.name, f"{told}; above {gib(machine.comfortable)} macOS begins to swap")
    width = max(len(name) for name in (*facts, *PARTS))
    lines = [f"hf-mps plan {plan.target}"]
    lines += [f"  {name:<{width}}  {choice.value}  {choice.reason}" for name, choice in facts.items()]
    share, peak = found.bytes / machine.comfortable, f"peak {gib(found.bytes)} of live memory"
    lines += ["", f"{peak}, {plan.verdict}: {share:.0%} of what may be used; at {found.where}"]
    for part, what in PARTS.items():
        if size := found.parts.get(part):
            lines.append(f"  {part:<{width}}  {gib(size):>9}  {what}")
    lines.append(f"  {BESIDE}")
    most = _shape(found, plan.largest) if plan.largest else "none: one row alone is too much"
    lines += ["", f"largest batch that fits: {most}"]
    if plan.options:
        lines += ["", "what would make it fit, the least change first:"]
        for number, option in enumerate(plan.options, 1):
            lines.append(f"  {number}. {' '.join(option.overrides)}")
            lines.append(f"     peak {gib(option.estimate.bytes)}; {option.reason}; up to {option.largest} rows")
    return "\n".join(lines)


def gib(size: int) -> str:
    """Bytes for a person."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:.2f} MiB"


def _shape(found: Estimate, rows: int) -> str:
    return f"{rows} rows {found.width}".rstrip()


def _step(found: Estimate) -> str:
    many = found.accumulation > 1
    return f"{found.accumulation} of them make an optimizer step" if many else "an optimizer step"


def _estimate(found: Estimate) -> dict[str, Any]:
    return {
        "rows": found.rows,
        "length": found.length,
        "accumulation": found.accumulation,
        "bytes": found.bytes,
        "parts": dict(found.parts),
        "where": found.where,
    }
