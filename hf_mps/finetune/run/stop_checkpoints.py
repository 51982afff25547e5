"""The checkpoint of a stop takes the place of none that is due, and is gone once the next of those is there."""

from __future__ import annotations

import copy
import json
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

    def _save_checkpoint(self, *given: Any, **settings: Any) -> None:
        states = Path(self.args.output_dir).glob(f"checkpoint-*/{STATE}")
        of_stops = [file.parent for file in states if self._of_stop(file)]
        limit, stopped = self.args.save_total_limit, self._between(self.state)
        if limit:
            self.args.save_total_limit = limit + len(of_stops) + stopped
        try:
            super()._save_checkpoint(*given, **settings)  # type: ignore[misc]
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save and not stopped:
            with removed_whole():
                for path in of_stops:
                    shutil.rmtree(path, ignore_errors=True)

    def _of_stop(self, file: Path) -> bool:
        """Whether a checkpoint, of which this is the state, was saved where none is due."""
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            state = copy.copy(self.state)
            state.global_step, state.epoch = stored["global_step"], stored["epoch"]
        except (OSError, ValueError, LookupError, TypeError):
            return False
        return file.parent.name == f"checkpoint-{state.global_step}" and self._between(state)

    def _between(self, state: Any) -> bool:
        return self.args.save_strategy != "best" and not due(self.args, state).should_save
