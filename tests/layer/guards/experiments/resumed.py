"""Runs that go on from a checkpoint, on a device that adds in one order: the unbroken run, to the last bit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, ViTConfig
from transformers import ViTForImageClassification as ViT
from transformers.trainer_utils import get_last_checkpoint

from tests.layer.guards import lightning_loops, loops


def resumed_trainer(folder: Path) -> bool:
    """A Trainer run resumed from its checkpoint has, to the last bit, the weights of one that was not stopped."""
    whole = loops.trained(
        folder / "whole", model=loops.bert(0.3), num_train_epochs=2, save_steps=3, save_strategy="steps"
    )
    torch.rand(5, device="mps")
    rest = loops.trainer(folder / "rest", model=loops.bert(0.3), num_train_epochs=2)
    rest.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-3"))
    return loops.same(whole, loops.weights(rest.model))


def resumed_accelerator(folder: Path) -> bool:
    """The same for accelerator.save_state and load_state."""
    found = []
    for again in (False, True):
        accelerator = loops.new_accelerator()
        model = loops.bert(dropout=0.3)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        torch.manual_seed(11 if again else 7)
        for step, batch in enumerate(loops.batches()):
            if step == 2:
                accelerator.load_state(folder) if again else accelerator.save_state(folder)
            if step < 2 and again:
                continue
            moved = {name: tensor.to("mps") for name, tensor in batch.items()}
            accelerator.backward(model.train()(**moved).loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(loops.weights(model))
    return loops.same(*found)


def resumed_lightning(folder: Path) -> bool:
    """A Lightning run resumed from the end of its first epoch is the unbroken one, dropout and shuffling on."""
    return all(lightning_loops.resumed(name, folder / name, 4) for name in lightning_loops.NAMES)


def resumed_lightning_epoch(folder: Path) -> bool:
    """One resumed within its second epoch is it too, with words that the collator hides at random."""
    return lightning_loops.resumed(lightning_loops.NAMES[0], folder, 6)


class Noise(Dataset[dict[str, Any]]):
    """Eight images of noise with a class each."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = torch.Generator().manual_seed(index)
        return {"pixel_values": torch.randn(3, 8, 8, generator=drawn), "labels": index % 2}


def images(folder: Path, **settings: Any) -> Trainer:
    """Trainer over a ViT, whose weights have other names on the hub."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    said = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.1,
        "save_strategy": "epoch",
        "report_to": "none",
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(**said | settings)
    model = ViT(ViTConfig(image_size=8, patch_size=4, **sizes))
    return Trainer(model, arguments, train_dataset=Noise(), eval_dataset=Noise())


def needs_other_names(folder: Path) -> None:
    """Skip the test where transformers (5.0) saves a ViT under the names that it has in memory."""
    from safetensors import safe_open

    model = images(folder).model
    model.save_pretrained(folder / "names")
    with safe_open(folder / "names" / "model.safetensors", "pt") as saved:
        if set(saved.keys()) == set(model.state_dict()):
            pytest.skip("this transformers saves a ViT under the names that it has in memory")


def resumed_images(folder: Path) -> bool:
    """A run over images goes on with the weights of its checkpoint."""
    needs_other_names(folder)
    whole, again = images(folder / "whole"), images(folder / "again")
    whole.train()
    again.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    return loops.same(loops.weights(whole.model), loops.weights(again.model))


def best_images(folder: Path) -> bool:
    """A run over images with load_best_model_at_end ends with the weights of the best, which is not the last here."""
    needs_other_names(folder)
    best = {"load_best_model_at_end": True, "eval_strategy": "epoch", "metric_for_best_model": "eval_loss"}
    run = images(folder, **best, learning_rate=1.0, num_train_epochs=3)
    run.train()
    assert run.state.best_model_checkpoint != str(folder / "checkpoint-6")
    return loops.same(loops.weights(run.model), loops.weights(ViT.from_pretrained(run.state.best_model_checkpoint)))


def resumed_log(folder: Path) -> bool:
    """A run resumed between two entries of its log has the entries of the whole run."""
    settings = {"num_train_epochs": 2, "logging_steps": 4, "save_strategy": "steps", "save_steps": 3}
    found = []
    for checkpoint in (None, str(folder / "checkpoint-3")):
        run = loops.trainer(folder, model=loops.bert(0.3), **settings)
        run.train(resume_from_checkpoint=checkpoint)
        found.append([each["loss"] for each in run.state.log_history if "loss" in each])
    return found[0] == found[1]


def resumed_last_step(folder: Path) -> bool:
    """A run resumed from the checkpoint of its last step, within an epoch, has its weights and takes no step more."""
    for number, ends in enumerate(({"max_steps": 6}, {"num_train_epochs": 1.5})):
        settings = {**ends, "save_strategy": "steps", "save_steps": 3, "logging_strategy": "no"}
        whole = loops.trained(folder / str(number), **settings)
        again = loops.trainer(folder / str(number), **settings)
        again.train(resume_from_checkpoint=True)
        if (again.state.global_step, again.state.num_train_epochs) != (6, 2):
            return False
        if not loops.same(whole, loops.weights(again.model)):
            return False
    return True


def resumed_early_stop(folder: Path) -> bool:
    """A run that early stopping ended is over where it is resumed with its callbacks' states, not an epoch later."""
    settings = {
        "num_train_epochs": 5,
        "learning_rate": 0.0,  # no evaluation is better than the first
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "restore_callback_states_from_checkpoint": True,
    }
    steps = []
    for checkpoint in (None, True):
        run = images(folder, **settings)
        run.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
        run.train(resume_from_checkpoint=checkpoint)
        steps.append(run.state.global_step)
    return steps == [6, 6]


def rest_of_an_epoch(folder: Path) -> bool:
    """What skip_first_batches leaves of the second epoch is what that epoch had, in its order."""
    from accelerate import skip_first_batches
    from accelerate.utils import DataLoaderConfiguration

    accelerator = loops.new_accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(12), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    assert first != second
    loader.set_epoch(1)
    return [batch.tolist() for batch in skip_first_batches(loader, 2)] == second[2:]


def torn_checkpoint(folder: Path) -> bool:
    """Of two checkpoints, the last without the end of a file, Trainer resumes from the one before."""
    settings = {"save_strategy": "steps", "save_steps": 2}
    loops.trained(folder, **settings)
    file = folder / "checkpoint-4" / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:1000])
    if get_last_checkpoint(str(folder)) != str(folder / "checkpoint-2"):
        return False
    run = loops.trainer(folder, **settings)
    run.train(resume_from_checkpoint=True)
    return bool(run.state.global_step == 4)


class DiskFills(TrainerCallback):  # type: ignore[misc]
    """Lets the disk be full from the third step on: Trainer's state, its last file, can no longer be written."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:

            def no_space(json_path: str) -> None:
                raise OSError(28, "No space left on device", json_path)

            state.save_to_json = no_space


def broken_off(folder: Path) -> bool:
    """A run that ends while it writes a checkpoint leaves none under its name, and the one before."""
    with contextlib.suppress(OSError):
        loops.trained(folder, callbacks=[DiskFills()], save_strategy="steps", save_steps=2)
    return [each.name for each in folder.glob("checkpoint-*")] == ["checkpoint-2"]
