"""training.png: loss, evaluation metrics, learning rate, throughput and memory over the steps, on one page."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

from hf_mps.core.extras import unheard
from hf_mps.core.notices import ignoring
from hf_mps.core.text import GIB, MIB, duration, memory
from hf_mps.finetune.report.results import SPLIT, RunRecord
from hf_mps.metal.device.machine import SIMULATED
from hf_mps.metrics.selection import of_log

# Okabe and Ito's palette, distinguishable with any common colour blindness: https://jfly.uni-koeln.de/color/
BLUE, ORANGE, GREEN, PURPLE, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
INK, QUIET, GRID = "#1f2328", "#656d76", "#e4e7eb"
STYLE = {
    **{"font.size": 10, "text.color": INK, "grid.color": GRID, "lines.solid_capstyle": "round"},
    **{"axes.edgecolor": "#afb8c1", "axes.labelcolor": QUIET, "axes.labelsize": 9, "axes.titlesize": 11},
    **{"axes.titleweight": "bold", "axes.titlelocation": "left", "axes.grid": True, "axes.axisbelow": True},
    "text.parse_math": False,  # a pair of dollars in a name is no formula
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("xtick.color", "ytick.color"), QUIET),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 9),
}
# Where the first, matplotlib's own, lacks a letter: that of macOS with all scripts, and those of Linux.
SCRIPTS = ("CJK SC", "CJK JP", "Thai", "Devanagari", "Bengali", "Tamil", "Telugu", "Gujarati", "Kannada", "Malayalam")
FONTS = ("DejaVu Sans", "Arial Unicode MS", *(f"Noto Sans {script}" for script in SCRIPTS))
SMOOTHED_FROM = 12  # fewer points need no line to guide the eye

Series = tuple[list[float], list[float]]
Panel = tuple[str, str, str, list[tuple[str, Series]]]
"""Title, unit, colour, and the series by name."""


def draw(record: RunRecord) -> bytes:
    """Return the run's picture as PNG bytes, 1650 pixels wide; panels of what was not logged are left out."""
    small = _small_panels(record)

    def paint(figure: Any) -> None:
        _draw_panels(figure, record, small)
        _head(figure, record)

    return png((11, 7 if small else 4.9), paint)


def png(inches: tuple[float, float], paint: Callable[[Any], None], **settings: Any) -> bytes:
    """Return a page in this project's style as PNG bytes, 150 pixels to the inch; `paint` draws on its empty Figure."""
    from matplotlib import font_manager, style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A user's matplotlibrc must not change the page; Figure (not pyplot) leaves their session alone.
    # matplotlib warns once for each letter that the fonts lack, and at each text of a font that is not there.
    installed = {font.name for font in font_manager.fontManager.ttflist}
    fonts = {"font.family": [font for font in FONTS if font in installed]}
    # A font without bold letters, as that of macOS is, is told of where a title is bold.
    with ignoring(), unheard("matplotlib.font_manager"), style.context(["default", STYLE, fonts]):
        figure = Figure(figsize=inches, dpi=150, facecolor="white", **settings)
        FigureCanvasAgg(figure)
        paint(figure)
        return _rendered(figure)


def _rendered(figure: Any) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()


