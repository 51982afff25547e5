"""Measures a saved model on rows with labels, by the metrics of its run: other rows, or those of its recipe.

The task's `prepare` makes features, batches and metrics, as before a training; the run's decisions from its training
rows (classes, lengths, letters) hold. Nothing is trained or written.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_mps.core import status
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.files import plain
from hf_mps.core.text import aligned, counted
from hf_mps.finetune.data import labels, load
from hf_mps.finetune.recipe import overrides, schema
from hf_mps.finetune.recipe.resolve import validate
from hf_mps.finetune.text import lengths
from hf_mps.metrics.selection import is_metric
from hf_mps.tools.saved.run import NOWHERE, SavedRun, on_device, say, trainer_of

FILES = "data.files"
# Keys of the recipe's own rows, which other files do not take over.
OF_OWN_ROWS = ("rows", "hold_out", "splits", "config", "revision", "streaming", "sources", "shuffle_buffer")
SPAN = re.compile(r"(-?[\d.e+-]+) to (-?[\d.e+-]+)")


@dataclass
class Measured:
    """The metrics of a saved model on each split, and the number of its rows.

    `own`: the rows are those that the run itself evaluated.
    """

    run: SavedRun
    own: bool
    main: str = ""
    device: Choice[str] = field(default_factory=lambda: Choice("", ""))
    choices: dict[str, Choice[Any]] = field(default_factory=dict)
    splits: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each split the number of its `rows`, where they are of (`of`), and its `metrics`."""

    def of_the_run(self, split: str) -> Mapping[str, float]:
        """Return the run's own metrics of a split; empty for other rows."""
        found: Mapping[str, float] = (self.run.results or {}).get("metrics", {}) if self.own else {}
        if split == "validation":
            return found
        start = f"{split}_"
        return {name.removeprefix(start): value for name, value in found.items() if name.startswith(start)}

    def print_json(self) -> None:
        """Print it as one JSON object."""
        of_all = {"device": self.device, "choices": self.choices, "main_metric": self.main, "splits": self.splits}
        content = plain({"run": self.run.where, "task": self.run.task, **of_all})
        print(json.dumps(content, indent=2, ensure_ascii=False))

    def print(self) -> None:
        """Print a table of each split: its metrics, the main one first, beside those of its run."""
        for split, found in self.splits.items():
            metrics, before = found["metrics"], self.of_the_run(split)
            rows = [("metric", split, "its run" if before else "")]
            for name in sorted(metrics, key=lambda name: (name != self.main, name == "loss")):
                rows.append((name, f"{metrics[name]:.4f}", f"{before[name]:.4f}" if name in before else ""))
            print(*aligned(rows, right=(1, 2)), sep="\n")
            print(f"rows  {counted(found['rows'], 'row')}, {found['of']}")


def evaluate(run: SavedRun, words: Sequence[str] = (), *, batch: int | None = None) -> Measured:
    """Measure the model of `run` on the rows that `words` name (`data.validation=other.csv`), or its recipe's own.

    Every split but the training rows is measured, each with `batch` rows at once. Raises UserError for rows and models
    that cannot be used, RunError for a failure of the machine.
    """
    run, splits = _with_rows(run, words)
    found = Measured(run, own=splits is None)
    with on_device(run) as (run, device, folder, weights):
        status.now("reading the rows …")
        load.check(run.recipe.data)
        rows = load.load(run.recipe.data, run.recipe.seed, only=splits or _splits(run.recipe.data))
        recipe = settled(run)
        for split, some in rows.items():
            status.now(f"measuring {split} …")
            feature = some.dataset.features.get("label") or getattr(some.dataset.features.get("tags"), "feature", None)
            names, known = getattr(feature, "names", None), getattr(recipe.data, "labels", None)
            if names and known and list(names) != list(known):
                came = f"its classes are {labels.listed(names)}, but the model's are {labels.listed(known)}"
                allowed = "the same classes in the same order, or a column of names"
                raise UserError(f"{some.where}: {came}; allowed: {allowed}")
            with lengths.those_of(run.chosen):
                task = run.task_class(recipe, run.checkpoint, device.value)
                prepared = task.prepare({"train": some, "validation": some})
            # `prepare` takes the model itself as the reference, as at the start of a training; here it is the base.
            if (reference := task.reference()) is not None:
                prepared.trainer_settings["ref_model"] = reference
            trainer, chosen = trainer_of(prepared, recipe, device, folder, run.chosen, batch)
            if not found.splits:
                found.main, found.device, found.choices = prepared.metrics.main, device, {**chosen, **weights}
                status.over()
                say(run, device, found.choices)
            scored = {name: value for name, value in trainer.evaluate().items() if is_metric(name)}
            measured = {name.removeprefix("eval_"): value for name, value in scored.items()}
            found.splits[split] = {"rows": len(some.dataset), "of": some.origin, "metrics": measured}
    return found


