"""A parity's verdict for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.dryrun.parity.compare import Parity


def for_programs(target: str, found: Parity, facts: Mapping[str, Choice[Any]]) -> str:
    """One JSON object."""
    from hf_mps.core.files import plain
    from hf_mps.device import simulated

    steps = [
        {"step": each.number, "loss": list(each.losses), "grad_norm": list(each.norms), "off": each.off}
        for each in found.steps
    ]
    whole = {
        "target": target,
        "simulated": simulated(),
        "facts": dict(facts),
        "same": found.same,
        "tolerance": found.tolerance,
        "steps": steps,
        "divergence": found.divergence,
        "spread": found.spread,
        "failure": found.failure or None,
    }
    return json.dumps(plain(whole), indent=2)


def for_people(target: str, found: Parity, facts: Mapping[str, Choice[Any]]) -> str:
    """The facts, a line for each step, and the verdict with the tolerance's reason."""
    width = max(len(name) for name in facts)
    lines = [f"hf-mps parity {target}"]
    lines += [f"  {name:<{width}}  {choice.value}  {choice.reason}".rstrip() for name, choice in facts.items()]
    lines += ["", "step     loss on cpu     loss on mps   grad norm cpu   grad norm mps       off"]
    for each in found.steps:
        numbers = "  ".join(f"{number:>14.7g}" for number in (*each.losses, *each.norms))
        lines.append(f"{each.number:>4}  {numbers}  {each.off:>8.1e}")
    lines += ["", verdict(found), f"tolerance {found.tolerance.value:g}: {found.tolerance.reason}"]
    return "\n".join([*lines, *_spread(found)])


def _spread(found: Parity) -> list[str]:
    """How far two runs on the device differ from each other, in a line; none where there was one run."""
    if found.spread is None:
        return []
    if found.spread.first is None:
        return ["spread 0: two runs on mps are equal to the bit"]
    most = max(found.spread.steps, default=0.0)
    return [
        f"spread {most:.1e} of loss or gradient norm: two runs on mps differ, first at {found.spread.first};"
        " Metal adds in any order where an index repeats, as in embedding's backward"
    ]


def verdict(found: Parity) -> str:
    """One line: the same, or where they first differ; it says where no Mac's GPU took part."""
    from hf_mps.device import simulated

    return _difference(found) + (" (mps is simulated)" if simulated() else "")


def _difference(found: Parity) -> str:
    if found.same:
        return f"the same: {len(found.steps)} steps, within {found.tolerance.value:g}"
    ended = f"; the run on mps ended: {found.failure}" if found.failure else ""
    if found.spread is not None and found.spread.beyond is not None:
        return f"different: two runs on mps differ from each other, first at {found.spread.beyond}"
    if found.divergence is not None:
        return f"different, first at {found.divergence}{ended}"
    if found.failure:
        return f"different{ended}"
    worst = max(found.steps, key=lambda each: each.off)
    return (
        f"different: loss or gradient norm of step {worst.number} is off by {worst.off:.2g}, and no module's values are"
    )
