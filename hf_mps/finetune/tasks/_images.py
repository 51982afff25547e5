"""What the tasks share whose model tells classes in images apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.finetune.data import labels
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.tasks._base import Prepared, R, Task


class ImageTask(Task[R]):
    """A task whose model tells the classes `names` apart."""

    names: Sequence[str]

    def begin(self, names: Sequence[str]) -> None:
        """Open the image processor."""
        self.names, self.processing_class = names, self.checkpoint.image_processor()

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        config = self.checkpoint.config()
        self.begin(labels.classes(config))
        self.load(config)
        return self.made()

    def trained(
        self, rows: Mapping[str, Rows], splits: Mapping[str, Any], choices: Mapping[str, Choice[Any]], **parts: Any
    ) -> Prepared:
        """Return `made` for `splits` of `rows`, of which those to train on are varied anew in each epoch.

        `choices` come before those about the model.
        """
        from hf_mps.finetune.run.callbacks import Epochs

        predicted, varied = (rows["validation"], splits["validation"]), Epochs(splits["train"].begin)
        return self.made(predicted, splits=splits, callbacks=[varied], choices={**choices, **self.choices}, **parts)
