"""A training step of a target, driven by Trainer's own loop: forward, loss, backward, clipping, optimizer."""

from __future__ import annotations

import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map_only
from transformers import DynamicCache, TrainerCallback
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError
from hf_mps.core.text import summary
from hf_mps.finetune.features import cuda_graphs
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.run import failures
from hf_mps.finetune.run.callbacks import Stopwatch
from hf_mps.finetune.run.stages import PreparedRun, make_plan, make_trainer
from hf_mps.finetune.run.trainer import StepMethod
from hf_mps.finetune.smoke.fake import FakeScalars
from hf_mps.finetune.tasks import Prepared
from hf_mps.layer import guards
from hf_mps.layer.fused_step.model_code import CACHES
from hf_mps.layer.guards.catalogue import GUARDS
from hf_mps.tools.dryrun.meta_model import ignore_moves, make_fake
from hf_mps.tools.dryrun.modules import BETWEEN, CLIPPING, FORWARD, GENERATION, OPTIMIZER, ModuleTracker

# What changes the batch before the device sees it stays on; the other guards look at values, which fake tensors lack.
WITHOUT_VALUES = ("float64-columns", "pin-memory", "nan-hidden", "one-device")

# A temporary folder that the user did not name: errors speak of the rows in it.
_MADE_UP = re.compile(r"\S*hf-mps-smoke-\w+(/[\w.-]+)*")
_PACKAGE = str(Path(__file__).resolve().parents[2])
_LOSS = str(Path(_PACKAGE, "finetune", "loss", "chunked.py"))
# What a fake step calls in place of torch's own functions, and raises what those would.
_FAKE = str(Path(_PACKAGE, "finetune", "smoke", "fake.py"))


# An exception, since Trainer's loop logs, saves and evaluates behind its last step whatever a callback asks for.
class _Done(Exception):
    """Ends Trainer's loop after the last step that was asked for, before it logs and evaluates."""


@dataclass
class TrainingStep:
    """A trainer and the batches of one optimizer step, on the CPU as collated. `fake` is the mode of fake tensors.

    `tracker` follows phase and module; `facts` say what was made up, each with its reason. `numbers` are the tensors of
    fake batches, each with the real one.
    """

    trainer: Any
    batches: list[Any]
    tracker: ModuleTracker
    fake: Any = None
    facts: dict[str, Choice[Any]] = field(default_factory=dict)
    numbers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def model(self) -> Any:
        """Return the model that trains."""
        return self.trainer.model

    def run(
        self,
        steps: int = 1,
        *,
        after_backward: Callable[[Any], None] | None = None,
        after_step: Callable[[int], None] | None = None,
        before: Callable[[], None] | None = None,
        watch: Sequence[Any] = (),
    ) -> None:
        """Take `steps` optimizer steps, with the context managers `watch` around each operator.

        `before` is called once the optimizer is made, in the phase of its step.

        It goes through the batches in turn, and begins again where they are too few. `after_backward` gets the loss of
        each batch, `after_step` the number of the step, from 1.
        """
        trainer, tracker = self.trainer, self.tracker
        caller = _StepCallback(tracker, steps, after_step, before)
        count = steps * trainer.args.gradient_accumulation_steps
        batches = [self.batches[number % len(self.batches)] for number in range(count)]
        trainer.train_loader = batches
        if self.fake is None:  # Accelerate's loader moves them
            # As a loader makes batches: of new tensors, that nobody keeps.
            anew: Any = partial(tree_map_only, torch.Tensor, torch.Tensor.clone)
            loader: Any = torch.utils.data.DataLoader(batches, batch_size=None, collate_fn=anew)  # type: ignore[arg-type]
            trainer.train_loader = trainer.accelerator.prepare(loader)
        trainer.add_callback(caller)
        with suppress(_Done), ExitStack() as stack:
            stack.callback(setattr, tracker, "phase", BETWEEN)
            stack.callback(trainer.remove_callback, caller)
            watched = patch.object(trainer, "step_method", _Watched(self, after_backward))
            for context in (watched, *self._tensors(), tracker, *watch):
                stack.enter_context(context)
            trainer.train()

    def _tensors(self) -> list[Any]:
        """Return the context managers in which a step of fake tensors runs."""
        if self.fake is None:
            return []
        off = [name for name in GUARDS.names if name not in WITHOUT_VALUES]
        found = [guards.suspended(*off), guards.suspended(kind="sentinel"), self.fake, FakeScalars(self.numbers)]
        if generates(self.trainer):
            # TRL logs the extremes of its measures with NaN among them, and leaves out what a trace does not know.
            extremes = (("nanmin", torch.min), ("nanmax", torch.max))
            found += [patch(f"trl.trainer.grpo_trainer.{name}", function) for name, function in extremes]
        return found


