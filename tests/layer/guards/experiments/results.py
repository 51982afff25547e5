"""Trainings whose numbers are wrong, without an error."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hf_mps.core.errors import UserError
from hf_mps.layer import guards
from hf_mps.layer.guards import GuardNotice
from hf_mps.layer.guards.numerics.indices import HUGE_LIMIT
from tests.layer.guards import lightning_loops, loops


def checkpointed_gradients(folder: Path) -> bool:
    """Gradients of a BERT with dropout are the same with and without gradient checkpointing."""
    found = []
    for checkpointing in (False, True):
        model = loops.bert(dropout=0.5).to("mps").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(1)
        ids = torch.arange(1, 13).view(2, 6).to("mps")
        model(input_ids=ids, labels=torch.tensor([0, 1]).to("mps")).loss.backward()
        found.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    return loops.same(*found)


def checkpointed_trainer(folder: Path) -> bool:
    """Trainer reaches the same weights with and without gradient checkpointing, dropout on."""
    plain, checkpointing = loops.bert(0.3), loops.bert(0.3)
    checkpointing.gradient_checkpointing_enable()
    return loops.same(*(loops.trained(folder, model=model, max_steps=2) for model in (plain, checkpointing)))


def reentrant_checkpoint(folder: Path) -> bool:
    """The older, reentrant form replays dropout as well."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to("mps")
    found = []
    for reentrant in (None, True):
        x = torch.ones(4, 8, device="mps", requires_grad=True)
        torch.manual_seed(2)
        y = layer(x) if reentrant is None else torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
        y.sum().backward()
        found.append([x.grad.cpu()])
    return loops.same(*found)


def read_too_soon(folder: Path) -> bool:
    """What is copied to the CPU is there when it is read, by Tensor.to and by Tensor.copy_."""
    there = torch.ones(4, device="mps")
    copies = [there.to("cpu", non_blocking=True), torch.empty(4).copy_(there, non_blocking=True)]
    return [each.tolist() for each in copies] == [[1.0] * 4] * 2


def needs_fp16() -> None:
    """Skip the test where accelerate itself has no fp16 on mps (1.10)."""
    import accelerate.accelerator  # noqa: F401

    if "accelerate" in guards.get("half-precision").verdict().reason:
        pytest.skip("this accelerate has no fp16 on mps")


def steep() -> nn.Module:
    """A BERT whose loss is so steep that GradScaler's first scale overflows in fp16."""
    model = loops.bert()
    model.classifier.weight.data *= 1000
    return model


def transposed() -> nn.Module:
    """A BERT whose linear layers hold transposed weights, as after `weight.data = other.T`."""
    model = loops.bert()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.T.contiguous().T
    return model


def transposed_trainer(folder: Path) -> bool:
    """Trainer trains transposed weights as it trains others, with an optimizer that is not fused."""
    settings = {"optim": "adamw_torch", "max_steps": 2}
    return loops.close(loops.trained(folder, model=transposed(), **settings), loops.trained(folder, **settings))


def transposed_accelerator(folder: Path) -> bool:
    """The same for an Accelerate loop, where the optimizer is made while the weights are on the CPU."""
    return loops.close(loops.accelerated(transposed()), loops.accelerated())


def transposed_loop(folder: Path) -> bool:
    """The same for a plain loop: the weights move."""
    weight = nn.Parameter(torch.ones(3, 4, device="mps").t())
    optimizer = torch.optim.Adam([weight], lr=0.1)
    weight.square().sum().backward()
    optimizer.step()
    return torch.allclose(weight.cpu(), torch.full((4, 3), 0.9))