def settled(run: SavedRun) -> schema.Recipe:
    """Return the recipe with what its run had decided from the training rows, which are not read here."""
    recipe, chosen = run.to_use, run.chosen
    said: dict[str, Any] = {"augmentation": None, "vocabulary": "checkpoint"}
    if (cut := lengths.of_a_run(chosen)) is not None:
        said["max_length"] = cut["longest"]
    if "questions_without_answer" in chosen:
        said["version_2_with_negative"] = chosen["questions_without_answer"]
    if "letter_case" in chosen:
        said["letter_case"] = chosen["letter_case"]
    data: dict[str, Any] = {}
    of_data = type(recipe.data).model_fields
    if "labels" in of_data:
        config = run.checkpoint.config()
        classes = labels.kept(config)
        data["labels"] = list(classes.names) or None
        said["problem_type"] = classes.problem_type
    if "score_range" in of_data and (span := SPAN.fullmatch(str(chosen.get("scores")))):
        data["score_range"] = [float(bound) for bound in span.groups()]
    said["data"] = recipe.data.model_copy(update=data)
    return recipe.model_copy(update={key: value for key, value in said.items() if key in type(recipe).model_fields})


def _with_rows(run: SavedRun, words: Sequence[str]) -> tuple[SavedRun, list[str] | None]:
    """Return the run with the rows that `words` name, and their splits; None for its own rows. Raises UserError."""
    parsed = run.parsed(words)
    files = {key.removeprefix(f"{FILES}."): word.value for key, word in parsed.items() if key.startswith(f"{FILES}.")}
    other = files or any(key.startswith(("data.hub", "data.folder")) for key in parsed)
    if "train" in files:
        raise UserError("evaluate reads no training rows; next, to measure a file: data.validation=FILE")
    if not other and NOWHERE in (run.recipe.data.files or {}).values():
        raise UserError(f"no run trained {run.where}, so there are no rows to measure; next: data.validation=FILE")
    document = dataclasses.replace(run.document, values=copy.deepcopy(run.document.values))
    data = document.values.setdefault("data", {})
    if files:
        for key in OF_OWN_ROWS:
            data.pop(key, None)
        data["files"] = {}
    laid = overrides.lay(document, parsed)
    data = laid.values["data"]
    named = data.get("files")
    if isinstance(named, dict) and (files or "validation" in named):
        # No training row is read: its key is filled, as a recipe needs it, and its file may be gone.
        data["files"] = {**named, "train": named.get("validation") or next(iter(files.values()))}
        if "validation" not in named:
            data["hold_out"] = overrides.HELD_OUT
    run = dataclasses.replace(run, document=laid, recipe=validate(laid))
    return run, list(files) or (_splits(run.recipe.data) if other else None)


def _splits(data: schema.Data) -> list[str]:
    """Return every split but the training rows."""
    return [split for split in dict.fromkeys((*load.SPLITS, *load.splits_to_read(data))) if split != "train"]
