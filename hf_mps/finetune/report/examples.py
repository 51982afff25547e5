"""A few rows' answers at each evaluation, as a picture or as texts: in the run's folder, and for its trackers."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from PIL import Image
from transformers import TrainerCallback
from transformers.integrations import MLflowCallback, TensorBoardCallback, TrackioCallback, WandbCallback

from hf_mps.core.files import write_atomic
from hf_mps.finetune.features.early_steps import undone
from hf_mps.finetune.report import predictions
from hf_mps.finetune.run import failures
from hf_mps.finetune.tasks import Prepared

FOLDER, NAME = "examples", "step-{:06}"
ROWS = 4
KEPT = 50
"""Evaluations whose examples stay in the folder; the oldest go first."""
TRACKERS = (MLflowCallback, TensorBoardCallback, TrackioCallback, WandbCallback)
LONGEST = 2000
"""Characters of a text."""


class Examples(TrainerCallback):  # type: ignore[misc]
    """Shows the answers to the first `ROWS` validation rows behind each evaluation of a training.

    `seen` is what the trainer predicted in its last evaluation, None where it predicted nothing.
    Every process takes part, and the main one writes. No random state changes, and a failure is told and passed over.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self.trainer: Any = None
        self.seen: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.examples = self

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.examples = self.seen = None

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, prepared = self.trainer, self._prepared
        if trainer.examples is None:
            return
        with undone(trainer.model), failures.optional("an evaluation's examples", "the training goes on"):
            answers = (prepared.shown or prepared.predict)(Seen(trainer, self.seen))  # type: ignore[misc]
            rows = [dict(row) for row in islice(answers, ROWS)]
            answers = None  # it may hold what it answers with
            if rows and state.is_world_process_zero:
                self._hand_out(args, state.global_step, rows)
        self.seen = None

    def _hand_out(self, args: Any, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        place = Path(args.output_dir) / FOLDER / NAME.format(step)
        if self._prepared.task.shows == "pictures":
            (made,) = self._prepared.figures(rows).values()  # type: ignore[misc]
            write_atomic(place.with_suffix(".png"), made)
        else:
            rows = [{name: _cut(value) for name, value in row.items()} for row in rows]
            made = predictions.text(rows)
            write_atomic(place.with_suffix(".csv"), made)
        for file in sorted(place.parent.glob("step-*"))[:-KEPT]:
            file.unlink()
        trackers = [each for each in self.trainer.callback_handler.callbacks if isinstance(each, TRACKERS)]
        image = Image.open(io.BytesIO(made)).convert("RGB") if trackers and isinstance(made, bytes) else None
        for tracker in trackers:
            _track(tracker, step, made, rows, image)


class Seen:
    """A trainer whose `predict` returns what its evaluation has predicted of the validation rows."""

    def __init__(self, trainer: Any, seen: Any) -> None:
        self._trainer, self._seen = trainer, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def predict(self, inputs: Any) -> Any:
        """Return what `Trainer.predict` does."""
        if self._seen is not None and inputs is self._trainer.eval_dataset:
            return SimpleNamespace(predictions=self._seen)
        return self._trainer.predict(inputs)


def _track(callback: Any, step: int, made: str | bytes, rows: Iterable[Mapping[str, Any]], image: Any) -> None:
    """Hand a picture, or a table (csv, and its rows), to the tracker of one of transformers' callbacks."""
    names, cells = list(dict.fromkeys(name for row in rows for name in row)), []
    if image is None:
        cells = [[str(row.get(name, "")) for name in names] for row in rows]
    if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
        if image is not None:
            import numpy

            callback.tb_writer.add_image(FOLDER, numpy.asarray(image), step, dataformats="HWC")
        else:
            lines = [names, ["---"] * len(names), *([_cell(cell) for cell in row] for row in cells)]
            callback.tb_writer.add_text(FOLDER, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)
        callback.tb_writer.flush()
    elif isinstance(callback, (TrackioCallback, WandbCallback)):
        library = importlib.import_module("trackio" if isinstance(callback, TrackioCallback) else "wandb")
        shown = library.Table(columns=names, data=cells) if image is None else library.Image(image)
        library.log({f"eval/{FOLDER}": shown, "train/global_step": step})
    elif isinstance(callback, MLflowCallback):
        library, file = importlib.import_module("mlflow"), f"{FOLDER}/{NAME.format(step)}"
        if image is not None:
            library.log_image(image, f"{file}.png")
        else:
            library.log_text(made, f"{file}.csv")


def _cut(value: Any) -> Any:
    return value if not isinstance(value, str) or len(value) <= LONGEST else f"{value[:LONGEST]} …"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")