class _Watched(StepMethod):
    """Takes steps as the trainer's method does, and tells the tracker which phase each of its parts is."""

    def __init__(self, step: TrainingStep, after_backward: Callable[[Any], None] | None) -> None:
        self._step, self._method, self._after_backward = step, step.trainer.step_method, after_backward
        self.clip_grad_norm, self.grad_norm = self._method.clip_grad_norm, self._method.grad_norm  # type: ignore[method-assign]

    def training_step(self, stock: Callable[..., Any], model: Any, inputs: Any, items: Any) -> Any:
        """Return the loss of a batch; a trainer that generates first does so in a phase of its own."""
        trainer, tracker = self._step.trainer, self._step.tracker
        # At the first batch of an optimizer step.
        if generates(trainer) and trainer._step % trainer.args.gradient_accumulation_steps == 0:
            tracker.phase = GENERATION
            first_and_last_pass(trainer, trainer._prepare_input(inputs))
        tracker.phase = FORWARD
        loss = self._method.training_step(stock, model, inputs, items)
        tracker.phase = CLIPPING
        if self._after_backward is not None:
            self._after_backward(loss)
        return loss


@dataclass(eq=False)  # Trainer takes a callback away by comparing
class _StepCallback(TrainerCallback):  # type: ignore[misc]
    """Tells the phases apart, and ends the loop."""

    tracker: ModuleTracker
    steps: int
    after: Callable[[int], None] | None
    before: Callable[[], None] | None
    taken: int = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self.before is not None:
            self.tracker.phase = OPTIMIZER
            self.before()
            self.tracker.phase = BETWEEN

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.tracker.phase = OPTIMIZER

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.tracker.phase = BETWEEN

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.taken += 1
        if self.after is not None:
            self.after(self.taken)
        if self.taken >= self.steps:
            raise _Done


def make(
    run: PreparedRun, device: Choice[str], *, fake: Any = None, changes: Mapping[str, Any] | None = None
) -> TrainingStep:
    """Return the training step of `run` on `device`: the runner's own plan and trainer, without their files and logs.

    `fake` is a FakeTensorMode whose tensors the model gets; `changes` are further training arguments. The caller gives
    it `batches`. Raises UserError for what the runner refuses.
    """
    # Trainer makes its folder, and writes nothing there.
    with tempfile.TemporaryDirectory(prefix="hf-mps-target-") as folder:
        plan, prepared = make_plan(run, Choice(Path(folder), "nothing is written"), device), run.prepared
        arguments = plan.arguments | QUIET | dict(changes or {})
        # TrainingArguments refuses a best model where nothing is evaluated or saved.
        for name in ("load_best_model_at_end", "metric_for_best_model", "greater_is_better"):
            arguments.pop(name, None)
        # Nothing is recorded of a step that is looked at.
        choices = {name: choice for name, choice in plan.choices.items() if name != cuda_graphs.KEY}
        plan = replace(plan, arguments=arguments, choices=choices)
        models = models_of(prepared)
        for model in models:
            # Accelerate returns a model that it has prepared as it is: on another step's device, with its autocast.
            model.__dict__.pop("_is_accelerate_prepared", None)
            if "_original_forward" in model.__dict__:
                model.forward = model.__dict__.pop("_original_forward")
        if fake is not None:
            ignore_moves(models)
        # The trainer may add adapters to the model, which have to be without weights too.
        with torch.device("meta") if fake is not None else nullcontext():
            trainer = make_trainer(plan, prepared, Stopwatch())
        if fake is not None:
            make_fake([trainer.model, *models], fake, device.value)
    facts = {"precision": plan.choices["precision"]}
    if generates(trainer):
        reason = "of each completion the first and the last are looked at; those between are like the last"
        facts["generation"] = Choice(f"2 of {trainer.args.max_completion_length} passes", reason)
    return TrainingStep(trainer, [], ModuleTracker(), fake, facts)


