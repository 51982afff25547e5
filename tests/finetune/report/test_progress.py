"""What a person reads while a run goes on: exact lines where output is piped, a bar and boxes on a terminal."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments

from hf_mps.finetune.report.screen import final_table, header
from hf_mps.finetune.report.step_lines import StepLines
from tests.finetune.records import a_record
from tests.finetune.terminals import Piped, Terminal

GIB = 2**30


class Run:
    """A Trainer's side of the callback: arguments, state and a clock that only the test moves. 10 s a step."""

    def __init__(self, stream: io.StringIO, *, total: int = 345, **keywords: Any) -> None:
        self.now = 0.0
        self.args = SimpleNamespace(train_batch_size=32, gradient_accumulation_steps=2, world_size=1)
        self.state = SimpleNamespace(global_step=0, max_steps=total, is_world_process_zero=True, log_history=[])
        self.lines = StepLines(stream=stream, clock=lambda: self.now, **keywords)

    def begin(self, step: int = 0) -> Run:
        self.state.global_step = step
        self.lines.on_train_begin(self.args, self.state, None)
        return self

    def steps(self, count: int) -> Run:
        for _ in range(count):
            self.now += 10
            self.state.global_step += 1
            self.lines.on_step_end(self.args, self.state, None)
        return self

    def log(self, **logs: Any) -> Run:
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.lines.on_log(self.args, self.state, None, logs=logs)
        return self

    def evaluate(self, seconds: float, **logs: Any) -> Run:
        self.now += seconds
        self.log(**logs, eval_runtime=seconds, eval_samples_per_second=9.0, eval_steps_per_second=1.0)
        self.lines.on_evaluate(self.args, self.state, None)
        return self


def test_each_logging_step_is_one_aligned_line() -> None:
    out = Piped()
    run = Run(out, memory=lambda: (int(1.25 * GIB), 2 * GIB)).begin()
    run.steps(5).log(loss=0.6931, grad_norm=3.214, learning_rate=1.97e-5, epoch=0.0434)
    run.steps(5).log(loss=0.6402, grad_norm=12.5, learning_rate=1.94e-5, epoch=0.087)
    run.steps(90).log(loss=0.7, grad_norm=123456.0, learning_rate=1.4e-5, epoch=0.87)
    run.steps(5).log(loss=0.7, grad_norm=float("nan"), learning_rate=0.0, epoch=0.913)
    assert out.lines() == snapshot(
        [
            "step   5/345  epoch  0.04  loss  0.6931    lr 1.97e-05  grad    3.21     6.4 samples/s  1.25/2.00 GiB  eta 56:40",  # noqa: E501
            "step  10/345  epoch  0.09  loss  0.6402 ▼  lr 1.94e-05  grad   12.50     6.4 samples/s  1.25/2.00 GiB  eta 55:50",  # noqa: E501
            "step 100/345  epoch  0.87  loss  0.7000 ▲  lr 1.40e-05  grad 1.2e+05     6.4 samples/s  1.25/2.00 GiB  eta 40:50",  # noqa: E501
            "step 105/345  epoch  0.91  loss  0.7000 =  lr 0.00e+00  grad     nan     6.4 samples/s  1.25/2.00 GiB  eta 40:00",  # noqa: E501
        ]
    )


def test_a_loss_that_rounds_to_zero_has_no_sign() -> None:
    Run(out := Piped()).begin().steps(5).log(loss=-1e-9, epoch=0.1)
    assert "loss  0.0000 " in out.lines()[0]


def test_an_evaluation_is_a_line_with_its_metrics_and_without_trainers_timings() -> None:
    out = Piped()
    run = Run(out, main_metric="f1").begin().steps(115)
    run.evaluate(12.34, eval_f1=0.8122, eval_accuracy=0.6838, eval_loss=0.61, epoch=1.0)
    run.steps(115).evaluate(9.0, eval_f1=0.85, eval_accuracy=0.7, eval_loss=0.5, epoch=2.0)
    run.steps(115).evaluate(9.0, eval_f1=0.84, eval_accuracy=0.71, eval_loss=0.52, epoch=3.0)
    assert out.lines() == snapshot(
        [
            "eval 115/345  epoch  1.00  loss  0.6100    f1 0.8122    accuracy 0.6838  12.3 s",
            "eval 230/345  epoch  2.00  loss  0.5000 ▼  f1 0.8500 ▲  accuracy 0.7000  9.0 s",
            "eval 345/345  epoch  3.00  loss  0.5200 ▲  f1 0.8400 ▼  accuracy 0.7100  9.0 s",
        ]
    )


