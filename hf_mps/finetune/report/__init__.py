"""The files of a run: results.json, training.png and the model card README.md."""

from __future__ import annotations

import os
from pathlib import Path

from hf_mps.files import write_atomic, write_json
from hf_mps.finetune.metrics import Baseline
from hf_mps.finetune.report.record import SCHEMA, Expectation, RunRecord, results, versions

__all__ = ["SCHEMA", "Baseline", "Expectation", "RunRecord", "results", "versions", "write"]


def write(output_dir: str | os.PathLike[str], record: RunRecord) -> list[Path]:
    """Write results.json, training.png and README.md into `output_dir`, each atomically, and return their paths.

    An earlier run's files of these names are replaced. Raises OSError where the disk refuses.
    """
    from hf_mps.finetune.report.card import card
    from hf_mps.finetune.report.plot import draw

    folder = Path(output_dir)
    return [
        write_json(folder / "results.json", results(record)),
        write_atomic(folder / "training.png", draw(record)),
        write_atomic(folder / "README.md", card(record)),
    ]
