"""The evaluation that a run was ended in is made up for when the run goes on, so that its log is the unbroken one's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback


class MissedEvaluation(TrainerCallback):  # type: ignore[misc]
    """Evaluates before the first step where an evaluation was due at the checkpoint's step and its log has none.

    An evaluation draws random numbers on the CPU. Of one behind an epoch the checkpoint holds the states before them,
    and the evaluation follows when Trainer has restored those; of one between two steps those after them.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._load = trainer._load_rng_state
        trainer._load_rng_state = self._loaded
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.eval_strategy == "steps" or state.global_step >= state.max_steps:
            self._make_up()

    def _loaded(self, checkpoint: str | None) -> None:
        self._load(checkpoint)
        if self._trainer.args.eval_strategy == "epoch":
            self._make_up()

    def _make_up(self) -> None:
        trainer, state = self._trainer, self._trainer.state
        logged = (entry for entry in state.log_history if "eval_loss" in entry or "eval_runtime" in entry)
        if _due(trainer.args, state) and all(entry["step"] != state.global_step for entry in logged):
            measured = trainer._evaluate(None, None)
            here = Path(trainer._get_output_dir(None)) / f"checkpoint-{state.global_step}"
            if trainer._determine_best_metric(metrics=measured, trial=None) and here.is_dir():
                state.best_model_checkpoint = str(here)  # Trainer looks for it where it saves, which was before


def _due(args: Any, state: Any) -> bool:
    """Whether Trainer evaluates at this step (DefaultFlowCallback)."""
    if not state.global_step:
        return False
    if args.eval_strategy == "steps":
        return bool(state.global_step % state.eval_steps == 0 and args.eval_delay <= state.global_step)
    over = float(state.epoch or 0).is_integer() or state.global_step >= state.max_steps
    return bool(args.eval_strategy == "epoch" and over and args.eval_delay <= state.epoch)