def test_a_tagger_with_measures_for_every_class_gets_a_line_that_can_be_read() -> None:
    out = Piped()
    of_classes = {f"eval_{tag}_{what}": 0.5 for tag in ("LOC", "MISC", "ORG", "PER") for what in ("f1", "recall")}
    run = Run(out, main_metric="overall_f1").begin().steps(115)
    run.evaluate(1.0, eval_overall_recall=0.8, **of_classes, eval_overall_f1=0.9, eval_loss=0.61, epoch=1.0)
    [line] = out.lines()
    assert len(line) <= 160
    # The measure that the run is judged by comes first, and those of single classes are what is left to the table.
    assert line.startswith("eval 115/345  epoch  1.00  loss  0.6100    overall_f1 0.9000    overall_recall 0.8000")
    assert "PER_recall" not in line


def test_what_a_run_does_not_report_leaves_no_hole() -> None:
    out = Piped()
    Run(out, total=9).begin().steps(1).log(loss=1.5)
    Run(out, total=9, memory=lambda: (3 * GIB // 2, 2 * GIB)).begin().steps(1).log(loss=float("nan"), epoch=1)
    Run(out, total=0).evaluate(1.0, eval_loss=0.5)
    assert out.lines() == snapshot(
        [
            "step 1/9  loss  1.5000       6.4 samples/s  eta 1:20",
            "step 1/9  epoch  1.00  loss     nan       6.4 samples/s  1.50/2.00 GiB  eta 1:20",
            "eval  loss  0.5000    1.0 s",
        ]
    )


def test_the_closing_log_of_trainer_prints_nothing() -> None:
    out = Piped()
    Run(out).begin().steps(1).log(train_runtime=10.0, train_loss=0.5, train_samples_per_second=3.0, epoch=3.0)
    assert out.lines() == []


@pytest.mark.parametrize("encoding", ["ascii", "iso8859-1", "cp1252"])
def test_arrows_are_plain_where_the_output_is_not_utf_8(encoding: str) -> None:
    out = Piped(encoding)
    Run(out).begin().steps(1).log(loss=0.5).steps(1).log(loss=0.4).steps(1).log(loss=0.6)
    assert [line[:27] for line in out.lines()] == snapshot(
        ["step   1/345  loss  0.5000 ", "step   2/345  loss  0.4000 ", "step   3/345  loss  0.6000 "]
    )
    assert [line[27] for line in out.lines()] == [" ", "v", "^"]
    assert out.getvalue().isascii()


def test_samples_per_second_leave_evaluations_and_checkpoints_out_and_the_eta_counts_them() -> None:
    out = Piped()
    run = Run(out, total=20).begin().steps(5).log(loss=1.0).evaluate(100.0, eval_loss=1.0)
    run.now += 50
    run.lines.on_save(run.args, run.state, None)
    run.steps(5).log(loss=1.0)
    assert out.lines()[-1] == snapshot("step 10/20  loss  1.0000 =     6.4 samples/s  eta 4:10")


def test_a_resumed_run_counts_its_own_steps_only() -> None:
    out = Piped()
    Run(out, total=300).begin(step=200).steps(10).log(loss=0.5)
    assert out.lines() == snapshot(["step 210/300  loss  0.5000       6.4 samples/s  eta 15:00"])


def test_memory_and_speed_are_kept_in_the_log_history_for_the_report() -> None:
    run = Run(Piped(), memory=lambda: (10, 20)).begin().steps(2).log(loss=0.5).evaluate(1.0, eval_loss=0.4)
    assert run.state.log_history[0] == {
        "loss": 0.5,
        "step": 2,
        "samples_per_second": 6.4,
        "memory_bytes": 10,
        "peak_memory_bytes": 20,
    }
    assert "memory_bytes" not in run.state.log_history[1]


def test_only_the_main_process_prints() -> None:
    out = Piped()
    run = Run(out)
    run.state.is_world_process_zero = False
    run.begin().steps(1).log(loss=0.5).evaluate(1.0, eval_loss=0.4)
    assert out.lines() == []


def test_a_reader_that_went_away_does_not_end_the_run() -> None:
    class Closed(Piped):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    Run(Closed()).begin().steps(1).log(loss=0.5)


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (120, "step   2/345  epoch  0.01  loss  0.4000 ▼  lr 2.00e-05  grad    1.00     6.4 samples/s  1.00/2.00 GiB  eta 57:10"),  # noqa: E501
        (100, "step   2/345  epoch  0.01  loss  0.4000 ▼  lr 2.00e-05     6.4 samples/s  1.00/2.00 GiB  eta 57:10"),
        (80, "step   2/345  loss  0.4000 ▼     6.4 samples/s  1.00/2.00 GiB  eta 57:10"),
        (50, "step   2/345  loss  0.4000 ▼  eta 57:10"),
        (30, "step   2/345  loss  0.4000 ▼"),
        (12, "step   2/345"),
    ],
)  # fmt: skip
def test_a_narrow_terminal_gets_the_fields_that_matter_most_on_one_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int, line: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    run = Run(terminal, memory=lambda: (GIB, 2 * GIB))  # without a bar, which on_train_begin opens
    run.steps(1).log(loss=0.5, epoch=0.003, learning_rate=2e-5, grad_norm=1.0)
    run.steps(1).log(loss=0.4, epoch=0.006, learning_rate=2e-5, grad_norm=1.0)
    assert terminal.lines()[1][:columns] == line[:columns]
    assert len(terminal.lines()) == 3


