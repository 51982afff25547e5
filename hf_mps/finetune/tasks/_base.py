"""What a task hands to the runner: features, model, collator and metrics, and all of its choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hf_mps.core.choice import Choice
from hf_mps.finetune.data.load import SPLITS

if TYPE_CHECKING:
    from hf_mps.finetune.stream.dataset import Streamed
    from hf_mps.metrics import Baseline


class Measures(Protocol):
    """What the runner needs of a task's metrics; `hf_mps.metrics.Metrics` serves tasks with a label a row."""

    names: tuple[str, ...]
    """As a recipe's `metrics` has them."""
    main: str
    """The number that judges the run, without `eval_`."""
    greater_is_better: bool

    @property
    def reported(self) -> tuple[str, ...]:
        """Every number that an evaluation reports, by the name that `expect` takes."""


@dataclass
class Prepared:
    """A task ready for Trainer.

    `splits` are `train`, `validation` and any further one by name; they hold the model's own columns alone, as Python
    numbers. The fields from `trainer` on are for tasks that need more than transformers' plain Trainer and a label a
    row.
    """

    splits: Mapping[str, Any]
    model: Any
    processing_class: Any
    collator: Callable[[list[Any]], Any] | None
    metrics: Measures
    compute_metrics: Callable[[Any], dict[str, float]] | None
    baseline: Baseline | None
    auto_class: str
    pipeline_tag: str
    choices: dict[str, Choice[Any]] = field(default_factory=dict)

    trainer: type[Any] | None = None
    """A subclass of transformers' Trainer; None is Trainer itself."""
    callbacks: Sequence[Any] = ()
    """Callbacks that the trainer needs."""
    arguments: type[Any] | None = None
    """A subclass of TrainingArguments; None is TrainingArguments itself. The task's `ARGUMENTS` names the same one."""
    arguments_defaults: dict[str, Any] = field(default_factory=dict)
    """Arguments that the task wants where the recipe's `training` does not say otherwise."""
    trainer_settings: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the trainer."""
    before_training: Callable[[], None] | None = None
    """Calls code that the recipe names, to find its faults early: for a run, and never for a plan or an audit."""
    token_counts: Sequence[int] | None = None
    """The length in tokens of each training row, for the plan; None where rows have no tokens."""
    epoch: Callable[[Mapping[str, Any]], Choice[int]] | None = None
    """Given the training arguments: how many rows an epoch has, where the trainer does not draw each row once."""
    dryrun_batch: Callable[[list[Any]], Mapping[str, Any]] | None = None
    """Makes a whole batch of rows for a step that is only looked at, where the trainer itself generates a part."""
    predict: Callable[[Any], Iterable[Mapping[str, Any]]] | None = None
    """Given the trainer after training: the rows of predictions.csv, the validation split in its order."""
    figures: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, bytes]] | None = None
    """Given those rows: further pictures as {file name: PNG}, a confusion matrix for instance."""
    save: Callable[[Any, Path], None] | None = None
    """Given the trainer and a folder: how the model is saved, where `trainer.save_model` is not enough."""
    snippet: str | None = None
    """Three lines of Python that load the model from `"."`; None is the auto class with its tokenizer."""
    library: str = "transformers"
    """The library that loads the model, by its name on the hub."""

    @property
    def train(self) -> Any:
        """The rows that are trained on."""
        return self.splits["train"]

    @property
    def stream(self) -> Streamed | None:
        """The rows that are trained on where they are streamed."""
        from hf_mps.finetune.stream.dataset import Streamed

        return self.train if isinstance(self.train, Streamed) else None

    @property
    def sample(self) -> Any:
        """The rows that are trained on, or of streamed ones the first: for a step that is tried or looked at."""
        return self.train if self.stream is None else self.stream.sample

    @property
    def validation(self) -> Any:
        """The rows that are evaluated during training and predicted after it."""
        return self.splits["validation"]

    @property
    def further(self) -> dict[str, Any]:
        """The splits beside these two: measured once after training, as `NAME_metric`."""
        return {name: rows for name, rows in self.splits.items() if name not in SPLITS}

    @property
    def reported(self) -> tuple[str, ...]:
        """Every number that a run reports, by the name that `expect` takes: `f1`, and `test_f1` for a further split."""
        own = self.metrics.reported
        return (*own, *(f"{split}_{number}" for split in self.further for number in own))
