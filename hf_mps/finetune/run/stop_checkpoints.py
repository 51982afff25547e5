"""The checkpoint of a stop takes the place of none that is due, and is gone once the next of those is there."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from hf_mps.core.checkpoint_files import removed_whole
from hf_mps.finetune.run.missed_evaluation import due
from hf_mps.finetune.run.run_dir import STATE, checkpoints


class StopCheckpoints:
    """A part of a Trainer: `save_total_limit` counts only the checkpoints that are due, and each of these removes those
    of stops.

    A run that was stopped then keeps the checkpoints of the unbroken one. Where Trainer saves the best ones alone
    (`save_strategy: best`), all count.
    """

    args: Any
    state: Any

    def _save_checkpoint(self, *given: Any, **settings: Any) -> None:
        of_stops = [path for path in checkpoints(Path(self.args.output_dir)) if not self._is_due(path)]
        limit, stopped = self.args.save_total_limit, not self._is_due()
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

    def _is_due(self, checkpoint: Path | None = None) -> bool:
        """Whether Trainer saves at the step of a checkpoint, or at the one where it is."""
        state = copy.copy(self.state)
        if checkpoint is not None:
            stored = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
            state.global_step, state.epoch = stored["global_step"], stored["epoch"]
        return self.args.save_strategy == "best" or bool(due(self.args, state).should_save)
