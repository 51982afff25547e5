"""The Trainer of a recipe: a class of transformers, TRL or sentence-transformers, with what the run's features set."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from hf_mps.core.checkpoint_files import removed_whole
from hf_mps.finetune.run.run_dir import STATE
from hf_mps.finetune.text import buckets

if TYPE_CHECKING:
    from transformers import TrainerControl


class StepMethod:
    """How a trainer takes a training step: as its class does.

    A feature that takes steps otherwise overrides some of these methods. `stock` is always the trainer's own method.
    """

    def training_step(self, stock: Callable[..., Any], model: Any, inputs: Any, items: Any) -> Any:
        """Return the loss of a batch, whose gradients are then in the model. `items` is `num_items_in_batch`."""
        return stock(model, inputs, items)

    def clip_grad_norm(self, stock: Callable[..., Any], model: Any) -> Any:
        """Clip the gradients and return their norm before that; None where there is nothing to clip any more."""
        return stock(model)

    def grad_norm(self, stock: Callable[..., Any], model: Any, norm: Any) -> Any:
        """Return the norm that is logged. `norm` is what `clip_grad_norm` returned."""
        return stock(model, grad_norm=norm)

    def floating_point_ops(self, stock: Callable[..., int], inputs: Any) -> int:
        """Return the operations that Trainer counts for a batch."""
        return stock(inputs)


class RecipeTrainer:
    """A mixin before a Trainer class, with hooks for features: `step_method`, `train_loader` and `train_sampler`.

    Training is otherwise that of the class itself. What differs for every recipe:

    - An evaluation sees exactly the rows of its split: every row, in order, once, however many processes share them.
    - A resumed run first makes up for an evaluation that was due at the checkpoint's step and is not in its log.
    - `save_total_limit` counts only the checkpoints that are due: that of a stop replaces none of them, and goes after
      the next due one or the end of the run. Where Trainer saves the best alone (`save_strategy: best`), all count.
    """

    args: Any
    state: Any
    accelerator: Any
    gather_function: Any

    step_method = StepMethod()
    train_loader: Any = None
    """The training batches, in place of the class's own loader."""
    train_sampler: Callable[[], Any] | None = None
    """Makes the sampler of training rows, in place of the class's own."""
    examples: Any = None
    """What shows a few answers behind each evaluation of a training (`report.examples`)."""
    interruption: Any = None
    """What saves a checkpoint that was due behind an evaluation that fails (`run.interrupt`)."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        from hf_mps.finetune.run.callbacks import BeforeFirstStep

        super().__init__(*arguments, **settings)
        self.add_callback(BeforeFirstStep(self.make_up_evaluation))  # type: ignore[attr-defined]

    # ---- training ----

    def get_train_dataloader(self) -> Any:
        """Return what the training loop takes its batches from."""
        if self.train_loader is not None:
            return self.train_loader
        return super().get_train_dataloader()  # type: ignore[misc]

    def _get_train_sampler(self, *arguments: Any, **settings: Any) -> Any:
        if self.train_sampler is not None:
            return self.train_sampler()
        return super()._get_train_sampler(*arguments, **settings)  # type: ignore[misc]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Take a step as Trainer.training_step does."""
        return self.step_method.training_step(super().training_step, model, inputs, num_items_in_batch)  # type: ignore[misc]

    def _clip_grad_norm(self, model: Any) -> Any:
        return self.step_method.clip_grad_norm(super()._clip_grad_norm, model)  # type: ignore[misc]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.step_method.grad_norm(super()._get_grad_norm, model, grad_norm)  # type: ignore[misc]

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations of a batch as Trainer counts them."""
        return self.step_method.floating_point_ops(super().floating_point_ops, inputs)  # type: ignore[misc]

    # ---- evaluation ----

    # `dataloader_drop_last` and `train_sampling_strategy` are for training alone: an evaluation without some rows would
    # score another split; one sorted by length would give its answers to other rows than predictions.csv and the
    # metrics of whole answers expect.

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        from torch.utils.data import SequentialSampler

        if getattr(self.args, buckets.KEY, buckets.RANDOM) == "group_by_length":
            return SequentialSampler(eval_dataset)
        return super()._get_eval_sampler(eval_dataset)  # type: ignore[misc]

    def get_eval_dataloader(self, *arguments: Any, **settings: Any) -> Any:
        """Return the loader of a validation split, without a row left out."""
        with patch.object(self.args, "dataloader_drop_last", False):
            return _dealt(super().get_eval_dataloader(*arguments, **settings))  # type: ignore[misc]

    def get_test_dataloader(self, *arguments: Any, **settings: Any) -> Any:
        """Return the loader of rows to predict, without a row left out."""
        with patch.object(self.args, "dataloader_drop_last", False):
            return _dealt(super().get_test_dataloader(*arguments, **settings))  # type: ignore[misc]

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **settings: Any) -> Any:
        """Evaluate as Trainer does, gathering from each process the rows of its batch that count."""
        from transformers import Seq2SeqTrainer

        averages = self.args.average_tokens_across_devices
        dealt = getattr(getattr(dataloader, "batch_sampler", None), "batch_sampler", None)
        if isinstance(dealt, Dealt):
            dataloader = rounds = _Rounds(dataloader)
            self.gather_function = lambda data: _gathered(self.accelerator, data, dealt.counts[rounds.given - 1])
            # A batch's loss is over its own labels: those of a process that counts nothing would be among all others'.
            averages = False
        elif self.args.world_size == 1 and isinstance(self, Seq2SeqTrainer):
            # Its own gathering lets a last, smaller batch's loss count as that of a whole one.
            self.gather_function = self.accelerator.gather_for_metrics
        with patch.object(self.args, "average_tokens_across_devices", averages):
            # It puts Trainer's own function for gathering back.
            found = super().evaluation_loop(dataloader, *arguments, **settings)  # type: ignore[misc]
        if self.examples is not None:
            self.examples.seen = found.predictions
        return found

    def _evaluate(self, *arguments: Any, **settings: Any) -> Any:
        stock = super()._evaluate  # type: ignore[misc]
        if self.interruption is None:
            return stock(*arguments, **settings)
        return self.interruption.keep_before(stock, *arguments, **settings)

    def make_up_evaluation(self) -> None:
        """Evaluate where Trainer would have evaluated at this step and its log has no entry of that."""
        logged = (entry for entry in self.state.log_history if "eval_loss" in entry or "eval_runtime" in entry)
        step, evaluates = self.state.global_step, due(self.args, self.state).should_evaluate
        if evaluates and all(entry["step"] != step for entry in logged):
            measured = self._evaluate(None, None)
            here = Path(self.args.output_dir) / f"checkpoint-{step}"
            if self._determine_best_metric(metrics=measured, trial=None) and here.is_dir():  # type: ignore[attr-defined]
                self.state.best_model_checkpoint = str(here)  # Trainer looks for it where it saves, which was before

    # ---- checkpoints ----

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        # An evaluation draws random numbers on the CPU. The checkpoint of an epoch's end holds the states before them,
        # so the evaluation comes after Trainer has restored those; one between two steps holds those after them.
        if self.args.eval_strategy == "epoch":
            self.make_up_evaluation()

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        if hasattr(self.train_loader, "save"):
            self.train_loader.save(output_dir)

    def train(self, resume_from_checkpoint: Any = None, **settings: Any) -> Any:
        """Train as the Trainer class does, and first remove what a kill left of the last checkpoint's rotation."""
        if self.args.should_save and isinstance(resume_from_checkpoint, str):
            self._finish_rotation(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **settings)  # type: ignore[misc]

    def _finish_rotation(self, last: Path) -> None:
        """Remove the checkpoints that were to go once `last` had its name; none where `last` is not the newest."""
        from transformers import TrainerState
        from transformers.trainer_utils import rotate_checkpoints, sort_checkpoints

        newest = sort_checkpoints(self.args.output_dir)[-1:]
        if not newest or Path(newest[0]) != last or not (last / STATE).is_file():
            return
        limit, of_stops = self.args.save_total_limit, self._of_stops()
        best = TrainerState.load_from_json(str(last / STATE)).best_model_checkpoint
        if last not in of_stops:
            _remove(of_stops)
        elif limit:
            limit += len(of_stops)
        with removed_whole():
            # By their times, as Trainer sorts them.
            rotate_checkpoints(self.args.output_dir, limit, best, use_mtime=True)

    def remove_stop_checkpoints(self) -> None:
        """Remove the checkpoints of stops once the trained model is in the run's folder."""
        _remove(self._of_stops())

    def _save_checkpoint(self, *given: Any, **settings: Any) -> None:
        of_stops = self._of_stops()
        limit, stopped = self.args.save_total_limit, self._between(self.state)
        # Trainer counts all checkpoints; those of stops are to come on top.
        with patch.object(self.args, "save_total_limit", limit + len(of_stops) + stopped if limit else limit):
            super()._save_checkpoint(*given, **settings)  # type: ignore[misc]
        if self.args.should_save and not stopped:
            _remove(of_stops)

    def _of_stops(self) -> list[Path]:
        """Return the checkpoints that were saved where none is due."""
        from transformers import TrainerState

        found = []
        for file in Path(self.args.output_dir).glob(f"checkpoint-*/{STATE}"):
            try:
                state = TrainerState.load_from_json(str(file))
            except (OSError, ValueError, LookupError, TypeError):
                continue
            if file.parent.name == f"checkpoint-{state.global_step}" and self._between(state):
                found.append(file.parent)
        return found

    def _between(self, state: Any) -> bool:
        return self.args.save_strategy != "best" and not due(self.args, state).should_save