def _draw_panels(figure: Any, record: RunRecord, small: list[Panel]) -> None:
    height = figure.get_figheight()
    sides = {"left": 0.065, "right": 0.975, "top": 1 - 1.12 / height, "bottom": 0.52 / height}
    rows = figure.add_gridspec(1 + bool(small), 1, height_ratios=(1.9, 1)[: 1 + bool(small)], hspace=0.38, **sides)
    loss, metric = (figure.add_subplot(cell) for cell in rows[0].subgridspec(1, 2, wspace=0.17))
    _draw_loss(loss, record.log_history)
    _draw_metrics(metric, record)
    if small:
        cells = rows[1].subgridspec(1, len(small), wspace=0.26)
        for index, panel in enumerate(small):
            _draw_small(figure.add_subplot(cells[index]), *panel)
    for axes in figure.axes:
        _finish(axes, record.log_history)


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Return the bias-corrected exponential moving average: s_t = sum w^(t-i) x_i / sum w^(t-i), i <= t.

    A value that is not finite leaves the average where it was.
    """
    total = mass = 0.0
    average: list[float] = []
    for value in values:
        if math.isfinite(value):
            total, mass = total * weight + value, mass * weight + 1
        average.append(total / mass if mass else math.nan)
    return average


def column(history: Sequence[dict[str, Any]], name: str) -> Series:
    """Return the steps and values of one key of the Trainer's log_history; the last value of a step counts."""
    found: dict[float, float] = {}
    for entry in history:
        value = entry.get(name)
        if isinstance(value, (int, float)) and isinstance(entry.get("step"), (int, float)):
            found[float(entry["step"])] = float(value)
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def _draw_loss(axes: Any, history: Sequence[dict[str, Any]]) -> None:
    axes.set_title("Loss")
    axes.set_ylabel("loss")
    steps, values = column(history, "loss")
    many = len(steps) >= SMOOTHED_FROM
    marker = {} if many else {"marker": "o", "markersize": 3.5}
    faint = {"alpha": 0.35, "linewidth": 1.0} if many else {"linewidth": 1.8, "label": "training"}
    axes.plot(steps, values, color=BLUE, **faint, **marker)
    if many:
        weight = 1 - 1 / max(4.0, len(steps) / 20)
        axes.plot(steps, smoothed(values, weight), color=BLUE, linewidth=2.0, label="training (smoothed)")
    eval_steps, eval_values = column(history, "eval_loss")
    axes.plot(eval_steps, eval_values, color=ORANGE, marker="D", markersize=5, linewidth=1.5, label="evaluation")
    lost = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    if lost:
        axes.plot(lost, [0.02] * len(lost), "x", color=RED, transform=axes.get_xaxis_transform(), label="not finite")
    _legend(axes, lines=bool(steps) + bool(eval_steps) + bool(lost))
    if not steps and not eval_steps:
        _nothing(axes, "no loss was logged")


def _draw_metrics(axes: Any, record: RunRecord) -> None:
    axes.set_title(f"Evaluation ({SPLIT})")
    drawn = [name for name in _comparable(record) if _draw_metric(axes, record, name)]
    if not drawn:
        _nothing(axes, "no evaluation was logged")
        return
    axes.set_ylabel("score" if len(drawn) > 1 else drawn[0])
    base = record.baseline.metrics.get(record.main_metric, math.nan) if record.baseline else math.nan
    if math.isfinite(base):
        label = f"{record.main_metric} of the baseline"
        axes.axhline(base, color=QUIET, linewidth=1.2, linestyle=(0, (4, 3)), label=label)
    axes.margins(y=0.14)
    _legend(axes, lines=2)


def _comparable(record: RunRecord) -> list[str]:
    """Return the metrics for one axis: the main one first, and those that share its unit (all within [-1, 1])."""
    names = {name: None for entry in record.log_history for name in of_log(entry)}
    others = [name for name in names if name not in ("loss", record.main_metric)]

    def within(name: str) -> bool:
        _, values = column(record.log_history, f"eval_{name}")
        return all(abs(value) <= 1 for value in [*values, record.metrics.get(name, 0.0)])

    return [record.main_metric, *(name for name in others if within(record.main_metric) and within(name))][:4]


