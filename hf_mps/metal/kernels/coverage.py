"""How much of what a Mac runs with PyTorch's Metal kernels ran with them here, and what did not, with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from hf_mps.metal.operators.launch_class import CLASSES, COMPILED, table

if TYPE_CHECKING:
    from hf_mps.metal.kernels.rules import Dispatch

NO_KERNEL = ("MPSGraph", "blit", ", no kernel", "Performance Shaders", "composed of other operators", "nothing to")
"""Words of a rule's reason that say that a Mac launches no kernel of PyTorch's for this call either."""
NAMED = 4


@dataclass(frozen=True)
class Counts:
    """What all threads of a process have launched."""

    calls: Counter[str] = field(default_factory=Counter)
    """Calls of each operator, by its name; the device counts them."""
    operators: Counter[str] = field(default_factory=Counter)
    """Calls of an operator ("add.Tensor") that a rule ran whole."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Launches of a kernel by its name."""
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls of an operator that has a rule, and that the rule did not cover: the operator and the reason."""

    @classmethod
    def of(cls, dispatch: Dispatch) -> Counts:
        """Return the counts of this moment."""
        return replace(dispatch.ledger + cls(), calls=Counter(dispatch.device.named_launches()))

    def clear(self) -> None:
        """Forget all counts."""
        for each in fields(self):
            getattr(self, each.name).clear()

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def plain(self) -> dict[str, Any]:
        """Return the same of plain types, to be sent to another process."""
        return {each.name: list(getattr(self, each.name).items()) for each in fields(self)}

    @classmethod
    def from_plain(cls, sent: Mapping[str, Any]) -> Counts:
        """Return what `plain` made."""
        # JSON, and execnet between pytest's workers, make lists of tuples.
        plain = {name: Counter(dict(sent[name])) for name in ("calls", "operators", "kernels")}
        return cls(**plain, reasons=Counter({(*names,): count for names, count in sent["reasons"]}))

    def since(self, start: Counts) -> Counts:
        """Return what came after `start`."""
        return Counts(*(getattr(self, each.name) - getattr(start, each.name) for each in fields(self)))


@dataclass(frozen=True)
class Coverage:
    """Launches, each a call of an operator that computes: of Metal kernels that ran, of those that did not, others."""

    release: str
    ran: int
    """Calls that ran the release's own kernels."""
    kernels: int
    """Different kernels that they launched."""
    missing: Mapping[tuple[str, str], int]
    """Calls that launch a Metal kernel on a Mac and did not run it here, by operator ("aten::cat") and reason."""
    others: Mapping[str, int]
    """Calls that launch no Metal kernel of PyTorch's on a Mac either, by what they launch."""

    @property
    def share(self) -> float:
        """The part of the calls that launch a Metal kernel on a Mac which ran it here; 1 where there were none."""
        metal = self.ran + sum(self.missing.values())
        return self.ran / metal if metal else 1.0

    def __str__(self) -> str:
        metal = self.ran + sum(self.missing.values())
        line = (
            f"{self.ran:,} of {metal:,} launches that are Metal kernels on a Mac ran torch {self.release}'s own "
            f"({self.kernels} kernels)"
        )
        if self.others:
            line += f"; {sum(self.others.values()):,} launches are none there"
        if self.missing:
            operators = Counter[str]()
            for (operator, _), count in self.missing.items():
                operators[operator] += count
            named = ", ".join(f"{name} ({count:,})" for name, count in operators.most_common(NAMED))
            line += f"; as without kernels: {named}" + (", …" if len(operators) > NAMED else "")
        return line

    def record(self) -> dict[str, Any]:
        """Return the same for results.json."""
        return {
            "release": self.release,
            "launches": self.ran,
            "kernels": self.kernels,
            "share": self.share,
            "missing": [
                {"operator": name, "reason": why, "launches": count} for (name, why), count in self.missing.items()
            ],
            "others": dict(self.others),
        }


class Counting:
    """What has run since this was made."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch, self._start = dispatch, Counts.of(dispatch)

    @property
    def release(self) -> str:
        """The release whose kernels run, "2.13.0"."""
        return self._dispatch.release.version

    @property
    def counts(self) -> Counts:
        """The counts up to now."""
        return Counts.of(self._dispatch).since(self._start)

    @property
    def kernels(self) -> Counter[str]:
        """Launches by the kernel's name."""
        return self.counts.kernels

    @property
    def operators(self) -> Counter[str]:
        """Calls that ran the release's kernels by operator, "add.Tensor"."""
        return self.counts.operators

    @property
    def reasons(self) -> Counter[tuple[str, str]]:
        """Calls of operators with a launch rule that it did not cover: operator and reason."""
        return self.counts.reasons

    @property
    def coverage(self) -> Coverage:
        """How much of what a Mac runs with Metal kernels ran with the release's."""
        return covered(self.counts, self.release)


def covered(counts: Counts, release: str) -> Coverage:
    """Return what these counts, of one process or of several, say of a release's kernels."""
    ran = Counter[str]()
    for operator, count in counts.operators.items():
        ran[f"aten::{operator}"] += count
    told: dict[str, Counter[str]] = {}
    for (operator, why), count in counts.reasons.items():
        told.setdefault(f"aten::{operator}", Counter())[why] += count
    missing, others = Counter[tuple[str, str]](), Counter[str]()
    classes = table(release)
    for name, count in (counts.calls - ran).items():
        if name.startswith(COMPILED):  # it is a Metal kernel, and no release's
            others["compiled from source"] += count
            continue
        reasons = told.get(name, Counter[str]())
        # The overload's own line first: `where.self` is a graph, and its namesake made of `nonzero` is not.
        base = name.partition(".")[0]
        ways = () if classes is None else classes.ways(name) or classes.ways(base) or classes.ways(base.rstrip("_"))
        # A call that no rule ran is missing where the release may launch a kernel and no reason says otherwise.
        if ways and "metal" not in ways:
            others[CLASSES[ways[0]] if len(ways) == 1 else " or ".join(ways)] += count  # type: ignore[index]
            continue
        for why, number in reasons.items():
            if any(word in why for word in NO_KERNEL):
                others[why] += number
            else:
                missing[name, why] += number
        if count > reasons.total():
            missing[name, "no rule"] += count - reasons.total()
    return Coverage(release, ran.total(), len(counts.kernels), dict(missing.most_common()), dict(others.most_common()))