def test_a_terminal_has_colours_a_bar_while_training_and_its_cursor_back_after(terminal: Terminal) -> None:
    with Run(terminal).begin().lines as lines:
        run = Run(terminal)
        run.lines = lines
        run.steps(1).log(loss=0.5).steps(1).log(loss=0.4)
        lines.on_prediction_step(run.args, run.state, None, eval_dataloader=[1, 2])
        run.evaluate(1.0, eval_loss=0.4)
    text = terminal.getvalue()
    assert "\x1b[32m▼" in text or "\x1b[32mloss  0.4000 ▼" in text
    assert "training" in text
    assert "━" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    lines.close()  # twice is fine


def test_a_ctrl_c_gives_the_cursor_back(terminal: Terminal) -> None:
    run = Run(terminal)
    with pytest.raises(KeyboardInterrupt), run.lines:  # noqa: PT012
        run.begin().steps(1)
        raise KeyboardInterrupt
    assert terminal.getvalue().count("\x1b[?25h") == 1


def test_no_color_is_honoured(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    Run(terminal).steps(1).log(loss=0.5).steps(1).log(loss=0.4)
    assert "\x1b[3" not in terminal.getvalue()
    assert "0.4000 ▼" in terminal.getvalue()


@pytest.mark.parametrize("kind", ["dumb terminal", "terminal that is not UTF-8", "pipe with FORCE_COLOR"])
def test_where_nothing_can_be_drawn_lines_are_plain(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    out: Piped = terminal
    if kind == "dumb terminal":
        monkeypatch.setenv("TERM", "dumb")
    elif kind == "terminal that is not UTF-8":
        out = Terminal("ascii")
    else:
        monkeypatch.setenv("FORCE_COLOR", "1")
        out = Piped()
    Run(out).begin().steps(1).log(loss=0.5)
    with redirect_stdout(out):
        header([("device", "mps", "the probe — answered")], title="run")
    nothing = dict.fromkeys(("baseline", "expectation"))
    with redirect_stdout(out):
        final_table(a_record(metrics={"f1": 0.5}, train_seconds=60, samples_per_second=6.4, **nothing))
    dash = "?" if kind == "terminal that is not UTF-8" else "—"
    assert out.getvalue() == (
        "step   1/345  loss  0.5000       6.4 samples/s  eta 57:20\n"
        f"run\n  device  mps  the probe {dash} answered\n"
        "metric  this run\nf1        0.5000\n"
        "training  1 min 00 s, 6.4 samples/s, 1.94 GiB at peak\n"
    )


def test_the_real_trainer_prints_through_it_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": ((x * self.weight - labels) ** 2).mean(), "logits": x * self.weight}

    data: Any = [{"x": torch.tensor([1.0]), "labels": torch.tensor([2.0])} for _ in range(8)]
    arguments = TrainingArguments(
        tmp_path,
        per_device_train_batch_size=2,
        num_train_epochs=1,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="no",
        learning_rate=0.1,
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(Line(), arguments, train_dataset=data, eval_dataset=data)
    with StepLines(clock=lambda: 0.0, memory=lambda: (GIB, GIB)).attach(trainer) as lines:
        trainer.train()
    present = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert ProgressCallback not in present
    assert PrinterCallback not in present
    assert lines in trainer.callback_handler.callbacks
    printed = capsys.readouterr().out.splitlines()
    assert [re.sub(r"\d+\.\d s$", "T s", line) for line in printed] == snapshot(
        [
            # Adam moves the weight by the learning rate: 0.1, 0.075, 0.05, 0.025; the loss is (weight - 2)^2.
            "step 2/4  epoch  0.50  loss  3.8050    lr 7.50e-02  grad    3.80  1.00/1.00 GiB  eta 0:00",
            "step 4/4  epoch  1.00  loss  3.2406 ▼  lr 2.50e-02  grad    3.55  1.00/1.00 GiB  eta 0:00",
            "eval 4/4  epoch  1.00  loss  3.0625    T s",
        ]
    )
    assert trainer.state.log_history[0]["memory_bytes"] == GIB
