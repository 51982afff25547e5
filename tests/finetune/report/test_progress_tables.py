"""What stands above a run and below it: the header with its reasons, and the closing table."""

from __future__ import annotations

from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from hf_mps.finetune.report import Baseline, Expectation
from hf_mps.finetune.report.screen import final_table, header
from tests.finetune.records import a_record
from tests.finetune.terminals import Piped, Terminal

HEADER = [
    ("model", "google-bert/bert-base-cased", "the recipe's"),
    ("data [1]", Path("my.csv"), ""),
    ("device", "mps", "Metal answered the probe:\nan allocation and a matrix product came back right"),
    ("steps", 345, "3 epochs of 115"),
]


def test_the_header_is_plain_aligned_lines_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    header(HEADER, title="finetune glue/mrpc")
    assert capsys.readouterr().out == snapshot(
        "finetune glue/mrpc\n"
        "  model     google-bert/bert-base-cased  the recipe's\n"
        "  data [1]  my.csv\n"
        "  device    mps                          Metal answered the probe: an allocation and a matrix product came back right\n"  # noqa: E501
        "  steps     345                          3 epochs of 115\n"
    )


def test_a_very_long_value_pushes_its_own_line_only() -> None:
    out = Piped()
    with redirect_stdout(out):
        header([("model", "m" * 60, "given"), ("device", "mps", "probed")], title="hf_mps")
    assert out.lines() == ["hf_mps", f"  model   {'m' * 60}  given", "  device  mps  probed"]


def test_a_brief_header_has_a_line_of_80_columns_for_each_row(terminal: Terminal) -> None:
    out, rows = Piped(), [*HEADER, ("output", "runs/" + "x" * 90, "the recipe says so")]
    with redirect_stdout(out):
        header(rows, title="run", brief=True)
    assert out.lines() == snapshot(
        [
            "run",
            "  model     google-bert/bert-base-cased  the recipe's",
            "  data [1]  my.csv",
            "  device    mps  Metal answered the probe: an allocation and a matrix product…",
            "  steps     345  3 epochs of 115",
            "  output    runs/xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…",
        ]
    )
    with redirect_stdout(terminal):
        header(rows, title="run", brief=True)
    assert len(terminal.lines()) == len(rows) + 3  # the box, and what follows its last line
    assert "data [1]" in "".join(terminal.lines())  # which is no markup of rich


def test_on_a_narrow_terminal_each_reason_follows_its_value(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "44")
    with redirect_stdout(terminal):
        header(HEADER[2:], title="run")
    assert terminal.lines() == snapshot(
        [
            "╭─ run ────────────────────────────────────╮",
            "│ device  mps  Metal answered the probe:   │",
            "│         an allocation and a matrix       │",
            "│         product came back right          │",
            "│ steps   345  3 epochs of 115             │",
            "╰──────────────────────────────────────────╯",
            "",
        ]
    )


BASELINE = Baseline("always answers 1, the label of 67.4% of the training rows", {"f1": 0.8122, "accuracy": 0.6838})
FILES = [Path("out"), Path("out/results.json"), Path("out/training.png")]


def ended(expectation: Expectation, **metrics: float) -> Any:
    """What the table reads of a run's record."""
    return a_record(metrics=metrics, baseline=BASELINE, expectation=expectation, peak_memory=2_085_000_000)


def test_the_closing_table_holds_metrics_against_the_baseline_cost_and_files() -> None:
    out = Piped()
    met = Expectation("f1", 0.85, None, True)
    with redirect_stdout(out):
        final_table(ended(met, f1=0.8821, accuracy=0.8431, loss=0.41), (), FILES, ["hf-mps evaluate out"])
    assert out.lines() == snapshot(
        [
            "metric    this run  baseline",
            "f1          0.8821    0.8122",
            "accuracy    0.8431    0.6838",
            "loss        0.4100",
            "baseline  always answers 1, the label of 67.4% of the training rows",
            "verdict   f1 is better than the baseline's",
            "expected  f1 at least 0.85: met",
            "training  3 min 12 s, 57.2 samples/s, 1.94 GiB at peak",
            "model     out, with results.json, training.png",
            "next      hf-mps evaluate out",
        ]
    )


def test_the_closing_table_is_drawn_on_a_terminal_and_a_missed_expectation_is_red(terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        final_table(ended(Expectation("f1", 0.9, 0.95, False), f1=0.8821), files=FILES)
    assert terminal.lines()[:6] == snapshot(
        [
            "╭────────┬──────────┬──────────╮",
            "│ metric │ this run │ baseline │",
            "├────────┼──────────┼──────────┤",
            "│ f1     │   0.8821 │   0.8122 │",
            "╰────────┴──────────┴──────────╯",
            "baseline  always answers 1, the label of 67.4% of the training rows",
        ]
    )
    assert "\x1b[1;31mf1 at least 0.9 and at most 0.95: missed" in terminal.getvalue()
