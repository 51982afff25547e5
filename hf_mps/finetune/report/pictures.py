"""Pictures of a model's answers from the rows of predictions.csv.

They are a page of two panels, a few images with their answers, or of a classifier a confusion matrix or a scatter plot.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_mps.core.errors import brief
from hf_mps.finetune.report.plot import BLUE, GREEN, INK, ORANGE, PURPLE, QUIET, RED, SKY, png

Rows = Sequence[Mapping[str, Any]]
# Up to this length in words each length has its own bar; longer ones share the last.
WORDS = 12
RANKS = 10
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
SCENES = 4
Scene = tuple[Any, Any, Any]
"""A PIL image, its truth and the answer."""
Paint = Callable[[Any, Any, Mapping[str, Any]], None]
"""Draws a truth or an answer on axes, in the colours of its classes by their names."""


def answers(rows: Rows) -> dict[str, bytes]:
    """Return answers.png of `question`, `prediction`, `truth`, `f1` (0 to 1): F1 by the truth's length, and both
    lengths.
    """
    by_length: dict[int, list[float]] = {}
    for row in rows:
        by_length.setdefault(_words(row["truth"].split(" | ")[0]), []).append(float(row["f1"]))
    predicted = Counter(_words(row["prediction"]) for row in rows)
    sizes = range(WORDS + 1)

    def draw(left: Any, right: Any) -> None:
        known = sorted(by_length)
        means = [100 * sum(by_length[length]) / len(by_length[length]) for length in known]
        left.bar(known, means, color=BLUE)
        for length, mean in zip(known, means, strict=True):
            left.annotate(len(by_length[length]), (length, mean), ha="center", va="bottom", fontsize=7, color=QUIET)
        below = f"words ({WORDS}: as many or more), with the number of questions"
        left.set(title="F1 by the length of the truth", xlabel=below, ylim=(0, 105))
        right.bar([n - 0.2 for n in sizes], [len(by_length.get(n, ())) for n in sizes], 0.4, color=INK, label="truth")
        right.bar([n + 0.2 for n in sizes], [predicted[n] for n in sizes], 0.4, color=ORANGE, label="prediction")
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
        halves = {f"score above {middle:.3g}": upper, f"to {middle:.3g}": lower}
        _histogram(right, halves, "Cosines of the like and the unlike half", "cosine")

    return {"similarities.png": _page(draw)}


def ranks(rows: Rows) -> dict[str, bytes]:
    """Return ranks.png of `rank` and `cosine` or `score`: at which rank the right text came, and how like it is."""
    similarity = "cosine" if "cosine" in rows[0] else "score"
    first = [float(row[similarity]) for row in rows if row["rank"] == 1]
    others = [float(row[similarity]) for row in rows if row["rank"] != 1]
    halves, titles = {"came first": first, "did not": others}, ("Rank of the right text", "Its similarity to the text")
    return {"ranks.png": _ranked(rows, halves, titles, similarity)}


def relevance(rows: Rows) -> dict[str, bytes]:
    """Return relevance.png of `label`, `score` and `rank`: the ranks of relevant documents, and all scores."""
    relevant = [row for row in rows if float(row["label"]) > 0]
    others = [float(row["score"]) for row in rows if float(row["label"]) <= 0]
    halves = {"relevant": [float(row["score"]) for row in relevant], "irrelevant": others}
    titles = ("Ranks of the relevant documents", "Scores of all documents")
    return {"relevance.png": _ranked(relevant, halves, titles, "score")}


def _ranked(rows: Rows, halves: Mapping[str, Sequence[float]], titles: tuple[str, str], label: str) -> bytes:
    """Return a page of the ranks of `rows`, and a histogram of two sets of values by their names."""
    places = Counter(min(int(row["rank"]), RANKS + 1) for row in rows)

    def draw(left: Any, right: Any) -> None:
        left.bar(range(1, RANKS + 2), [places[rank] for rank in range(1, RANKS + 2)], color=BLUE)
        left.set(title=titles[0], xlabel=f"rank ({RANKS + 1}: that or more)")
        _histogram(right, halves, titles[1], label)

    return _page(draw)


def _histogram(axes: Any, halves: Mapping[str, Sequence[float]], title: str, label: str) -> None:
    axes.hist(list(halves.values()), bins=20, color=[BLUE, ORANGE], label=list(halves))
    axes.set(title=title, xlabel=label)
    axes.legend()


def transcripts(rows: Rows) -> dict[str, bytes]:
    """Return transcripts.png of `seconds`, `wer`: errors over the length of the sound, and their distribution."""
    # A row whose truth has no word left to measure has no rate.
    seconds, rates = zip(*((float(row["seconds"]), float(row["wer"])) for row in rows if "wer" in row), strict=True)

    def draw(left: Any, right: Any) -> None:
        left.scatter(seconds, rates, s=10, color=BLUE, alpha=0.4, linewidths=0)
        left.set(title="Word error rate over the length", xlabel="seconds", ylabel="word error rate", ylim=(0, None))
        right.hist([min(rate, 1.0) for rate in rates], bins=20, range=(0, 1), color=ORANGE)
        right.set(title="Rows by their word error rate", xlabel="word error rate (1: as many or more)")

    return {"transcripts.png": _page(draw)}


def spread(count: int) -> list[int]:
    """Return which of `count` rows a picture shows: a few, at equal distances."""
    return list(range(0, count, -(-count // SCENES) or 1))


def boxes(scenes: Sequence[Scene]) -> dict[str, bytes]:
    """Return boxes.png: each image with its true boxes, and below with the predicted ones.

    A box is its class, the words beside it, and left, upper, width and height in pixels.
    """
    from matplotlib.patches import Rectangle

    def paint(axes: Any, found: Any, colours: Mapping[str, Any]) -> None:
        for name, words, left, upper, width, height in found:
            axes.add_patch(Rectangle((left, upper), width, height, fill=False, color=colours[name], lw=2))
            back = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5} if words else None
            axes.text(left, upper, words, color=colours[name], fontsize=8, clip_on=True, bbox=back)

    names = dict.fromkeys(name for _, *both in scenes for found in both for name, *_ in found)
    return {"boxes.png": _scenes(scenes, list(names), paint)}


def masks(scenes: Sequence[Scene], names: Sequence[str]) -> dict[str, bytes]:
    """Return masks.png: each image under its true mask, and below under the predicted one.

    A mask is an array (height, width) of numbers of classes; a number that `names` does not have is left clear.
    """
    import numpy

    def paint(axes: Any, mask: Any, colours: Mapping[str, Any]) -> None:
        from matplotlib.colors import to_rgba

        shown = numpy.zeros((*mask.shape, 4))
        for name, colour in colours.items():
            shown[mask == names.index(name)] = to_rgba(colour, 0.6)
        axes.imshow(shown, extent=(0, mask.shape[1], mask.shape[0], 0))

    there = {int(number) for _, *both in scenes for mask in both for number in numpy.unique(mask)}
    return {"masks.png": _scenes(scenes, [name for number, name in enumerate(names) if number in there], paint)}


def grid(drawn: Sequence[tuple[str, bytes]]) -> dict[str, bytes]:
    """Return generated.png: the PNGs of `drawn` side by side, each below its prompt."""
    from PIL import Image

    across = min(len(drawn), SCENES)
    down = -(-len(drawn) // across)

    def draw(figure: Any) -> None:
        for at, axes in enumerate(figure.subplots(down, across, squeeze=False).flat):
            axes.set_axis_off()
            if at < len(drawn):
                prompt, picture = drawn[at]
                axes.imshow(Image.open(io.BytesIO(picture)))
                axes.set_title(brief(prompt), fontsize=8, wrap=True)

    return {"generated.png": png((3 * across, 3.3 * down), draw, layout="constrained")}


def encoded(image: Any) -> bytes:
    """Return the PNG of a PIL image."""
    written = io.BytesIO()
    image.save(written, format="PNG")
    return written.getvalue()


def _scenes(scenes: Sequence[Scene], names: Sequence[str], paint: Paint) -> bytes:
    """Return a page of images side by side with their truths, which `paint` draws, and below with the answers.

    The legend has a colour for each of the classes `names`.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Patch
    from rich.cells import cell_len

    many = len(names) > len(PALETTE)
    wheel = [colormaps["turbo"](at / len(names)) for at in range(len(names))] if many else PALETTE
    colours = dict(zip(names, wheel, strict=False))
    labels = [_short(name) for name in names]
    # In inches: a colour with the space around it, and a letter, of which Chinese ones take two.
    width, entry = 3 * len(scenes), 0.6 + 0.08 * max(map(cell_len, labels), default=0)
    across = max(1, min(6, int(width / entry)))

    def draw(figure: Any) -> None:
        panels = figure.subplots(2, len(scenes), squeeze=False)
        for row, what in enumerate(("truth", "prediction")):
            panels[row][0].set_ylabel(what)
            for axes, (image, *both) in zip(panels[row], scenes, strict=True):
                paint(axes, both[row], colours)
                axes.imshow(image, extent=(0, image.width, image.height, 0), zorder=-1)
                axes.set(xticks=[], yticks=[])
                axes.grid(visible=False)
        shown = [Patch(color=colour, label=label) for label, colour in zip(labels, colours.values(), strict=True)]
        figure.legend(handles=shown, loc="outside lower center", ncols=across)

    tallest = max(image.height / image.width for image, *_ in scenes)
    return png((width, 6 * min(tallest, 2) + 0.6 + 0.2 * (len(names) // across)), draw, layout="constrained")


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


# More classes than this are too many to read: those with the most mistakes are shown.
SHOWN = 24
# Up to so many classes each cell shows its number.
NUMBERED = 16
LONGEST_NAME = 24


def confusion(rows: Rows, names: Sequence[str], of: str = "rows") -> dict[str, bytes]:
    """Return confusion_matrix.png of `label` and `prediction` over the classes `names` in their order; each is one of
    `of`.

    A cell shows the number of rows, its shade the share of its row's truth. Beyond SHOWN classes only those with the
    most mistakes are shown, and the title says so.
    """
    counts = Counter((row["label"], row["prediction"]) for row in rows)
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


def by_label(rows: Rows, names: Sequence[str]) -> dict[str, bytes]:
    """Return labels.png of `label` and `prediction`, each several: F1 of each label, with how many rows have it.

    Beyond SHOWN labels only the most frequent are shown, and the title says so.
    """
    true, said, right = Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        true.update(row["label"])
        said.update(row["prediction"])
        right.update(set(row["label"]) & set(row["prediction"]))
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


def scatter(rows: Rows) -> dict[str, bytes]:
    """Return values.png: each `prediction` over its `label`, with the line of equality."""
    truths, answers = ([row[name] for row in rows] for name in ("label", "prediction"))

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
    # Long names often begin alike.
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}…{name[1 - half :]}"
