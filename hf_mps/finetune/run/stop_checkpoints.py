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


def install(trainer: Any) -> None:
    """Let `save_total_limit` count only the checkpoints that are due, and each of these remove those of stops.

    A run that was stopped then keeps the checkpoints of the unbroken one. Where Trainer saves the best ones alone
    (`save_strategy: best`), all count.
    """
    save, args = trainer._save_checkpoint, trainer.args

    def saved(*given: Any, **settings: Any) -> None:
        of_stops = [
            file.parent for file in Path(args.output_dir).glob(f"checkpoint-*/{STATE}") if _of_stop(trainer, file)
        ]
        limit, stopped = args.save_total_limit, _between(trainer, trainer.state)
        if limit:
            args.save_total_limit = limit + len(of_stops) + stopped
        try:
            save(*given, **settings)
        finally:
            args.save_total_limit = limit
        if args.should_save and not stopped:
            with removed_whole():
                for path in of_stops:
                    shutil.rmtree(path, ignore_errors=True)

    trainer._save_checkpoint = saved


def _of_stop(trainer: Any, file: Path) -> bool:
    """Whether a checkpoint, of which this is the state, was saved where none is due."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        state = copy.copy(trainer.state)
        state.global_step, state.epoch = stored["global_step"], stored["epoch"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return file.parent.name == f"checkpoint-{state.global_step}" and _between(trainer, state)


def _between(trainer: Any, state: Any) -> bool:
    return trainer.args.save_strategy != "best" and not due(trainer.args, state).should_save