def recipe_trainer(kind: type[Any] | None = None) -> type[Any]:
    """Return the subclass of a Trainer class (None: transformers' own) that a recipe is trained with."""
    from transformers import Trainer

    stock = kind or Trainer
    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__}
    return type(stock.__name__, (RecipeTrainer, stock), names)


def trainer_class(trainer: Any) -> type[Any]:
    """Return the Trainer class behind `RecipeTrainer`: the one that a task named."""
    return next(kind for kind in type(trainer).__mro__[1:] if not issubclass(RecipeTrainer, kind))


def due(args: Any, state: Any) -> TrainerControl:
    """Return what is due at a step, evaluation and checkpoint, by the callback that decides it in Trainer."""
    from transformers import TrainerControl
    from transformers.trainer_callback import DefaultFlowCallback

    control, flow = TrainerControl(), DefaultFlowCallback()
    if state.global_step:
        flow.on_step_end(args, state, control)
        # At the end of an epoch Trainer asks once more, for the strategies named epoch.
        if float(state.epoch or 0).is_integer() or state.global_step >= state.max_steps:
            flow.on_epoch_end(args, state, control)
    return control


def _remove(folders: list[Path]) -> None:
    with removed_whole():
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


# accelerate gives each process a batch of every N and fills the last ones up with rows from the beginning; what was
# gathered is then cut to the rows that there are, but the loss of a filled batch is a mean over the repeated rows too
# (accelerator.py, `gather_for_metrics`). Here each batch is one process's whole, as it would be one process's alone; a
# process that has none left takes part with one that counts nothing.