QUIET: dict[str, Any] = {
    **dict.fromkeys(("eval_strategy", "save_strategy", "logging_strategy"), "no"),
    **dict.fromkeys(("eval_on_start", "auto_find_batch_size"), False),
    "report_to": "none",
    "max_steps": 1000,
    "disable_tqdm": True,
    "resume_from_checkpoint": None,
    "dataloader_num_workers": 0,
}


def models_of(prepared: Prepared) -> list[Any]:
    """Return the model that trains, and any further one that its trainer is given (a reference model)."""
    others = [each for each in prepared.trainer_settings.values() if isinstance(each, torch.nn.Module)]
    return [prepared.model, *others]


@contextmanager
def model_errors(resolved: ResolvedRecipe) -> Iterator[None]:
    """Raise UserError in place of an error that the code of the recipe's model made; every other one goes on."""
    try:
        yield
    except UserError as error:
        raise UserError(_MADE_UP.sub("the made-up rows", str(error))) from error
    except RunError:
        raise
    except Exception as error:
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        files = [file for file in frames if file != _FAKE]
        # An architecture's code, its call, or a Trainer that it does not suit; below the loss in chunks it is our own.
        ours = files[-1].startswith(_PACKAGE) or _LOSS in files
        if failures.describe(error) is not None or ours:
            raise
        recipe = resolved.recipe
        problem = f"it cannot take a step of the task {recipe.task}: {summary(error)}"
        raise UserError(f"model {recipe.model}: {problem}; next: --debug shows where") from error


# A trace has no numbers to draw tokens by, so of what a trainer generates within a step (GRPO's completions) the first
# pass and the last one are looked at: the last has the longest cache of keys and values, which is what generation needs
# most memory for, and all passes between are like it.


def generates(trainer: Any) -> bool:
    """Return whether a step of `trainer` begins with completions of its prompts: GRPO's do, every so many batches."""
    return getattr(trainer.args, "steps_per_generation", None) is not None


@torch.no_grad()
def first_and_last_pass(trainer: Any, batch: Mapping[str, Any]) -> None:
    """Run the prompts of `batch` (input_ids, attention_mask) and a completion's last token, with all that is cached.

    The batch's last tokens count as the completion. All batches that a generation is for are run together.
    """
    from trl.models.utils import disable_gradient_checkpointing

    args, model = trainer.args, trainer.model
    ids, mask = (batch[name].repeat(args.steps_per_generation, 1) for name in ("input_ids", "attention_mask"))
    said = min(args.max_completion_length, ids.shape[1] - 1)
    cache = DynamicCache(config=model.config)
    cached = {CACHES[hasattr(CausalLMOutputWithPast, CACHES[1])]: cache, "use_cache": True}
    with disable_gradient_checkpointing(model, args.gradient_checkpointing_kwargs):
        prompt = {"input_ids": ids[:, :-said], "attention_mask": mask[:, :-said]}
        model(**prompt, **cached, logits_to_keep=1)
        for layer in cache.layers:
            if said > 1 and getattr(layer, "keys", None) is not None:  # (rows, heads, length, width)
                sizes = ((*states.shape[:-2], said - 1, states.shape[-1]) for states in (layer.keys, layer.values))
                layer.update(*map(layer.keys.new_zeros, sizes))
        last = {"input_ids": ids[:, -1:], "attention_mask": mask}
        logits = model(**last, **cached, logits_to_keep=1).logits[:, -1]
        scores = logits.to(copy=True, dtype=torch.float32) / args.temperature
        torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), num_samples=1)
