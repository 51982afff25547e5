"""The checkpoint of a stop replaces no regular one, and is removed after the next regular one or the end of the run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from hf_mps.core.checkpoint_files import removed_whole
from hf_mps.finetune.run.missed_evaluation import due
from hf_mps.finetune.run.run_dir import STATE


class StopCheckpoints:
    """A part of a Trainer: `save_total_limit` counts only the checkpoints that are due, and each of these removes those
    of stops.

    A run that was stopped then keeps the checkpoints of the unbroken one. Where Trainer saves the best ones alone
    (`save_strategy: best`), all count.
    """

    args: Any
    state: Any

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
        with removed_whole():
            if last not in of_stops:
                _remove(of_stops)
            elif limit:
                limit += len(of_stops)
            rotate_checkpoints(self.args.output_dir, limit, best, use_mtime=True)

    def remove_stop_checkpoints(self) -> None:
        """Remove the checkpoints of stops once the trained model is in the run's folder."""
        with removed_whole():
            _remove(self._of_stops())

    def _save_checkpoint(self, *given: Any, **settings: Any) -> None:
        of_stops = self._of_stops()
        limit, stopped = self.args.save_total_limit, self._between(self.state)
        if limit:
            self.args.save_total_limit = limit + len(of_stops) + stopped
        try:
            super()._save_checkpoint(*given, **settings)  # type: ignore[misc]
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save and not stopped:
            with removed_whole():
                _remove(of_stops)

    def _of_stops(self) -> list[Path]:
        states = Path(self.args.output_dir).glob(f"checkpoint-*/{STATE}")
        return [file.parent for file in states if self._of_stop(file)]

    def _of_stop(self, file: Path) -> bool:
        """Whether a checkpoint, of which this is the state, was saved where none is due."""
        from transformers import TrainerState

        try:
            state = TrainerState.load_from_json(str(file))
        except (OSError, ValueError, LookupError, TypeError):
            return False
        return file.parent.name == f"checkpoint-{state.global_step}" and self._between(state)

    def _between(self, state: Any) -> bool:
        return self.args.save_strategy != "best" and not due(self.args, state).should_save


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
