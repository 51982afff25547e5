"""Parts of trainers, each mixed into more than one: what differs from TRL's, and a baseline measured on the way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hf_mps.metrics.selection import Baseline, of_log


class MeasuredBefore:
    """A part of a Trainer: the evaluation before the first step (`eval_on_start`) fills the empty baseline `untrained`.

    None is no such baseline.
    """

    state: Any

    def __init__(self, *arguments: Any, untrained: Baseline | None = None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._untrained = untrained

    def evaluate(self, *arguments: Any, **settings: Any) -> dict[str, float]:
        """Evaluate as Trainer does."""
        measured: dict[str, float] = super().evaluate(*arguments, **settings)  # type: ignore[misc]
        self._fill()
        return measured

    def _evaluate(self, trial: Any, ignore_keys: Any, skip_scheduler: bool = False) -> dict[str, float]:
        # Before the first step alone the scheduler is skipped, and a resumed run took its own long ago.
        if skip_scheduler and self.state.global_step and self._fill():
            return {}
        return super()._evaluate(trial, ignore_keys, skip_scheduler)  # type: ignore[misc,no-any-return]

    def _fill(self) -> bool:
        """Fill the baseline from the log, where a resumed run finds what its first part had; return whether it is."""
        if self._untrained is None:
            return False
        if not self._untrained.metrics:
            before: dict[str, Any] = next((entry for entry in self.state.log_history if entry.get("step") == 0), {})
            self._untrained.metrics.update(of_log(before))
        return bool(self._untrained.metrics)


class KeptInCheckpoints:
    """A part of a Trainer: a checkpoint also holds what the trainer has in memory alone, in a file of each process.

    `_kept` returns it in types that torch.load reads with weights_only, None where there is nothing; `_put_back` takes
    it, on the trainer's device, where a run resumes.
    """

    KEPT: ClassVar[str]
    """The file's name, with a place for the number of the process."""
    args: Any

    def _kept(self) -> dict[str, Any] | None:
        raise NotImplementedError

    def _put_back(self, kept: dict[str, Any]) -> None:
        raise NotImplementedError

    def _save_rng_state(self, output_dir: str) -> None:
        import torch

        super()._save_rng_state(output_dir)  # type: ignore[misc]
        kept = self._kept()
        if kept is not None:
            torch.save(kept, self._kept_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        import torch

        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        if checkpoint is not None and (file := self._kept_file(checkpoint)).is_file():
            self._put_back(torch.load(file, map_location=self.args.device, weights_only=True))

    def _kept_file(self, folder: str) -> Path:
        return Path(folder, self.KEPT.format(self.args.process_index))


@dataclass
class PlainArguments:
    """TrainingArguments' defaults for a configuration of TRL's, which switches on bf16 and gradient checkpointing."""

    bf16: bool = False
    gradient_checkpointing: bool | None = None


class QuietTrl:
    """A part of TRL's trainers: none sends telemetry (trl/trainer/base_trainer.py) or writes a model card."""

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Do nothing: the runner writes the model card."""

    def _send_telemetry(self) -> None:
        """Do nothing."""
