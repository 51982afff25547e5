"""What a run left in its folder, read."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any


def results(run: Path) -> dict[str, Any]:
    """What results.json says, which must be JSON as every reader takes it: without NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads((run / "results.json").read_text(encoding="utf-8"), parse_constant=refuse)


def predictions(run: Path, name: str = "predictions.csv") -> list[dict[str, str]]:
    """The rows of predictions.csv, or of another csv."""
    with (run / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
