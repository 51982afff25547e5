"""Pictures of a model's answers, each a page of two panels, from the rows of predictions.csv."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_mps.finetune.report.plot import BLUE, INK, ORANGE, QUIET, png

Rows = Sequence[Mapping[str, Any]]
# Up to this length in words each length has its own bar; longer ones share the last.
WORDS = 12
RANKS = 10


def answers(rows: Rows) -> dict[str, bytes]:
    """Return answers.png of `question`, `prediction`, `truth`, `f1` (0 to 1): F1 by the truth's length, and both
    lengths.
    """
    by_length: dict[int, list[float]] = {}
    for row in rows:
        by_length.setdefault(_words(row["truth"].split(" | ")[0]), []).append(float(row["f1"]))
    predicted = Counter(_words(row["prediction"]) for row in rows)
    lengths = range(WORDS + 1)

    def draw(left: Any, right: Any) -> None:
        known = sorted(by_length)
        means = [100 * sum(by_length[length]) / len(by_length[length]) for length in known]
        left.bar(known, means, color=BLUE)
        for length, mean in zip(known, means, strict=True):
            left.annotate(len(by_length[length]), (length, mean), ha="center", va="bottom", fontsize=7, color=QUIET)
        below = f"words ({WORDS}: as many or more), with the number of questions"
        left.set(title="F1 by the length of the truth", xlabel=below, ylim=(0, 105))
        right.bar(
            [n - 0.2 for n in lengths], [len(by_length.get(n, ())) for n in lengths], 0.4, color=INK, label="truth"
        )
        right.bar([n + 0.2 for n in lengths], [predicted[n] for n in lengths], 0.4, color=ORANGE, label="prediction")
        right.set(title="How long answers are", xlabel=f"words (0: no answer; {WORDS}: as many or more)")
        right.legend()

    return {"answers.png": _page(draw)}


def similarities(rows: Rows) -> dict[str, bytes]:
    """Return similarities.png of `cosine` over `score`; empty where rows have no score."""
    pairs = [(float(row["score"]), float(row["cosine"])) for row in rows if "score" in row]
    if not pairs:
        return {}
    scores, cosines = zip(*pairs, strict=True)

    def draw(left: Any, right: Any) -> None:
        left.scatter(scores, cosines, s=8, color=BLUE, alpha=0.35, linewidths=0)
        left.set(title="Cosine over the given score", xlabel="score", ylabel="cosine")
        middle = sorted(scores)[len(scores) // 2]
        lower = [cosine for score, cosine in pairs if score <= middle]
        upper = [cosine for score, cosine in pairs if score > middle]
        right.hist(
            [lower, upper], bins=20, color=[ORANGE, BLUE], label=[f"score to {middle:.3g}", f"above {middle:.3g}"]
        )
        right.set(title="Cosines of the unlike and the like half", xlabel="cosine")
        right.legend()

    return {"similarities.png": _page(draw)}


def ranks(rows: Rows) -> dict[str, bytes]:
    """Return ranks.png of `rank` and `cosine` or `score`: at which rank the right text came, and how like it is."""
    similarity = "cosine" if "cosine" in rows[0] else "score"
    places = Counter(min(int(row["rank"]), RANKS + 1) for row in rows)
    first = [float(row[similarity]) for row in rows if row["rank"] == 1]
    others = [float(row[similarity]) for row in rows if row["rank"] != 1]

    def draw(left: Any, right: Any) -> None:
        left.bar(range(1, RANKS + 2), [places[rank] for rank in range(1, RANKS + 2)], color=BLUE)
        left.set(title="Rank of the right text", xlabel=f"rank ({RANKS + 1}: that or more)")
        right.hist([first, others], bins=20, color=[BLUE, ORANGE], label=["came first", "did not"])
        right.set(title="Similarity of text and right text", xlabel=similarity)
        right.legend()

    return {"ranks.png": _page(draw)}


def relevance(rows: Rows) -> dict[str, bytes]:
    """Return relevance.png of `label`, `score` and `rank`: the ranks of relevant documents, and all scores."""
    relevant = [row for row in rows if float(row["label"]) > 0]
    others = [float(row["score"]) for row in rows if float(row["label"]) <= 0]
    places = Counter(min(int(row["rank"]), RANKS + 1) for row in relevant)

    def draw(left: Any, right: Any) -> None:
        left.bar(range(1, RANKS + 2), [places[rank] for rank in range(1, RANKS + 2)], color=BLUE)
        left.set(title="Ranks of the relevant documents", xlabel=f"rank ({RANKS + 1}: that or more)")
        scores = [float(row["score"]) for row in relevant]
        right.hist([scores, others], bins=20, color=[BLUE, ORANGE], label=["relevant", "irrelevant"])
        right.set(title="Scores of all documents", xlabel="score")
        right.legend()

    return {"relevance.png": _page(draw)}


def transcripts(rows: Rows) -> dict[str, bytes]:
    """Return transcripts.png of `seconds`, `wer`: errors over the length of the sound, and their distribution."""
    seconds = [float(row["seconds"]) for row in rows]
    rates = [float(row["wer"]) for row in rows]

    def draw(left: Any, right: Any) -> None:
        left.scatter(seconds, rates, s=10, color=BLUE, alpha=0.4, linewidths=0)
        left.set(title="Word error rate over the length", xlabel="seconds", ylabel="word error rate", ylim=(0, None))
        right.hist([min(rate, 1.0) for rate in rates], bins=20, range=(0, 1), color=ORANGE)
        right.set(title="Rows by their word error rate", xlabel="word error rate (1: as many or more)")

    return {"transcripts.png": _page(draw)}


def _page(draw: Callable[[Any, Any], None]) -> bytes:
    """Return a page of two panels side by side."""

    def paint(figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        panels = figure.subplots(1, 2)
        draw(*panels)
        for axes in panels:
            if axes.patches:  # bars count rows: no ticks at quarters of one
                axes.yaxis.set_major_locator(MaxNLocator(integer=True))

    return png((11, 4.2), paint, layout="constrained")


def _words(text: str) -> int:
    return min(len(text.split()), WORDS)
