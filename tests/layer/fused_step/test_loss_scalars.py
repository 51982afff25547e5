"""Single numbers beside a loss: stock's to the bit, and hardly a launch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments

from hf_mps.layer.fused_step import constants
from hf_mps.metal import simulator
from tests.layer.fused_step import families
from tests.layer.fused_step.conftest import Fused


def trainer(name: str, folder: Path) -> Any:
    model, rows = families.made(name)
    for number, row in enumerate(rows):
        if isinstance(row["labels"], list):
            row["labels"] = [-100] * (number % 5) + row["labels"][number % 5 :]
    settings = TrainingArguments(str(folder), per_device_train_batch_size=4, report_to="none", disable_tqdm=True)
    return Trainer(model=model, args=settings, train_dataset=rows, data_collator=families.default_data_collator)


@pytest.mark.parametrize("name", ["encoder", "decoder with LoRA"])
def test_labels_are_counted_as_ever_without_a_launch(name: str, tmp_path: Path, fused: Fused) -> None:
    made = trainer(name, tmp_path)
    samples = iter(made.get_train_dataloader())
    batches = [next(samples), next(samples)]
    device = torch.device("mps")
    expected = made._get_num_items_in_batch(batches, device)
    with fused():
        made._get_num_items_in_batch(batches, device)
        with simulator.counted() as counts:
            found = made._get_num_items_in_batch(batches, device)
    assert (counts.launches, counts.waits, counts.copies_in) == (0, 0, 0)
    assert (found.item(), found.dtype, found.device.type) == (expected.item(), expected.dtype, "mps")


def test_labels_that_were_changed_on_the_device_are_counted_there(tmp_path: Path, fused: Fused) -> None:
    made = trainer("decoder with LoRA", tmp_path)
    batch = next(iter(made.get_train_dataloader()))
    batch["labels"][0] = -100
    with fused():
        found = made._get_num_items_in_batch([batch], torch.device("mps"))
    assert found.item() == batch["labels"][:, 1:].ne(-100).sum().item()


def backward(accelerator: Any) -> tuple[int, torch.Tensor]:
    weight = torch.nn.Parameter(torch.arange(4.0, device="mps"))
    loss = weight.square().sum()
    with simulator.counted() as counts:
        accelerator.backward(loss)
    return counts.launches, weight.grad.cpu()


@pytest.mark.parametrize(("steps", "fewer"), [(1, 3), (2, 0)], ids=["whole", "accumulated"])
def test_a_loss_is_divided_where_that_changes_it(steps: int, fewer: int, fused: Fused) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    backward(accelerator)  # the first makes the number that the sentinel stopped-gpu counts in
    before, expected = backward(accelerator)
    with fused():
        backward(accelerator)
        after, found = backward(accelerator)
    assert torch.equal(found, expected)
    assert before - after == fewer, "the quotient, its gradient, and the one that a backward pass begins with"


def test_each_stream_of_torch_2_15_has_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(stream_id=0)
    monkeypatch.setattr(constants, "_current_stream", lambda: current)
    device = torch.device("mps")
    first = constants.number(5.0, torch.float32, device)
    current.stream_id = 3
    other = constants.number(5.0, torch.float32, device)
    assert other is not first, "made by work that this stream does not wait for"
    assert constants.place_of(torch.device("cpu")) == (torch.device("cpu"), 0)
    current.stream_id = 0
    assert constants.number(5.0, torch.float32, device) is first


def test_a_number_that_somebody_wrote_into_is_made_anew() -> None:
    device = torch.device("mps")
    first = constants.number(3.0, torch.float32, device)
    assert constants.number(3.0, torch.float32, device) is first
    first.add_(1)
    assert constants.number(3.0, torch.float32, device).item() == 3
    assert first.item() == 4
