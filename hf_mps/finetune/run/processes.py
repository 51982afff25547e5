"""How many processes share a step: what a checkpoint says of it, and how another number of them goes on with the run.

The rows of a step stay what they were: Trainer counts steps, skips batches and sets the learning rate by steps, so that
all of these hold. A step's rows are consecutive ones of the epoch's order, however many processes share them
(accelerate's BatchSamplerShard deals out batches in turn).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.features.base import Plan
from hf_mps.finetune.features.batches import SIZE
from hf_mps.finetune.run.run_dir import STATE

KEY = "processes"
ACCUMULATION = "gradient_accumulation_steps"


class Shares(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Stores in each checkpoint how the run's first process group shared a step (among the callbacks' states)."""

    def __init__(self, processes: int = 1, batch: int = 0, accumulation: int = 1) -> None:
        self.processes = processes
        self.batch = batch
        """Rows of a process in one forward pass."""
        self.accumulation = accumulation

    @property
    def rows(self) -> int:
        """Rows of a step of all processes."""
        return self.processes * self.batch * self.accumulation

    @classmethod
    def of(cls, args: Any) -> Shares:
        """Those of transformers' TrainingArguments."""
        return cls(args.world_size, args.train_batch_size, args.gradient_accumulation_steps)

    @classmethod
    def stored(cls, state: dict[str, Any]) -> Shares | None:
        """Those of a checkpoint's trainer_state.json; None for one of an earlier release."""
        found = (state.get("stateful_callbacks") or {}).get(cls.__name__)
        return cls(**found["attributes"]) if found else None

    def state(self) -> dict[str, Any]:
        """The numbers as Trainer stores them."""
        return {"args": {}, "attributes": dict(self.__dict__)}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        stored = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        if stored:
            self.__dict__.update(stored["attributes"])
        state.stateful_callbacks[type(self).__name__] = self.state()


def go_on(plan: Plan, checkpoint: Path | None, processes: int) -> Plan:
    """The plan of a run that goes on from `checkpoint` in `processes` processes, which may be others than it began in.

    Raises UserError where they cannot share the rows of a step.
    """
    if checkpoint is None:
        return plan
    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    before = Shares.stored(state)
    if before is None or before.processes == processes:
        return plan
    share, rest = divmod(before.rows, processes)
    began = f"the run began in {_counted(before.processes, 'process')}, with {before.rows} rows in a step"
    if rest:
        allowed = [number for number in range(1, before.rows + 1) if before.rows % number == 0]
        raise UserError(
            f"{checkpoint.parent}: {began}, which {processes} processes cannot share; allowed:"
            f" {', '.join(map(str, allowed))} processes; next: one of these numbers, or --fresh"
        )
    batch = next(size for size in range(min(before.batch, share), 0, -1) if share % size == 0)
    passes = share // batch
    sharing = f"{passes} batches of {batch}" if passes > 1 else f"a batch of {batch}"
    changed = f"{began}; each has {sharing} now, so that the same rows are left; random draws (dropout) are others"
    choices = plan.choices | {
        KEY: Choice(processes, changed),
        "batch": Choice(batch, f"a step has the {before.rows} rows that it had"),
        "steps": Choice(state["max_steps"], "as the run began"),
    }
    arguments = plan.arguments | {SIZE: batch, ACCUMULATION: passes, "logging_steps": state["logging_steps"]}
    if arguments.get("max_steps", -1) > 0:  # of a stream, whose plan counts its rows by the steps of today
        arguments["max_steps"] = state["max_steps"]
    return replace(plan, choices=choices, arguments=arguments, bucket_pool_size=before.processes * before.batch)


def _counted(number: int, thing: str) -> str:
    return f"1 {thing}" if number == 1 else f"{number} {thing}es"