def _draw_metric(axes: Any, record: RunRecord, name: str) -> bool:
    main = name == record.main_metric
    steps, values = column(record.log_history, f"eval_{name}")
    if not steps and main and name in record.metrics:
        steps, values = [_last_step(record.log_history)], [record.metrics[name]]
    pairs = [(value, step) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if not pairs:
        return False
    colour = GREEN if main else (PURPLE, SKY, ORANGE)[len(axes.lines) % 3]
    look = {"linewidth": 2.2, "markersize": 6} if main else {"linewidth": 1.4, "markersize": 4, "linestyle": "--"}
    axes.plot(steps, values, color=colour, marker="o" if main else "s", label=name, **look)
    if main:
        above = record.greater_is_better
        best, step = max(pairs) if above else min(pairs)
        share = step / _last_step(record.log_history)
        across, down = "right" if share > 0.9 else "left" if share < 0.1 else "center", "bottom" if above else "top"
        where = {"xytext": (0, 10 if above else -10), "textcoords": "offset points", "ha": across, "va": down}
        axes.annotate(f"best {best:.4f}", (step, best), color=colour, fontweight="bold", **where)
    return True


def _small_panels(record: RunRecord) -> list[Panel]:
    """Draw the small panels that have data, left to right; speed and memory of a simulated device are marked."""
    history, label = record.log_history, _label(record)
    rate = column(history, "learning_rate")
    exponent = math.floor(math.log10(max(map(abs, rate[1]), default=0.0) or 1.0))
    memories = [("now", column(history, "memory_bytes")), ("peak", column(history, "peak_memory_bytes"))]
    most = max((value for _, (_, values) in memories for value in values), default=0.0)
    unit, size = ("GiB", GIB) if most >= GIB / 10 else ("MiB", MIB)
    panels: list[Panel] = [
        ("Learning rate", rf"$\times\,10^{{{exponent}}}$", PURPLE, [("", _scaled(rate, 10.0**-exponent))]),
        ("Gradient norm", "L2 norm", BLUE, [("", column(history, "grad_norm"))]),
        (f"Throughput{label}", "samples / s", GREEN, [("", column(history, "samples_per_second"))]),
        (f"Memory{label}", unit, RED, [(name, _scaled(series, 1 / size)) for name, series in memories]),
    ]
    found = ((title, unit, colour, [pair for pair in series if pair[1][0]]) for title, unit, colour, series in panels)
    return [panel for panel in found if panel[3]]


def _scaled(series: Series, factor: float) -> Series:
    return series[0], [value * factor for value in series[1]]


def _draw_small(axes: Any, title: str, unit: str, colour: str, columns: list[tuple[str, Series]]) -> None:
    axes.set_title(title, fontsize=10)
    # The learning rate's unit is a formula, the only one of a page (STYLE).
    axes.set_ylabel(unit, parse_math=True)
    for index, (label, (steps, values)) in enumerate(columns):
        marker = {"marker": "o", "markersize": 3} if len(steps) < SMOOTHED_FROM else {}
        axes.plot(steps, values, color=colour, linewidth=1.6, linestyle=("-", ":")[index], label=label, **marker)
    # From zero and with space above: a level line would otherwise lie on the panel's edge.
    top = max((value for _, (_, values) in columns for value in values if math.isfinite(value)), default=0)
    axes.set_ylim(0, top * 1.15 if top > 0 else 1)
    if len(columns) > 1:
        _legend(axes, lines=2)


def _finish(axes: Any, history: Sequence[dict[str, Any]]) -> None:
    """Draw the step axis: whole numbers from 0 to the last step, and epochs as faint lines where they are few."""
    from matplotlib.ticker import MaxNLocator

    last = _last_step(history)
    axes.set_xlim(0, last * 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("training step")
    axes.grid(axis="x", visible=False)
    epochs = max((float(entry["epoch"]) for entry in history if entry.get("epoch") is not None), default=0.0)
    if 1 < epochs <= 12:
        for epoch in range(1, math.ceil(epochs)):
            axes.axvline(epoch * last / epochs, color=GRID, linewidth=1.0, zorder=0)
        if axes.get_title(loc="left") == "Loss":
            axes.set_xlabel("training step, a line at each epoch's end")


def _last_step(history: Sequence[dict[str, Any]]) -> float:
    return max((float(entry["step"]) for entry in history if "step" in entry), default=1.0) or 1.0


def _head(figure: Any, record: RunRecord) -> None:
    score = record.metrics.get(record.main_metric)
    result = f":  {record.main_metric} {score:.4f}" if score is not None else ""
    inch = 1 / figure.get_figheight()
    figure.text(0.065, 1 - 0.385 * inch, f"{record.name}{result}", fontsize=16, fontweight="bold")
    device, speed = f"on {record.device.value}{_label(record)}", f"{record.samples_per_second:.1f} samples/s"
    peak = f"{memory(record.peak_memory)} at peak"
    facts = "   ·   ".join((record.model_words, device, duration(record.train_seconds), speed, peak))
    figure.text(0.065, 1 - 0.65 * inch, facts, fontsize=10, color=QUIET)


def _label(record: RunRecord) -> str:
    return SIMULATED if record.simulated else ""


def _legend(axes: Any, *, lines: int) -> None:
    if lines > 1:
        axes.legend(loc="best", handlelength=1.8, borderaxespad=0.2)


def _nothing(axes: Any, words: str) -> None:
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=QUIET)
    axes.set_yticks([])
