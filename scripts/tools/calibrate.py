"""Compare what PyTorch's lists say fails on a Mac with what fails on the simulated device, by operator and dtype.

    python scripts/tools/calibrate.py
    python scripts/tools/calibrate.py --profile m1-8gb --workers 4 --json table.json
    python scripts/tools/calibrate.py --only linalg.inv --only addr --list …/torch/testing/_internal/common_mps.py

The lists are those of PyTorch's own Mac runners: `torch/testing/_internal/common_mps.py` and the decorators of OpInfo.
One cell of the table is one run of test_mps.py's `TestConsistency.test_output_match`: every sample of an operator in a
dtype, on the device and on the CPU, compared within that test's tolerances. A listed cell must fail at some sample.
Results that the lists call undefined count neither way. `tests/metal/simulator/calibration.yaml` names each known
difference with its cause; exit code 1 where there is another, or where one of these is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
DIFFERENCES = CHECKOUT / "tests" / "metal" / "simulator" / "calibration.yaml"
FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
CAUSES = ("simulator", "list", "arithmetic", "undefined")

sys.path.insert(0, str(CHECKOUT))

from scripts.conformance.opinfo import operators  # noqa: E402
from scripts.tools.calibration_cells import Cell, name_of, with_bicubic  # noqa: E402

# ---- processes ----


def in_processes(arguments: argparse.Namespace, numbers: Sequence[int]) -> list[Cell]:
    """All cells of these operators from processes of their own; one that ends is a cell, and the rest go on."""
    found: list[Cell] = []

    def lane(own: list[int]) -> None:
        while own:
            command = [
                sys.executable,
                "-m",
                "scripts.tools.calibration_cells",
                arguments.profile,
                str(arguments.list or ""),
            ]
            command += map(str, own)
            with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                begun = None
                for line in process.stdout:
                    report = json.loads(line)
                    if "begins" in report:
                        begun = report
                    else:
                        begun = None
                        own.remove(report["ends"])
                        found.extend(Cell(**cell) for cell in report["cells"])
            if begun is not None:
                own.remove(begun["begins"])
                found.append(Cell(begun["name"], "any", "passes", "raises", "the process ends"))
            elif process.returncode:
                raise SystemExit(f"a worker ended with code {process.returncode} before its first operator")

    lanes = [
        threading.Thread(target=lane, args=(list(numbers[i :: arguments.workers]),)) for i in range(arguments.workers)
    ]
    for each in lanes:
        each.start()
    for each in lanes:
        each.join()
    return sorted(found, key=lambda cell: (cell.operator, cell.dtype))


def environment() -> dict[str, str]:
    """The variables of a process without the layer: what is calibrated is the device alone."""
    path = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    kept = {name: value for name, value in os.environ.items() if name not in ("HF_MPS_SIMULATE", FALLBACK)}
    return {**kept, "HF_MPS": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


# ---- the table ----


def explained(cells: Sequence[Cell], entries: Sequence[dict[str, Any]]) -> tuple[list[Cell], list[dict[str, Any]]]:
    """The differences that no entry names, and the entries that name none of the cells' differences.

    An entry that is true `sometimes`, as an order of sums is drawn, may name none.
    """
    used: set[int] = set()
    unexplained = []
    for cell in (cell for cell in cells if cell.counted and not cell.agrees):
        fitting = [i for i, entry in enumerate(entries) if names(entry, cell)]
        used.update(fitting)
        if not fitting:
            unexplained.append(cell)
    ran = {(cell.operator, cell.dtype) for cell in cells}
    needless = [
        entry
        for i, entry in enumerate(entries)
        if i not in used
        and not entry.get("sometimes")
        and any(names(entry, Cell(name, dtype, entry["listed"], "")) for name, dtype in ran)
    ]
    return unexplained, needless


def names(entry: dict[str, Any], cell: Cell) -> bool:
    """Whether an entry of calibration.yaml is about this cell."""
    return (
        entry["listed"] == cell.expected
        and any(fnmatchcase(cell.operator, name) for name in entry["operators"])
        and cell.dtype in entry.get("dtypes", (cell.dtype,))
    )


def read_differences() -> list[dict[str, Any]]:
    """The known differences, each with `listed` (fails or passes), `operators`, `dtypes`, `cause` and `reason`."""
    import yaml

    return list(yaml.safe_load(DIFFERENCES.read_text(encoding="utf-8")) or [])


def confusion(cells: Sequence[Cell]) -> dict[str, Counter[str]]:
    """How many cells did what here, by what the lists say of them."""
    table: dict[str, Counter[str]] = {}
    for cell in cells:
        table.setdefault(cell.expected, Counter())[cell.found] += 1
    return table


def share(cells: Sequence[Cell], expected: str) -> float:
    """The share of the cells with this expectation that do the same here; 1 where there is none."""
    counted = [cell for cell in cells if cell.counted and cell.expected == expected]
    return sum(cell.agrees for cell in counted) / len(counted) if counted else 1.0


def show(cells: Sequence[Cell], entries: Sequence[dict[str, Any]]) -> bool:
    """Print the table and its differences; return whether all of them are known."""
    found = ("passes", "raises", "differs", "as the cpu", "cpu raises", "no samples")
    table = confusion(cells)
    print(f"{'lists say':12}" + "".join(f"{kind:>12}" for kind in found))
    for expected in ("fails", "passes", "undefined", "skipped"):
        print(f"{expected:12}" + "".join(f"{table.get(expected, Counter())[kind]:12,}" for kind in found))
    raised = Counter(cell.detail.split(":")[0] for cell in cells if cell.expected == "fails" and cell.found == "raises")
    print("listed, raised here: " + ", ".join(f"{kind} {count}" for kind, count in raised.most_common()))
    print(
        f"listed failures that fail here: {share(cells, 'fails'):.1%}; of the rest pass: {share(cells, 'passes'):.2%}"
    )
    telling = [cell for cell in cells if cell.found not in ("as the cpu", "cpu raises")]
    print(f"without those in which the CPU itself has no kernel: {share(telling, 'fails'):.1%}")
    causes = Counter(
        next((entry["cause"] for entry in entries if names(entry, cell)), "not named")
        for cell in cells
        if cell.counted and not cell.agrees
    )
    print("differences by cause: " + ", ".join(f"{cause} {count}" for cause, count in causes.most_common()))
    unexplained, needless = explained(cells, entries)
    for cell in unexplained:
        print(f"not named: {cell.operator} {cell.dtype}, listed as {cell.expected}, {cell.found} here: {cell.detail}")
    for entry in needless:
        print(f"needless: {', '.join(entry['operators'])} ({entry['cause']}) explains nothing any more")
    return not unexplained and not needless


def main() -> int:
    """Run the cells and print the table."""
    arguments = _arguments()
    cells = in_processes(arguments, _wanted(arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n", encoding="utf-8")
    return 0 if show(cells, read_differences()) else 1


def names_of_operators() -> list[str]:
    """The names of the operators, in the order of their numbers."""
    return [name_of(operator) for operator in with_bicubic(operators())]


def _wanted(arguments: argparse.Namespace) -> list[int]:
    listed = names_of_operators()
    for name in arguments.only:
        if not any(fnmatchcase(own, name) for own in listed):
            raise SystemExit(
                f"--only {name} is no operator of OpInfo; next: python scripts/tools/calibrate.py --only 'linalg.*'"
            )
    return [
        number
        for number, own in enumerate(listed)
        if not arguments.only or any(fnmatchcase(own, name) for name in arguments.only)
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--profile", default="m2-pro-16gb", help="the Mac (default: m2-pro-16gb)")
    parser.add_argument("--only", action="append", default=[], metavar="OPERATOR", help="one operator, or a pattern")
    parser.add_argument("--list", type=Path, metavar="FILE", help="another release's common_mps.py")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all cells, into a file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