def float32_norms(folder: Path) -> bool:
    """A model in half precision with layer norms in float32 trains as on the CPU."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(torch.bfloat16)
    layers[1].float()
    nn.init.uniform_(layers[1].weight)
    found = []
    for device in ("cpu", "mps"):
        model = copy.deepcopy(layers).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            model(torch.linspace(-1, 1, 32, dtype=torch.bfloat16).view(4, 8).to(device)).square().sum().backward()
        except RuntimeError:  # on a Mac the process ends
            return False
        optimizer.step()
        found.append([each.float() for each in loops.weights(model)])
    return loops.close(*found, tolerance=0.02)


def frozen_float32_norms(folder: Path) -> bool:
    """An Accelerate loop that trains a layer above a frozen model like that trains it as on the CPU."""
    torch.manual_seed(0)
    frozen = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), nn.LayerNorm(8)).requires_grad_(False)
    nn.init.uniform_(frozen[1].weight)
    layers = nn.Sequential(*frozen, nn.Linear(8, 2, dtype=torch.bfloat16))
    rows = torch.linspace(-1, 1, 32, dtype=torch.bfloat16).view(4, 8)
    found = []
    for cpu in (True, False):
        accelerator = loops.new_accelerator(cpu=cpu)
        model = accelerator.prepare_model(copy.deepcopy(layers))
        found.append([model(rows.to(accelerator.device)).float().cpu()])
    loops.forget_accelerators()
    return loops.close(*found, tolerance=0.02)


def lightning_loop(folder: Path) -> bool:
    """Lightning trains transposed weights as it trains others."""
    pl = lightning_loops.library()

    class Plain(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return (batch @ self.weight).square().sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    found = []
    for weight in (torch.ones(3, 4).t(), torch.ones(4, 3)):
        model = Plain(weight)
        run = lightning_loops.trainer(pl, folder, max_steps=2)
        run.fit(model, torch.utils.data.DataLoader([torch.ones(4)] * 2))
        found.append(loops.weights(model))
    return loops.close(*found)


def stacked_lstm(folder: Path) -> bool:
    """Where dropout cuts layers apart no gradient comes through, in one direction and in two, batch first or not."""
    right = []
    for both in (False, True):
        layer = nn.LSTM(4, 4, num_layers=3, dropout=0.999999, bidirectional=both, batch_first=both).to("mps").train()
        x = torch.ones(3, 2, 4, device="mps", requires_grad=True)
        out, (hidden, _) = layer(x)
        out.sum().backward()
        assert x.grad is not None
        right.append(bool((x.grad == 0).all()) and hidden.shape == (3 * (1 + both), 2 + both, 4))
    return all(right)


def numeric_lstm(folder: Path) -> bool:
    """The gradient is the function's: central differences with the same dropout masks."""
    torch.manual_seed(0)
    layer = nn.LSTM(4, 4, num_layers=2, dropout=0.5).to("mps").train()
    x = torch.randn(3, 2, 4).to("mps")

    def loss(value: Tensor) -> Tensor:
        torch.mps.manual_seed(42)
        return layer(value)[0].sum()

    analytic = torch.autograd.functional.jacobian(loss, x).flatten()[0].item()
    step = torch.zeros_like(x)
    step.view(-1)[0] = 1e-2
    numeric = (loss(x + step) - loss(x - step)).item() / 2e-2
    return abs(analytic - numeric) < 0.02 * abs(numeric)


TALL, WIDE = HUGE_LIMIT // 1024 + 1, 1024


def huge() -> nn.Parameter:
    """A parameter of more than 2^31 elements that takes 4 KB: its rows are one row."""
    return nn.Parameter(torch.ones(1, WIDE, device="mps").expand(TALL, WIDE))


def huge_table(folder: Path) -> bool:
    """A loop that trains on the last row of a huge table gets that row, or is refused before."""
    table = huge()
    try:
        torch.optim.SGD([table])
    except UserError:
        return True
    return nn.functional.embedding(torch.tensor([0, TALL - 1], device="mps"), table).sum(1).tolist() == [WIDE, WIDE]


class FrozenTable(nn.Module):
    """A huge table that is not trained, and a layer that is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = huge().requires_grad_(False)
        self.layer = nn.Linear(1, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.embedding(rows, self.table)


def frozen_table(folder: Path) -> bool:
    """The same in an Accelerate loop for a table that is only read, which no optimizer has."""
    try:
        model = loops.new_accelerator().prepare_model(FrozenTable())
    except UserError:
        return True
    return bool((model(torch.tensor([TALL - 1], device="mps")) == 1).all())


def told(name: str, said: list[warnings.WarningMessage]) -> bool:
    """Whether a guard's line is among the warnings."""
    return any(issubclass(each.category, GuardNotice) and f"({name}:" in str(each.message) for each in said)
