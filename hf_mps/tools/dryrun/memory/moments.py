"""The highest moments of a step's memory, and what they are in the whole model, told by traces of a few layers.

Which moment is the highest changes with the depth, so each is scaled by itself, told by its phase, its module (in the
first layer, the last one, or one of a kind between) and its operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_mps.tools.dryrun.layers import ADDED, FIRST_LAYER, Cut, Kept, of_all


@dataclass
class Peak:
    """The highest moment: bytes in all and by part, and where it was: phase and module."""

    bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    where: tuple[str, str] = ("", "")


Key = Any  # phase, module and operator


def folded(moments: Mapping[Key, Peak], cut: Cut, kept: Kept) -> dict[Key, Peak]:
    """The highest moments of a trace of the layers `kept`, by what they have in common with those of another trace."""
    found: dict[Key, Peak] = {}
    for ((phase, module), operator), one in moments.items():
        each = (phase, cut.named(kept, module), operator)
        found[each] = highest([found.get(each, one), one])
    return found


def scaled(base: Mapping[Key, Peak], more: Sequence[tuple[Mapping[Key, Peak], int]]) -> dict[Key, Peak] | None:
    """The moments of all layers, from those of the traces of a few; None where they are not the same ones.

    The layers that a trace lacks come after the first of its list and before the others. So a moment in a layer that
    a further trace adds, right after the first, has them all after it, as one in the first layer has.
    """
    added = [{key for key in each if ADDED in key[1]} for each, _ in more]
    if any(each.keys() - those != base.keys() for (each, _), those in zip(more, added, strict=True)):
        return None
    made = {}
    for key, one in base.items():
        parts = of_all(one.parts, [(each[key].parts, lacking) for each, lacking in more])
        where = highest([one, *(each[key] for each, _ in more)]).where
        made[key] = Peak(sum(parts.values()), dict(parts), where)
    firsts = {(key[0], key[1].partition(f".{FIRST_LAYER}")[0]): key for key in base if f".{FIRST_LAYER}" in key[1]}
    for (trace, _), those in zip(more, added, strict=True):
        for key in those:
            at = firsts.get((key[0], key[1].partition(ADDED)[0].rpartition(".")[0]))
            if at is None:  # a first layer that does not train
                continue
            one, parts = trace[key], Counter(trace[key].parts)
            parts.update(of_all(base[at].parts, [(each[at].parts, lacks - (each is trace)) for each, lacks in more]))
            parts.subtract(base[at].parts)
            made[key] = Peak(sum(parts.values()), dict(parts), one.where)
    # Less than nothing is of a moment outside of modules, which is at another layer in another trace.
    return {key: one for key, one in made.items() if min(one.parts.values(), default=0) >= 0}


def highest(moments: Iterable[Peak]) -> Peak:
    """Return the one of most bytes."""
    return max(moments, key=lambda one: one.bytes)
