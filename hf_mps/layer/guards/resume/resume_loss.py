"""resume-loss: Trainer's checkpoints carry the loss that was not logged yet, so that a resumed run logs the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.files import write_atomic
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.introspect import names_in
from hf_mps.layer.guards.resume import exact_on, in_recipe
from hf_mps.layer.guards.resume.resume_end import FROM

FILE = "unlogged_loss.json"
_WHOLE = "_hf_mps_whole_loss"


class ResumeLoss(Guard):
    """Writes the sum and the step of the last log entry into a file of its own, and puts both back.

    In a recipe's run the sum of what was logged too: `train_loss` is then the mean over the whole run, not over the
    steps of the last call, as it stays in scripts.
    """

    name = "resume-loss"
    what = (
        "a checkpoint between two log entries forgets the losses since the last, so the next entry of a resumed run is"
        " another mean"
    )
    issue = "transformers/trainer.py _inner_training_loop (tr_loss, _globalstep_last_logged)"
    until = "the oldest supported transformers keeps both in its checkpoints"
    patches = {
        # Trainer's logging, which is shown the sum, and the saving and loading of its random states.
        "transformers.trainer:Trainer._maybe_log_save_evaluate": "_logs",
        "transformers.trainer:Trainer._save_rng_state": "_saved",
        "transformers.trainer:Trainer._load_rng_state": "_loaded",
        "transformers.trainer:Trainer.log": "_logged",
    }

    def __init__(self) -> None:
        super().__init__()
        self._saves = False

    def applies(self) -> Choice[bool]:
        """Whether the installed Trainer's saving function never names the step of the last log entry."""
        if self._saves:
            return Choice(False, "this transformers keeps the step of the last log entry in its checkpoints")
        return Choice(True, "this transformers begins a new mean of the losses wherever it resumes")

    def concerns(self, module: ModuleType) -> bool:
        """Whether this Trainer's checkpoints lack the loss."""
        self._saves = "_globalstep_last_logged" in names_in(module.Trainer._save_checkpoint)
        return not self._saves

    def _logs(self, stock: Callable[..., Any], trainer: Any, tr_loss: Any, *args: Any, **kwargs: Any) -> Any:
        # 5.0 holds the sum in a variable of its loop: the first time that it is shown, the rest is added.
        rest = trainer.__dict__.pop("_hf_mps_rest", None)
        if rest is not None:
            tr_loss += rest
        trainer._hf_mps_sum = tr_loss
        return stock(trainer, tr_loss, *args, **kwargs)

    def _saved(self, stock: Callable[..., None], trainer: Any, output_dir: str) -> None:
        from hf_mps.layer.guards.resume import rng_state

        stock(trainer, output_dir)
        since, unlogged = trainer._globalstep_last_logged, getattr(trainer, "_hf_mps_sum", None)
        new = since < trainer.state.global_step or in_recipe()
        if exact_on(trainer.args.device.type) and unlogged is not None and new:
            rest = {"sum": float(unlogged), "logged": since, "total": trainer._total_loss_scalar}
            write_atomic(rng_state.own(Path(output_dir) / FILE), json.dumps(rest))
            self.acted(f"checkpoints also hold the loss since the last log entry, in {FILE}", aloud=False)

    def _loaded(self, stock: Callable[..., None], trainer: Any, checkpoint: str | None) -> None:
        from hf_mps.layer.guards.resume import rng_state

        stock(trainer, checkpoint)
        file = rng_state.own(Path(checkpoint or "") / FILE)
        if checkpoint is None or not exact_on(trainer.args.device.type) or not file.is_file():
            return
        rest = json.loads(file.read_text(encoding="utf-8"))
        trainer._globalstep_last_logged = rest["logged"]
        if in_recipe() and "total" in rest:
            trainer._total_loss_scalar = rest["total"]
            trainer.__dict__[_WHOLE] = True
        else:
            trainer._total_loss_scalar -= rest["sum"]  # train_loss is the mean of this call's steps alone
        if hasattr(trainer, "_tr_loss"):
            trainer._tr_loss += rest["sum"]
        else:
            trainer._hf_mps_rest = rest["sum"]

    def _logged(
        self, stock: Callable[..., None], trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any
    ) -> None:
        if "train_loss" in logs and in_recipe():
            self.safely(self._cover_run, trainer, logs)
        stock(trainer, logs, *args, **kwargs)

    def _cover_run(self, trainer: Any, logs: dict[str, float]) -> None:
        from hf_mps.layer.guards.resume import rng_state

        total = trainer._total_loss_scalar if trainer.__dict__.pop(_WHOLE, False) else None
        if total is None and trainer.__dict__.get(FROM):  # from a checkpoint of the last step nothing was restored
            file = rng_state.own(Path(trainer.__dict__[FROM]) / FILE)
            rest = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            total = rest["total"] + rest["sum"] if "total" in rest else None
        if total is not None:
            logs["train_loss"] = total / trainer.state.global_step


GUARD = ResumeLoss()
