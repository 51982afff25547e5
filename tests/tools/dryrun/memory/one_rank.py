"""One of several processes: trains a recipe, and writes down the most bytes that this rank held in its third step.

    torchrun --nproc_per_node 2 -m tests.tools.dryrun.memory.one_rank FOLDER RECIPE KEY=VALUE…

What it held as the step began are the sharded weights and the optimizer's state; what came and went in the step is of
PyTorch's profiler, which counts the CPU's allocator and knows nothing of this package.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, trainer

from hf_mps.distributed.world import World
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.run import runner
from hf_mps.tools.dryrun.memory import adjust

STEP = 3


class Watch(TrainerCallback):  # type: ignore[misc]
    """Profiles one step."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / f"rank{World.here().rank}.json"
        self.profile = torch.profiler.profile(profile_memory=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if state.global_step == STEP - 1:
            self.profile.start()
        elif state.global_step == STEP:
            self.profile.stop()
            stays = [*parts["model"].parameters(), *parts["model"].buffers()]
            stays += [each for one in parts["optimizer"].state.values() for each in one.values()]
            said = {"stays": held(stays), "passes": highest(self.profile)}
            self.file.write_text(json.dumps(said), encoding="utf-8")


def held(tensors: list[Any]) -> int:
    """Bytes of the storages of this rank's parts."""
    parts = [getattr(each, "_local_tensor", each).untyped_storage() for each in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in parts}.values())


def highest(profile: Any) -> int:
    """The most bytes that a profile saw at once of what was taken since it began."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


if __name__ == "__main__":
    trainer.DEFAULT_CALLBACKS.append(Watch(Path(sys.argv[1])))
    runner.run(load_recipe(sys.argv[2], sys.argv[3:]), adjust.estimate_fit)
