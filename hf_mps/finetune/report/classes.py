"""Pictures of a classifier's answers, from the rows of predictions.csv: a confusion matrix or a scatter plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hf_mps.finetune.report.plot import BLUE, INK, QUIET, png

# More classes than this are too many to read: those with the most mistakes are shown.
SHOWN = 24
# Up to so many classes each cell shows its number.
NUMBERED = 16
LONGEST_NAME = 24


def confusion(pairs: Sequence[tuple[str, str]], names: Sequence[str], of: str = "rows") -> dict[str, bytes]:
    """Return confusion_matrix.png of (truth, answer) pairs over the classes `names` in their order; a pair is one of
    `of`.

    A cell shows the number of pairs, its shade the share of its row's truth. Beyond SHOWN classes only those with the
    most mistakes are shown, and the title says so.
    """
    counts = Counter(pairs)
    classes = _most_mistaken(counts, names)
    table = [[counts[truth, answer] for answer in classes] for truth in classes]
    title = f"Validation {of} by class"
    if len(classes) < len(names):
        title += f": the {len(classes)} of {len(names)} classes with the most mistakes"

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        shares = [[count / max(1, sum(row)) for count in row] for row in table]
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        for down, row in enumerate(table if len(classes) <= NUMBERED else ()):
            for across, count in enumerate(row):
                colour = "white" if shares[down][across] > 0.5 else INK if count else QUIET
                axes.text(across, down, f"{count}", ha="center", va="center", color=colour, fontsize=9)
        labels = [_short(name) for name in classes]
        crowded = len(classes) > 4 or max(map(len, labels)) > 10
        axes.set_xticks(range(len(classes)), labels, rotation=45 if crowded else 0, ha="right" if crowded else "center")
        axes.set_yticks(range(len(classes)), labels)
        axes.set(title=title, xlabel="answered", ylabel="truth")
        axes.grid(visible=False)

    side = 3.6 + 0.34 * len(classes)
    return {"confusion_matrix.png": png((side + 1, side), paint, layout="constrained")}


def by_label(pairs: Sequence[tuple[Sequence[str], Sequence[str]]], names: Sequence[str]) -> dict[str, bytes]:
    """Return labels.png of (true labels, answered labels) pairs of rows: F1 of each label, with how many have it.

    Beyond SHOWN labels only the most frequent are shown, and the title says so.
    """
    true, said, right = Counter[str](), Counter[str](), Counter[str]()
    for truth, answer in pairs:
        true.update(truth)
        said.update(answer)
        right.update(set(truth) & set(answer))
    shown = sorted(names, key=lambda name: -true[name])[:SHOWN][::-1]
    scores = [2 * right[name] / max(1, true[name] + said[name]) for name in shown]
    title = "F1 of each label" + (f": the {SHOWN} commonest of {len(names)}" if len(names) > SHOWN else "")

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.barh([_short(name) for name in shown], scores, color=BLUE)
        for place, name in enumerate(shown):
            axes.text(1.01, place, f"{true[name]}", va="center", color=QUIET, fontsize=8)
        axes.set(title=title, xlabel="F1; on the right the validation rows with the label", xlim=(0, 1.1))

    return {"labels.png": png((7, 1.6 + 0.26 * len(shown)), paint, layout="constrained")}


def scatter(truths: Sequence[float], answers: Sequence[float]) -> dict[str, bytes]:
    """Return values.png: each answered value over the truth, with the line of equality."""

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        low, high = min([*truths, *answers]), max([*truths, *answers])
        axes.plot([low, high], [low, high], color=QUIET, linewidth=1, linestyle="--", label="equal")
        axes.scatter(truths, answers, s=8, color=BLUE, alpha=0.35, linewidths=0)
        axes.set(title="Answered over true values, validation rows", xlabel="truth", ylabel="answered")
        axes.legend(loc="upper left")

    return {"values.png": png((6, 5.4), paint, layout="constrained")}


def _most_mistaken(counts: Mapping[tuple[str, str], int], names: Sequence[str]) -> list[str]:
    if len(names) <= SHOWN:
        return list(names)
    mistakes: Counter[str] = Counter()
    for (truth, answer), count in counts.items():
        if truth != answer:
            mistakes.update({truth: count, answer: count})
    kept = sorted(names, key=lambda name: -mistakes[name])[:SHOWN]
    return [name for name in names if name in set(kept)]


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
