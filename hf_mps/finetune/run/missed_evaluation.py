"""The evaluation that a run was ended in is made up for when the run goes on, so that its log is the unbroken one's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainerControl


class MissedEvaluation:
    """A part of a Trainer: before the first step of a resumed run it makes up for an evaluation that was due at the
    checkpoint's step and is not in its log.

    An evaluation draws random numbers on the CPU. The checkpoint of an epoch's end holds the states before them, so
    the evaluation comes after Trainer has restored those; a checkpoint between two steps holds those after them.
    """

    args: Any
    state: Any

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        from hf_mps.finetune.run.callbacks import BeforeFirstStep

        super().__init__(*arguments, **settings)
        self.add_callback(BeforeFirstStep(self.make_up_evaluation))  # type: ignore[attr-defined]

    def make_up_evaluation(self) -> None:
        """Evaluate where Trainer would have evaluated at this step and its log has no entry of that."""
        logged = (entry for entry in self.state.log_history if "eval_loss" in entry or "eval_runtime" in entry)
        step, evaluates = self.state.global_step, due(self.args, self.state).should_evaluate
        if evaluates and all(entry["step"] != step for entry in logged):
            measured = self._evaluate(None, None)  # type: ignore[attr-defined]
            here = Path(self.args.output_dir) / f"checkpoint-{step}"
            if self._determine_best_metric(metrics=measured, trial=None) and here.is_dir():  # type: ignore[attr-defined]
                self.state.best_model_checkpoint = str(here)  # Trainer looks for it where it saves, which was before

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        if self.args.eval_strategy == "epoch":
            self.make_up_evaluation()


def due(args: Any, state: Any) -> TrainerControl:
    """Return what is due at a step, evaluation and checkpoint, by the callback that decides it in Trainer."""
    from transformers import TrainerControl
    from transformers.trainer_callback import DefaultFlowCallback

    control, flow = TrainerControl(), DefaultFlowCallback()
    if state.global_step:
        flow.on_step_end(args, state, control)
        if float(state.epoch or 0).is_integer() or state.global_step >= state.max_steps:
            flow.on_epoch_end(args, state, control)
    return control
