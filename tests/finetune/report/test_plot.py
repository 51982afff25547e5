"""A run's picture: a panel for each thing that was logged, whole, and the same bytes for the same run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
import numpy
import pytest
from matplotlib import image, pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_mps.finetune.report import RunRecord
from hf_mps.finetune.report.plot import FONTS, column, draw, png, smoothed
from hf_mps.metrics import Baseline
from tests.finetune.records import a_record

pytestmark = pytest.mark.usefixtures("rendered")


def picture(png: bytes) -> Any:
    """The pixels as floats in [0, 1], of shape (height, width, 4)."""
    assert png.startswith(b"\x89PNG\r\n")
    return image.imread(io.BytesIO(png), format="png")


def panel_titles(monkeypatch: pytest.MonkeyPatch, record: RunRecord) -> list[str]:
    titles: list[str] = []
    set_title = Axes.set_title
    monkeypatch.setattr(
        Axes, "set_title", lambda self, words, **k: (titles.append(words), set_title(self, words, **k))[1]
    )
    draw(record)
    return titles


def test_the_picture_is_a_page_of_ink_in_colours_told_apart_by_all() -> None:
    page = picture(draw(a_record()))
    assert page.shape == (1050, 1650, 4)
    colours = (page[..., :3] * 255).round().astype(int).reshape(-1, 3)
    assert 0.01 < (colours < 250).any(axis=1).mean() < 0.5

    def inked(colour: str) -> int:
        wanted = numpy.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
        return int((abs(colours - wanted).max(axis=1) <= 2).sum())

    for name, colour in {"loss": "#0072B2", "evaluation": "#E69F00", "metric": "#009E73", "rate": "#CC79A7"}.items():
        assert inked(colour) > 200, name


def test_nothing_is_cut_off_at_the_pages_edge() -> None:
    page = picture(draw(a_record()))[..., :3]
    edges = (page[:4], page[-4:], page[:, :4], page[:, -4:])
    assert all((edge > 0.99).all() for edge in edges)


def test_a_picture_of_a_simulated_run_says_so_beside_the_device_the_throughput_and_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[str] = []
    text = Figure.text
    monkeypatch.setattr(
        Figure, "text", lambda self, x, y, words, **k: (written.append(words), text(self, x, y, words, **k))[1]
    )
    assert panel_titles(monkeypatch, a_record(simulated=True))[-2:] == ["Throughput (simulated)", "Memory (simulated)"]
    assert "   ·   on mps (simulated)   ·   3 min 12 s" in written[1]
    written.clear()
    draw(a_record())
    assert "   ·   on mps   ·   3 min 12 s" in written[1]


def test_each_thing_that_was_logged_has_its_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert panel_titles(monkeypatch, a_record()) == [
        "Loss", "Evaluation (validation)", "Learning rate", "Gradient norm", "Throughput", "Memory",
    ]  # fmt: skip


def test_a_run_that_logged_less_has_fewer_panels_and_a_lower_page(monkeypatch: pytest.MonkeyPatch) -> None:
    little = a_record(log_history=[{"loss": 0.5, "learning_rate": 1e-3, "step": 1}])
    assert panel_titles(monkeypatch, little) == ["Loss", "Evaluation (validation)", "Learning rate"]
    assert picture(draw(a_record(log_history=[]))).shape == (735, 1650, 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"log_history": [{"loss": float("nan"), "step": step, "learning_rate": 0.0} for step in range(1, 30)]},
        {"log_history": [{"eval_mse": 3.0 - step, "step": step} for step in (1, 2)], "main_metric": "mse"},
        {"name": "a $x$ of 名", "model": "/a/$b$", "dataset_name": "$", "metrics": {}},
        {"metrics": {"f1": float("nan")}, "log_history": [{"eval_f1": float("nan"), "step": 3}]},
        {"baseline": Baseline("x", {"f1": float("nan")})},
    ],
    ids=["all NaN", "an error to lower", "dollars and other letters", "NaN score", "NaN baseline"],
)
def test_odd_runs_are_drawn_too(changes: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    page = picture(draw(a_record(**changes)))
    assert (page[..., :3] < 0.9).any()
    assert not recwarn.list


def test_the_same_run_draws_the_same_bytes() -> None:
    assert draw(a_record()) == draw(a_record())


def test_a_letter_that_matplotlibs_font_lacks_is_drawn_by_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system's font is macOS's, which has no bold letters: matplotlib would tell of that at each bold title."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen
    from matplotlib import font_manager

    def page() -> bytes:
        return png((2, 1), lambda figure: figure.text(0.2, 0.2, "\u5b57", fontsize=40, fontweight="bold"))

    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for corner in ((0, 900), (900, 900), (900, 0)):
        pen.lineTo(corner)
    pen.closePath()
    made = FontBuilder(1000, isTTF=True)
    made.setupGlyphOrder([".notdef", "full"])
    made.setupCharacterMap({0x5B57: "full"})
    made.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "full": pen.glyph()})
    made.setupHorizontalMetrics({".notdef": (500, 0), "full": (1000, 0)})
    made.setupHorizontalHeader(ascent=900, descent=-100)
    made.setupNameTable({"familyName": FONTS[1], "styleName": "Regular"})
    made.setupOS2()
    made.setupPost()
    made.save(tmp_path / "own.ttf")
    before = picture(page())
    fonts = font_manager.fontManager
    monkeypatch.setattr(fonts, "ttflist", list(fonts.ttflist))
    fonts.addfont(tmp_path / "own.ttf")
    dark = [(one[..., :3] < 0.5).mean() for one in (before, picture(page()))]
    assert not caplog.records
    assert dark[1] > 2 * dark[0]  # a full square, where matplotlib draws the frame of a letter that it lacks


def test_drawing_leaves_the_users_matplotlib_as_it_was() -> None:
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30}):
        before = dict(matplotlib.rcParams)
        page = picture(draw(a_record()))
        assert dict(matplotlib.rcParams) == before
    assert not ((page[..., 0] > 0.9) & (page[..., 1] < 0.1)).any()
    assert pyplot.get_fignums() == []


def test_smoothing_starts_without_a_pull_and_follows_its_formula() -> None:
    values = [3.0, 1.0, 2.0, float("nan"), 5.0]
    weights = [0.5 ** (2 - i) for i in range(3)]
    expected = sum(w * x for w, x in zip(weights, values, strict=False)) / sum(weights)
    found = smoothed(values, 0.5)
    assert found[0] == 3.0
    assert found[2] == found[3] == pytest.approx(expected)
    assert smoothed([2.0] * 50, 0.9) == pytest.approx([2.0] * 50)


def test_a_step_that_was_logged_twice_after_a_resume_counts_once() -> None:
    entries = [{"loss": 1.0, "step": 1}, {"loss": 2.0, "step": 2}, {"loss": 3.0, "step": 2}, {"loss": None, "step": 3}]
    assert column(entries, "loss") == ([1.0, 2.0], [1.0, 3.0])
