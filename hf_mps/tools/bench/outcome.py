"""What a benchmark found: a table and a picture, results.json, and one line for the collection that somebody signs."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, brief, user_path
from hf_mps.core.files import plain, refuse_unwritable, write_atomic, write_json
from hf_mps.core.text import aligned, counted, gib, memory
from hf_mps.finetune.report.plot import BLUE, INK, ORANGE, QUIET, png
from hf_mps.finetune.report.results import versions
from hf_mps.finetune.run.run_dir import next_free
from hf_mps.metal.device import facts, machine, simulated
from hf_mps.metal.device.machine import SIMULATED
from hf_mps.tools.bench.cases import EVALUATION, TRAINING
from hf_mps.tools.dryrun.render import Report

if TYPE_CHECKING:
    from hf_mps.tools.bench import Asked

SCHEMA = 1
NO_MAC = "computed by this machine's processor, no Mac's speed or memory"
LONGEST_NAME = 100
COLLECTION = "docs/benchmarks.jsonl"


@dataclass(frozen=True)
class Outcome:
    """The `rows` of a benchmark, one a network and phase with the figures of each device, and `facts` about it."""

    asked: Asked
    facts: Mapping[str, Choice[Any]]
    rows: list[dict[str, Any]]

    @property
    def device(self) -> str:
        """The device that is compared with the CPU; the CPU where there is no other."""
        return str(self.facts["device"].value)

    @property
    def label(self) -> str:
        """Return the device with the word that has to stand beside every figure of a simulated one."""
        return self.device + (SIMULATED if simulated(self.device) else "")

    def speedup(self, row: Mapping[str, Any]) -> float | None:
        """The device's rows per second over the CPU's; None where one has no figure, or there is one device alone."""
        device, cpu = (row["devices"].get(name, {}).get("seconds") for name in (self.device, "cpu"))
        return cpu / device if device and cpu and self.device != "cpu" else None

    def values(self) -> dict[str, Any]:
        """Return the content of results.json, schema 1.

        `cases` have `network`, `phase`, `batch`, `row`, `parameters`, `devices` ({name: seconds of the median step,
        fastest, slowest, repetitions, rows_per_second, memory_bytes, memory_is; or failure}), and `over_cpu`.
        """
        return {
            "schema": SCHEMA,
            "kind": "bench",
            "quick": self.asked.quick,
            **provenance(self.asked.command, self.device),
            "measured": self.asked.settings,
            "cases": [{**row, "over_cpu": self.speedup(row)} for row in self.rows],
        }

    def report(self) -> Report:
        """Return the report for the screen."""
        failed = [row for row in self.rows if any("failure" in each for each in row["devices"].values())]
        problem = f"{counted(len(failed), 'row')} without a figure: too little memory" if failed else ""
        return Report("bench", self.asked.name, self.facts, ["", *self._table()], self.values(), problem=problem)

    def _table(self) -> Iterator[str]:
        names = [self.label if name == self.device else name for name in self.rows[0]["devices"]]
        over = [f"{self.label} / cpu"] if len(names) > 1 else []
        head = ["network", "phase", "batch", "row", *(f"rows/s {name}" for name in names), *over]
        rows = [[*head, *(f"memory {name}" for name in names)]]
        for row in self.rows:
            found, ratio = row["devices"].values(), self.speedup(row)
            cells = [row["network"], row["phase"], f"{row['batch']}", row["row"]]
            cells += [each.get("failure") or f"{each['rows_per_second']:,.1f}" for each in found]
            cells += ["-" if ratio is None else f"{ratio:.2f}"] if over else []
            rows.append(cells + [memory(each["memory_bytes"]) if each.get("memory_bytes") else "-" for each in found])
        yield from (f"  {line}" for line in aligned(rows, right=(2, *range(4, len(rows[0])))))

    def write(self, folder: Path) -> list[Path]:
        """Write results.json and bench.png into `folder`, and return their paths."""
        results = write_json(folder / "results.json", self.values())
        return [results, write_atomic(folder / "bench.png", draw(self))]

    def signed(self, name: str) -> str:
        """The line of the collection, which `name` vouches for: the figures, and what they were measured with."""
        values = plain(self.values())
        for case in values["cases"]:
            case.pop("facts")
        return json.dumps({"signed_off_by": name, **values}, ensure_ascii=False, allow_nan=False)


def provenance(command: str, device: str) -> dict[str, Any]:
    """Return what a stored row says of where its figures come from: command, date, device, machine and versions."""
    found = facts.facts(device)
    return {
        "command": command,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": device,
        "simulated": simulated(device),
        "machine": {
            "chip": found.chip,
            "cores": found.cores,
            "memory_bytes": found.memory,
            "processor": machine.real().chip,
            "system": f"macOS {found.macos}" if found.macos else platform.system(),
        },
        "versions": versions(),
    }


def facts_of(asked: Asked, device: Choice[str], measured: Choice[str]) -> dict[str, Choice[Any]]:
    """Return what a report says above its table, each with its reason. Imports torch."""
    import torch

    found = facts.facts(device.value)
    system = f"macOS {found.macos}" if found.macos else platform.system()
    told = {"device": device, "chip": Choice(found.chip, f"{gib(found.memory)}, {system}")}
    if simulated(device.value):
        told["simulated"] = Choice("yes", NO_MAC)
    if asked.quick:
        told["size"] = Choice("quick", "smaller batches and rows: compare its figures with no other's")
    told["versions"] = Choice(f"torch {torch.__version__}", f"transformers {versions().get('transformers', '?')}")
    return told | {"measured": measured}


def signer(name: str) -> str:
    """Who vouches for a row, as the row has it. Raises UserError for what is no name of one line."""
    cleaned = " ".join(name.split())
    if not cleaned or not cleaned.isprintable() or len(cleaned) > LONGEST_NAME or "|" in cleaned:
        raise UserError(
            f"--sign '{brief(name)}' is no name; allowed: up to {LONGEST_NAME} letters without |;"
            " next: --sign 'Your Name <you@example.org>'"
        )
    return cleaned


def folder_for(given: Path | None, first: Path = Path("runs/bench")) -> Path:
    """Return the folder for the files: `given`, or the first of runs/bench, runs/bench-2, … that is free.

    Raises UserError where `given` holds something: nothing is written over.
    """
    if given is None:
        return next_free(first) if first.exists() else first
    given = user_path(given)
    if given.exists() and (not given.is_dir() or any(given.iterdir())):
        free = next_free(given if given.name else given.absolute())
        raise UserError(f"--output {given} holds something already; next: --output {free}")
    # Now, since what is measured takes minutes.
    refuse_unwritable(given / "results.json", f"--output {given}")
    return given


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
