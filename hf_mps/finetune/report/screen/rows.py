"""One line for a logging step or an evaluation: its fields in order, and which go first on a narrow terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hf_mps.core.text import GIB, MIB, clock
from hf_mps.metrics.selection import of_log

GAP = "  "
WIDEST = 160
"""Columns of a line in a log file: a tagger has measures for each of its classes, the closing table lists them."""


@dataclass(frozen=True)
class Field:
    """A piece of a line: its text, how soon it is dropped on a narrow terminal (0: never), and its arrow's colour."""

    text: str
    leave: int = 0
    colour: str = ""


@dataclass(frozen=True)
class Step:
    """The numbers of one training line; None drops the field. Memory in bytes, eta in seconds."""

    step: int
    total: int
    loss: float
    last_loss: float | None = None
    reward: float | None = None
    epoch: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    samples_per_second: float | None = None
    memory: int | None = None
    peak: int | None = None
    eta: float | None = None


def arrow(now: float, last: float | None, *, drawn: bool = True) -> str:
    """Return ▲ or ▼ (^ or v where those cannot be written) for a rise or fall, `=` for no change, a space at first."""
    if last is None or not math.isfinite(now) or not math.isfinite(last):
        return " "
    up, down = "▲▼" if drawn else "^v"
    return up if now > last else down if now < last else "="


def step_fields(row: Step, *, drawn: bool = True) -> list[Field]:
    """Return the fields of a training line, left to right."""
    colour = _judge(row.loss, row.last_loss, greater_is_better=False)
    fields = [Field(_progress("step", row.step, row.total))]
    if row.epoch is not None:
        fields.append(Field(f"epoch {row.epoch:5.2f}", leave=2))
    fields.append(Field(f"loss {row.loss:7.4f} {arrow(row.loss, row.last_loss, drawn=drawn)}", colour=colour))
    if row.reward is not None:
        fields.append(Field(f"reward {row.reward:.4f}"))
    if row.learning_rate is not None:
        fields.append(Field(f"lr {row.learning_rate:.2e}", leave=3))
    if row.grad_norm is not None:
        small = abs(row.grad_norm) < 10_000 or not math.isfinite(row.grad_norm)
        fields.append(Field(f"grad {row.grad_norm:{'7.2f' if small else '7.1e'}}", leave=1))
    if row.samples_per_second is not None:
        fields.append(Field(f"{row.samples_per_second:6.1f} samples/s", leave=5))
    if row.memory is not None:
        small = max(row.memory, row.peak or 0) < GIB / 10
        size, unit, digits = (MIB, "MiB", 0) if small else (GIB, "GiB", 2)
        peak = f"/{row.peak / size:.{digits}f}" if row.peak is not None else ""
        fields.append(Field(f"{row.memory / size:.{digits}f}{peak} {unit}", leave=4))
    if row.eta is not None:
        fields.append(Field(f"eta {clock(row.eta)}", leave=6))
    return fields


def eval_fields(
    logs: Mapping[str, object],
    last: Mapping[str, object],
    *,
    step: int,
    total: int,
    main_metric: str | None = None,
    greater_is_better: bool = True,
    drawn: bool = True,
) -> list[Field]:
    """Return the fields of an evaluation line from Trainer's log of it and the previous evaluation's log (or {})."""
    fields = [Field(_progress("eval", step, total))]
    if isinstance(epoch := logs.get("epoch"), (int, float)):
        fields.append(Field(f"epoch {epoch:5.2f}", leave=2))
    measures = evaluated(logs)
    for name in sorted(measures, key=lambda name: (name != "loss", name != main_metric)):
        value = measures[name]
        before = last.get(f"eval_{name}")
        earlier = float(before) if isinstance(before, (int, float)) else None
        if name == "loss":
            text = f"loss {value:7.4f} {arrow(value, earlier, drawn=drawn)}"
            fields.append(Field(text, colour=_judge(value, earlier, greater_is_better=False)))
        elif name == main_metric:
            text = f"{name} {value:.4f} {arrow(value, earlier, drawn=drawn)}"
            fields.append(Field(text, colour=_judge(value, earlier, greater_is_better=greater_is_better)))
        else:
            fields.append(Field(f"{name} {value:.4f}", leave=1))
    if isinstance(seconds := logs.get("eval_runtime"), (int, float)):
        fields.append(Field(f"{seconds:.1f} s", leave=3))
    return fields


def evaluated(logs: Mapping[str, object]) -> dict[str, float]:
    """Return the metrics of an evaluation's log, without `eval_`, loss first."""
    metrics = of_log(logs)
    return {name: float(metrics[name]) for name in sorted(metrics, key=lambda name: name != "loss")}


def fit(fields: list[Field], width: int | None) -> list[Field]:
    """Return the fields that fit into `width` columns (None: no limit); the least important are dropped first."""
    kept = list(fields)
    while width is not None and len(line(kept)) > width and any(field.leave for field in kept):
        # Among equals the last goes first: overall metrics stand before those of a class.
        kept.remove(min((field for field in reversed(kept) if field.leave), key=lambda field: field.leave))
    return kept


def line(fields: list[Field]) -> str:
    """Return the fields as one line of plain text."""
    return GAP.join(field.text for field in fields).rstrip()


def _progress(kind: str, step: int, total: int) -> str:
    return f"{kind} {step:>{len(str(total))}}/{total}" if total else kind


def _judge(now: float, last: float | None, *, greater_is_better: bool) -> str:
    if not math.isfinite(now):
        return "bold red"
    if last is None or now == last or not math.isfinite(last):
        return ""
    return "green" if (now > last) == greater_is_better else "yellow"
