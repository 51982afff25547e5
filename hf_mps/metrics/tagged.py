"""The metrics of tagged words: seqeval's over whole names, and those of labels over single words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.metrics import seqeval
from hf_mps.metrics.selection import Baseline, Metrics, choose, load
from hf_mps.metrics.table import REPORTS, of_kind

Tagged = Sequence[Sequence[str]]


@dataclass
class TagMetrics:
    """Metrics of rows of tags; `seqeval` adds precision, recall and f1 of each kind of name (`PER_f1`)."""

    names: tuple[str, ...]
    main: str
    greater_is_better: bool
    kinds: tuple[str, ...]
    tag_names: tuple[str, ...]
    words: Metrics | None

    @property
    def reported(self) -> tuple[str, ...]:
        numbers = [number for name in self.names for number in REPORTS[name]]
        return (*numbers, *self._of_kinds()) if "seqeval" in self.names else tuple(numbers)

    def _of_kinds(self) -> list[str]:
        return [f"{kind}_{number}" for kind in self.kinds for number in seqeval.OVERALL]

    def compute(self, predictions: Tagged, references: Tagged) -> dict[str, float]:
        """Return every metric of rows of predicted tags against the true ones, of equal lengths.

        A kind of name on neither side scores 0. Raises ValueError where lengths differ.
        """
        values: dict[str, float] = {}
        if "seqeval" in self.names:
            report: dict[str, Any] = dict(load(["seqeval"]).compute(list(predictions), list(references)))
            overall = {name: value for name, value in report.items() if name.startswith("overall_")}
            values |= overall | dict.fromkeys(self._of_kinds(), 0.0)
            for kind in self.kinds:
                values |= {f"{kind}_{number}": report[kind][number] for number in seqeval.OVERALL if kind in report}
        if self.words is not None:
            ids = {name: number for number, name in enumerate(self.tag_names)}
            flat = [[ids[tag] for row in rows for tag in row] for rows in (predictions, references)]
            values |= self.words.compute(*flat)
        return {name: float(values[name]) for name in self.reported}

    def baseline(self, references: Tagged, train: Tagged) -> Baseline:
        """Return the score of the training rows' most frequent tag as the only answer."""
        counts = Counter(tag for row in train for tag in row)
        answer, count = min(counts.items(), key=lambda item: (-item[1], item[0]))
        what = f"always answers {answer}, the tag of {count / counts.total():.1%} of the training words"
        return Baseline(what, self.compute([[answer] * len(row) for row in references], references))


def of_tags(asked: Sequence[str] | None, tag_names: Sequence[str], task: str) -> TagMetrics:
    """Return the metrics asked for; by default seqeval's where tags mark names, else accuracy and macro F1.

    Raises UserError for a metric that tags do not have, and for seqeval over tags that mark no names.
    """
    chunked = seqeval.is_chunked(tag_names)
    chosen = choose(
        asked or (["seqeval"] if chunked else ["accuracy", "f1/macro"]), ("seqeval", *of_kind("words")), task
    )
    if "seqeval" in chosen.names and not chunked:
        shown = ", ".join(tag_names[:6])
        raise UserError(
            f"metrics has seqeval, which counts names, and the tags ({shown}{', …' if len(tag_names) > 6 else ''}) mark"
            f" none (B-PER, I-PER, O); allowed: {', '.join(of_kind('words'))}"
        )
    others = [name for name in chosen.names if name != "seqeval"]
    words = load(others, num_labels=len(tag_names)) if others else None
    kinds = tuple(seqeval.kinds(tag_names))
    return TagMetrics(chosen.names, chosen.main, chosen.greater_is_better, kinds, tuple(tag_names), words)
