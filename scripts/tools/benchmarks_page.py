"""The collected part of docs/benchmarks.md: the rows of docs/benchmarks.jsonl, each with who signed it and its command.

A line of that file is what `hf-mps bench --sign NAME` or `scripts/bench/compare_peers.py --sign NAME` wrote. Rows of a
simulated device stand apart, under a heading that says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLLECTED = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.jsonl"
BEGIN = "<!-- Below, to the end of this part: written by scripts/tools/docs.py from docs/benchmarks.jsonl. -->"
END = "<!-- The end of what scripts/tools/docs.py writes. -->"
NEEDED = ("signed_off_by", "schema", "kind", "command", "date", "simulated", "machine", "versions")
BENCH = ("network", "phase", "batch", "device, rows/s", "CPU, rows/s", "device / CPU", "memory")
PEERS = ("side", "rows/s", "hf_mps / side", "seconds to the F1", "F1", "peak memory", "first step after")


def page() -> str:
    """The page with its collected part written anew. Raises ValueError where the page has no such part."""
    text = COLLECTED.with_suffix(".md").read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"docs/benchmarks.md has no lines {BEGIN} and {END}")
    return before + BEGIN + "\n" + "\n".join(lines()) + "\n" + END + after


def lines(file: Path = COLLECTED) -> Iterator[str]:
    """The tables. Raises ValueError, with the line's number, for a row that is not whole."""
    found = list(rows(file))
    for title, kind, simulated in (
        ("The field's networks", "bench", False),
        ("The field's networks on the simulated device: no Mac's speed", "bench", True),
        ("One training by each of the field's ways", "peers", False),
    ):
        for number, row in enumerate(one for one in found if (one["kind"], one["simulated"]) == (kind, simulated)):
            if not number:
                yield from ("", f"### {title}")
            yield from ("", *(_bench(row) if kind == "bench" else _peers(row)))
    yield ""


def rows(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a collection, in its order."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        missing = [name for name in NEEDED if name not in row]
        if missing or row["schema"] != 1 or row["kind"] not in ("bench", "peers"):
            raise ValueError(f"{file.name}, line {number}: {', '.join(missing) or 'its schema or kind'} is not known")
        if row["simulated"] and row["kind"] == "peers":
            raise ValueError(f"{file.name}, line {number}: a comparison on the simulated device says nothing of speed")
        yield row


def _head(row: dict[str, Any]) -> Iterator[str]:
    machine = row["machine"]
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine.get("memory_bytes") else ""
    versions = ", ".join(f"{name} {row['versions'][name]}" for name in ("torch", "transformers", "hf_mps"))
    computed = f" (computed by {machine['processor']})" if row["simulated"] else ""
    yield f"**{machine['chip']}**{computed}{memory}, {machine['system']}; {versions}; {row['date']}; signed off by"
    yield f"{row['signed_off_by']}. `{row['command']}`" + (" (quick: small batches)" if row.get("quick") else "")
    yield ""


def _bench(row: dict[str, Any]) -> Iterator[str]:
    yield from _head(row)
    label = " (simulated)" if row["simulated"] else ""
    yield from _table(tuple(head.replace("device", f"{row['device']}{label}") for head in BENCH))
    for case in row["cases"]:
        device, cpu = case["devices"].get(row["device"], {}), case["devices"].get("cpu", {})
        ratio = "-" if case["over_cpu"] is None else f"{case['over_cpu']:.2f}"
        yield _cells(
            case["network"],
            case["phase"],
            f"{case['batch']} of {case['row']}",
            _speed(device),
            _speed(cpu),
            ratio,
            _memory(device.get("memory_bytes")),
        )


def _peers(row: dict[str, Any]) -> Iterator[str]:
    yield from _head(row)
    yield from _table(PEERS)
    for name, side in row["sides"].items():
        reached = side["seconds_to_f1"]
        yield _cells(
            name,
            f"{side['rows_per_second']:,.1f}",
            f"{side['ratio']:.2f}",
            "-" if reached is None else f"{reached:.1f}",
            "-" if side["f1"] is None else f"{side['f1']:.3f}",
            _memory(side["peak_memory_bytes"]),
            f"{side['start_seconds']:.1f} s",
        )


def _table(heads: tuple[str, ...]) -> Iterator[str]:
    yield _cells(*heads)
    yield _cells(*("---" for _ in heads))


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _speed(found: dict[str, Any]) -> str:
    return found.get("failure") or (f"{found['rows_per_second']:,.1f}" if found else "-")


def _memory(size: int | None) -> str:
    return f"{size / 2**30:.2f} GiB" if size else "-"
