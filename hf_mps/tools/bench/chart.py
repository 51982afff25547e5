"""bench.png: a pair of bars for each network, training and evaluation, as the device's speed over the CPU's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_mps.core.text import counted
from hf_mps.finetune.report.plot import BLUE, INK, ORANGE, QUIET, png
from hf_mps.metal.device import simulated
from hf_mps.tools.bench.cases import EVALUATION, TRAINING

if TYPE_CHECKING:
    from hf_mps.tools.bench.outcome import Outcome

COLOURS = {TRAINING: BLUE, EVALUATION: ORANGE}
HATCH = "///"
"""On the bars of a simulated device: the picture says so where its title was cut off, too."""
WIDTH = 0.38


def draw(outcome: Outcome) -> bytes:
    """Return the picture as PNG bytes; the bars of a machine without a GPU are rows per second."""

    def paint(figure: Any) -> None:
        axes = figure.add_axes((0.1, 0.14, 0.86, 0.62))
        look = {"hatch": HATCH, "edgecolor": "white"} if simulated(outcome.device) else {}
        heights = bars(outcome)
        for place, phases in enumerate(heights.values()):
            for side, (phase, colour) in zip((-0.5, 0.5), COLOURS.items(), strict=True):
                height, middle = phases.get(phase), place + side * WIDTH
                label = {"label": phase} if place == 0 else {}
                axes.bar(middle, height or 0, WIDTH * 0.94, color=colour, **look, **label)
                words = "no figure" if height is None else f"{height:.2f}" if height < 100 else f"{height:.0f}"
                axes.annotate(words, (middle, height or 0), (0, 3), textcoords="offset points", ha="center", color=INK)
        sizes = {row["network"]: f"batch {row['batch']}, {row['row']}" for row in outcome.rows}
        axes.set_xticks(range(len(heights)), [f"{name}\n{size}" for name, size in sizes.items()])
        axes.set_xlim(-0.6, len(heights) - 0.4)
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.15)
        axes.legend(loc="upper right", ncols=2, bbox_to_anchor=(1, 1.13), borderaxespad=0)
        chip = outcome.facts["chip"].value
        if outcome.device == "cpu":
            title, unit = f"Rows per second on {chip}", "rows per second"
        else:
            title, unit = f"{outcome.label} over the CPU", "times the CPU's rows per second"
            axes.axhline(1, color=QUIET, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_ylabel(unit)
        # In the title, not below it: a picture is cut and passed on.
        warning = ": not a Mac's speed" if simulated(outcome.device) else ""
        quick = "quick: small batches" if outcome.asked.quick else ""
        repetitions = counted(outcome.asked.settings.repetitions, "repetition")
        facts = "   ·   ".join(filter(None, (chip, outcome.facts["versions"].value, repetitions, quick)))
        figure.text(0.1, 0.925, title + warning, fontsize=15, fontweight="bold", parse_math=False)
        figure.text(0.1, 0.86, facts, fontsize=10, color=QUIET, parse_math=False)

    return png((8, 5), paint)


def bars(outcome: Outcome) -> dict[str, dict[str, float | None]]:
    """Return the height of each bar by network and phase; None where there is no figure."""
    heights: dict[str, dict[str, float | None]] = {}
    for row in outcome.rows:
        found = row["devices"][outcome.device].get("rows_per_second")
        height = found if outcome.device == "cpu" else outcome.speedup(row)
        heights.setdefault(row["network"], {})[row["phase"]] = height
    return heights
