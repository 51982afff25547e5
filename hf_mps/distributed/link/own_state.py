"""What each rank alone knows of a training: in every checkpoint beside its random state, and back where a run goes on.

Trainer stores the optimizer of the main process, and nothing of a communication hook: enough where all ranks have the
same. A checkpoint of another number of processes gives none back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def keep(trainer: Any, name: str, take: Callable[[], Any], give: Callable[[Any], None]) -> None:
    """Have every checkpoint of `trainer` hold what `take` returns on this rank, and hand it to `give` on a resume.

    It holds tensors, numbers, and lists and dicts of them. `give` is called once model and optimizer are prepared and
    the main process's optimizer is loaded.
    """
    args = trainer.args
    file = f"{name}_{args.process_index}.pt"
    saving, loading = trainer._save_rng_state, trainer._load_optimizer_and_scheduler

    def save(folder: str) -> None:
        saving(folder)
        torch.save({"processes": args.world_size, "state": take()}, Path(folder) / file)

    def load(checkpoint: str | None) -> None:
        loading(checkpoint)
        if checkpoint is None or not (place := Path(checkpoint) / file).is_file():
            return
        kept = torch.load(place, map_location="cpu", weights_only=True)
        if kept["processes"] == args.world_size:
            give(kept["state"])

    trainer._save_rng_state, trainer._load_optimizer_and_scheduler = save, load
