"""Two trainings with dropout, shuffled rows and a collator that hides some of their words at random, on the device.

Both go on from the last checkpoint that they find.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.layer.guards import loops
from tests.layer.guards.resume_loops import masked
from tests.resume.killing import Killer

EPOCHS, STEPS, EVERY = 4, 16, 3
"""Epochs of four steps, and the steps between two checkpoints: a checkpoint falls into an epoch, and at its end."""


def with_trainer(folder: Path, killer: Killer) -> dict[str, Any]:
    """transformers' Trainer as scripts use it: the last checkpoint is looked for, and gone on from."""
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Kill(TrainerCallback):  # type: ignore[misc]
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            killer.step()

    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        num_train_epochs=EPOCHS,
        learning_rate=1e-2,
        logging_steps=2,  # not a divisor of the checkpoints' steps
        eval_strategy="steps",
        eval_steps=EVERY,
        save_strategy="steps",
        save_steps=EVERY,
        save_total_limit=2,
        load_best_model_at_end=True,
        report_to="none",
        disable_tqdm=True,
    )
    rows = loops.rows()
    trainer = Trainer(
        model=loops.bert(dropout=0.3),
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows[:8],
        data_collator=masked,
        callbacks=[Kill()],
    )
    seed_device()
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    kept = ("step", "epoch", "loss", "grad_norm", "learning_rate", "eval_loss")
    logs = [{name: entry[name] for name in kept if name in entry} for entry in trainer.state.log_history]
    return {
        "from": last and Path(last).name,
        "weights": trainer.model.cpu().state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "logs": logs,
        "best": Path(trainer.state.best_model_checkpoint).relative_to(folder).as_posix(),
    }


def seed_device() -> None:
    """As torch.manual_seed does, but not in a process that was forked."""
    torch.mps.manual_seed(7)


class Progress:
    """Where a loop is, and what it has logged: registered with the Accelerator, as its documentation says."""

    def __init__(self) -> None:
        self.steps = 0
        self.logs: list[tuple[float, float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "logs": list(self.logs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.logs = state["steps"], list(state["logs"])


def with_accelerator(folder: Path, killer: Killer) -> dict[str, Any]:
    """A bare loop with numbered checkpoints and skip_first_batches, as Accelerate documents it."""
    from accelerate import skip_first_batches
    from accelerate.utils import ProjectConfiguration, set_seed

    set_seed(7)
    seed_device()
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = loops.new_accelerator(project_config=project)
    model = loops.bert(dropout=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    loader = torch.utils.data.DataLoader(
        loops.rows(),  # type: ignore[arg-type]
        batch_size=8,
        shuffle=True,
        collate_fn=masked,
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    found = list((folder / "checkpoints").glob("checkpoint_*"))
    if found:
        accelerator.load_state()
        project.iteration = progress.steps // EVERY
    begun = progress.steps
    for epoch in range(begun // 4, EPOCHS):
        skip = progress.steps - epoch * 4
        for batch in skip_first_batches(loader, skip) if skip else loader:
            loss = model.train()(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.steps += 1
            progress.logs.append((loss.item(), norm.item()))
            killer.step()
            if progress.steps % EVERY == 0:
                accelerator.save_state()
    return {
        "from": f"step {begun}" if found else None,
        "weights": {name: value.cpu() for name, value in model.state_dict().items()},
        "optimizer": optimizer.optimizer.state_dict(),
        "logs": progress.logs,
        "best": None,
    }