def _dealt(loader: Any) -> Any:
    """Deal each batch of several processes' loader to one of them whole."""
    from accelerate.data_loader import BatchSamplerShard

    shard: Any = getattr(loader, "batch_sampler", None)
    if not isinstance(shard, BatchSamplerShard) or shard.split_batches:
        return loader
    if not isinstance(shard.batch_sampler, Dealt):  # one that persistent workers keep was dealt before
        shard.batch_sampler = Dealt(shard.batch_sampler, shard.process_index, shard.num_processes)
        # As Trainer has it for its own sampler that knows the processes (trainer.py, `_get_dataloader`).
        shard.process_index, shard.num_processes, shard.even_batches = 0, 1, False
    return loader


class Dealt:
    """The batches of the process numbered `rank` among `size`: each `size`-th of `batches`, and of these as many as all
    have.

    Where the batches run out within a round, the processes without one get the first batch once more; `counts` has, for
    each round and process, the rows that count.
    """

    drop_last = False

    def __init__(self, batches: Any, rank: int, size: int) -> None:
        self._batches, self._rank, self._size = batches, rank, size
        self.batch_size = getattr(batches, "batch_size", None)
        self.counts: list[list[int]] = []

    def __len__(self) -> int:
        return -(-len(self._batches) // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        self.counts = []
        first: list[int] = []
        batches = iter(self._batches)
        while dealt := list(itertools.islice(batches, self._size)):
            first = first or dealt[0]
            missing = self._size - len(dealt)
            self.counts.append([*map(len, dealt), *[0] * missing])
            yield [*dealt, *[first] * missing][self._rank]

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch on."""
        if hasattr(self._batches, "set_epoch"):
            self._batches.set_epoch(epoch)


class _Rounds:
    """A data loader that knows how many batches it has given."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.given = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self.given += 1
            yield batch


def _gathered(accelerator: Any, data: Any, counts: list[int]) -> Any:
    """Return the first `counts[process]` rows of each process's tensors in `data`, in the order of the processes."""
    import torch
    from accelerate.utils import recursively_apply

    own, most = counts[accelerator.process_index], max(counts)

    def gather(tensor: Any) -> Any:
        rows = tensor[:own]
        every = accelerator.gather(torch.cat([rows, rows.new_zeros(most - own, *rows.shape[1:])]))
        return torch.cat([every[most * place : most * place + count] for place, count in enumerate(counts)])

    return recursively_apply(gather, data)
