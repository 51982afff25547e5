"""The files of a run: results.json, training.png and the model card README.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hf_mps.core.choice import Choice
from hf_mps.core.files import write_atomic, write_json
from hf_mps.finetune.recipe.expect import Expectation
from hf_mps.finetune.report.predictions import FILE, Written
from hf_mps.finetune.report.results import SCHEMA, RunRecord, card, doubt, results, versions, without_paths
from hf_mps.finetune.run import failures
from hf_mps.metrics import Baseline

__all__ = ["SCHEMA", "Baseline", "Expectation", "RunRecord", "pending", "results", "versions", "write"]

PICTURE = "training.png"


def write(folder: Path, record: RunRecord, answer: Callable[[], Written] | None = None) -> list[Path]:
    """Write results.json, training.png, README.md and what `answer` writes, each atomically; return their paths.

    results.json, by which a run counts as finished, comes last; until then a hidden file holds the record, which
    `pending` reads. Any of the others may fail: a line on stderr says so, and no file mentions it. An earlier run's
    files of these names are replaced. `record.doubt` is set. Local paths are written as their last part. Raises OSError
    where the disk refuses the record or results.json.
    """
    from hf_mps.finetune.report.plot import draw

    whole, record = record, without_paths(record, folder)
    hidden = write_json(folder / failures.PENDING, record)
    files, written = [folder / failures.RESULTS], Written([])
    if answer is not None:
        with failures.optional(FILE):
            written = answer()
            record.predictions = written.files[0].name if written.files else None
            record.pictures = [picture.name for picture in written.files[1:]]
    whole.doubt = record.doubt = doubt(record, written.answer)
    record.drawn = False
    with failures.optional(PICTURE):
        files.append(write_atomic(folder / PICTURE, draw(record)))
        record.drawn = True
    with failures.optional("README.md"):
        files.append(write_atomic(folder / "README.md", card(record)))
    write_json(folder / failures.RESULTS, results(record))
    hidden.unlink()
    return [*files, *written.files]


def pending(output_dir: Path) -> RunRecord:
    """Return the record of a run that was killed after its training and before its report was written.

    It lacks `metal_kernels`. Raises OSError and ValueError for a file that cannot be read.
    """
    stored = json.loads((output_dir / failures.PENDING).read_text(encoding="utf-8"))
    made = {"device": Choice, "baseline": Baseline, "expectation": Expectation}
    stored |= {name: kind(**stored[name]) for name, kind in made.items() if stored[name] is not None}
    stored["choices"] = {name: Choice(**choice) for name, choice in stored["choices"].items()}
    return RunRecord(**stored | {"metal_kernels": None})
