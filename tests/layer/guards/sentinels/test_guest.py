"""Healthy programs that a sentinel could disturb go on as stock does, and what they show is of them alone."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_mps.core.releases import torch_release
from hf_mps.layer import guards
from hf_mps.layer.guards import SentinelNotice
from hf_mps.layer.guards.sentinels import stream
from tests.layer.guards import lightning_loops, loops


def found() -> list[object]:
    return [each["name"] for each in guards.found()]


def one_bad_batch(bad: float) -> list[Tensor]:
    """The weights after a plain loop in one batch of which the loss is `bad`, and no gradient is."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 2)
    layer.to("mps")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    for step in range(20):
        loss = layer(torch.ones(3, 4, device="mps")).square().mean()
        (loss + (bad if step == 4 else 0.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loops.weights(layer)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_plain_loop_is_warned_once_with_the_step_and_goes_on_as_stock(bad: float) -> None:
    with pytest.warns(SentinelNotice) as said:
        with_it = one_bad_batch(bad)
    (line,) = [str(each.message) for each in said]
    assert line.startswith(f"hf_mps: the loss is {bad} at optimizer step 5, and the training goes on; next: a lower")
    assert "HF_MPS_SENTINELS=stop ends a run there" in line
    with guards.suspended(kind="sentinel"):
        without = one_bad_batch(bad)
    assert loops.same(with_it, without)


def test_another_training_is_warned_of_the_same_again() -> None:
    for _ in range(2):
        with pytest.warns(SentinelNotice) as said:
            one_bad_batch(math.inf)
        assert len(said) == 1


def test_trainer_is_warned_once_and_keeps_the_users_callbacks(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = loops.trainer(tmp_path, loops.Diverging(3), max_steps=40, num_train_epochs=10)
        with guards.suspended(kind="sentinel"):
            stock = loops.trainer(tmp_path, loops.Diverging(3))
        kinds = [type(each) for each in run.callback_handler.callbacks]
        assert kinds == [type(each) for each in stock.callback_handler.callbacks]
        run.train()
    lines = [str(each.message) for each in told if each.category is SentinelNotice]
    assert len(lines) == 1
    assert lines[0].startswith("hf_mps: loss is nan at step 3 of 40, and the training goes on; next: a lower")
    assert "learning_rate (now 0.01)" in lines[0]
    assert run.state.global_step == 40


class Interrupting(nn.Module):
    """A model whose loss is NaN and whose second backward pass somebody ends with Ctrl-C or an error."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.error, self.batches = error, 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.batches += 1
        loss = self.weight.sum() * math.nan
        if self.batches == 2:
            loss.register_hook(self._end)
        return {"loss": loss, "logits": self.weight[None]}

    def _end(self, gradient: Tensor) -> None:
        raise self.error


def by_trainer(folder: Path, model: nn.Module | None) -> Any:
    run = loops.trainer(folder, model, save_strategy="steps", save_steps=2, logging_steps=500)
    run.train()
    return run


def by_accelerate(folder: Path, model: nn.Module | None) -> Any:
    accelerator = loops.new_accelerator()
    loops.accelerated(model, accelerator)
    accelerator.save_state(str(folder / "state"))
    return accelerator


def by_lightning(folder: Path, model: nn.Module | None) -> Any:
    pl = lightning_loops.library()
    run = lightning_loops.trainer(pl, folder, max_epochs=1)
    run.fit(lightning_loops.module(pl, _Attributes(model) if model is not None else None))
    return run


class _Attributes(nn.Module):
    """A model with its loss as an attribute, as transformers' have it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(**self.model(input_ids, labels))


def by_hand(folder: Path, model: nn.Module | None) -> Any:
    model = (loops.bert() if model is None else model).to("mps")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in loops.batches():
        moved = {name: each.to("mps") for name, each in batch.items() if isinstance(each, Tensor)}
        model(**moved)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("train", [by_trainer, by_accelerate, by_lightning, by_hand])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_of_a_training_that_was_interrupted_reaches_the_next(
    train: Callable[[Path, Any], Any], error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MPS_SENTINELS", "stop")
    kept = Interrupting(error)
    with pytest.raises((error, SystemExit)):
        train(tmp_path / "first", kept)
    assert kept.batches == 2
    train(tmp_path / "second", None)
    assert found() == []


def test_a_trainer_that_trains_again_begins_anew(tmp_path: Path) -> None:
    run = loops.trainer(tmp_path, num_train_epochs=2)
    run.train()
    first = stream.STREAM.series(run.optimizer)
    run.train()
    second = stream.STREAM.series(run.optimizer)
    assert first is not second
    assert second.steps == 8


def test_weights_of_a_training_that_was_given_up_are_freed() -> None:
    def broken() -> weakref.ref[Tensor]:
        weight = nn.Parameter(torch.ones(64, device="mps"))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: None)
        weight.square().sum().backward()
        stream.STREAM._before_update(optimizer)  # as Optimizer.step begins, and never ends
        return weakref.ref(weight)

    left = broken()
    gc.collect()
    assert left() is None


def test_gradients_with_a_graph_behind_them_leave_none_behind() -> None:
    """A gradient penalty by create_graph=True, in a loop that never clips."""
    weight = nn.Parameter(torch.ones(4, device="mps"))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    for _ in range(12):
        (weight**3).sum().backward(create_graph=True)
        penalty = weight.grad.square().sum()  # type: ignore[union-attr]
        penalty.backward()
        optimizer.step()
        weight.grad = None
    series = stream.STREAM.series(optimizer)
    assert not any(value.requires_grad for _, value, _ in (*series.losses, *series.norms))
    assert found() == []


def adversaries() -> list[Tensor]:
    """Two models that learn against each other: one's loss goes through both, and either clears its own gradients."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 4, device="mps"), nn.Linear(4, 1, device="mps")
    making = torch.optim.Adam(maker.parameters(), lr=1e-3)
    judging = torch.optim.Adam(judge.parameters(), lr=1e-3)
    for _ in range(40):
        noise = torch.randn(8, 4).to("mps")
        made = maker(noise)
        judge_loss = nn.functional.softplus(judge(made.detach())).mean() + nn.functional.softplus(-judge(noise)).mean()
        maker_loss = nn.functional.softplus(-judge(made)).mean()
        judge_loss.backward()
        judging.step()
        making.zero_grad()
        nn.functional.softplus(-judge(maker(noise))).mean().backward()
        making.step()
        judging.zero_grad()
        del maker_loss
    return loops.weights(maker)


def shared_loss() -> list[Tensor]:
    """One backward pass, two optimizers, one of them for weights on the CPU."""
    torch.manual_seed(0)
    body, head = nn.Linear(4, 4), nn.Linear(4, 2)
    body.to("mps")
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2) for each in (head, body)]
    for _ in range(20):
        (head(body(torch.ones(3, 4, device="mps")).cpu()).square().mean().to("mps")).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return loops.weights(body)


def on_two_devices() -> list[Tensor]:
    """One optimizer for a body on the device and a head on the CPU, clipped together."""
    torch.manual_seed(0)
    head, body = nn.Linear(4, 2), nn.Linear(4, 4).to("mps")
    optimizer = torch.optim.AdamW([*head.parameters(), *body.parameters()], lr=1e-2, foreach=False)
    loops.descend(lambda: head(body(torch.ones(3, 4, device="mps")).cpu()).square().mean(), optimizer, 20)
    return loops.weights(body) + loops.weights(head)


def converged() -> list[Tensor]:
    """A squared error that one batch brings to 1e-14, where float32 takes it no further."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 2).to("mps")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.2)
    loops.descend(lambda: (layer(torch.ones(3, 4, device="mps")) - 0.7).square().mean(), optimizer, 400)
    return loops.weights(layer)


def at_a_minimum() -> list[Tensor]:
    """A least-squares fit of rows that no line goes through: the loss comes to rest above zero."""
    torch.manual_seed(0)
    rows, goal = torch.randn(16, 2).to("mps"), torch.randn(16, 1).to("mps")
    layer = nn.Linear(2, 1).to("mps")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.3)
    loops.descend(lambda: (layer(rows) - goal).square().mean(), optimizer, 300)
    return loops.weights(layer)


def in_complex_numbers() -> list[Tensor]:
    """Weights of complex numbers beside real ones."""
    torch.manual_seed(0)
    turn, scale = nn.Parameter(torch.randn(4, dtype=torch.complex64).to("mps")), nn.Parameter(torch.ones(4).to("mps"))
    optimizer = torch.optim.SGD([turn, scale], lr=1e-2)
    loops.descend(lambda: (turn * scale).abs().square().sum(), optimizer, 20)
    return loops.weights(nn.ParameterList([turn, scale]))


def vector_of_one() -> list[Tensor]:
    """A loss of shape [1, 1]."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 1).to("mps")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    for _ in range(20):
        layer(torch.ones(1, 4, device="mps")).square().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return loops.weights(layer)


HEALTHY = [adversaries, shared_loss, on_two_devices, converged, at_a_minimum, in_complex_numbers, vector_of_one]


@pytest.mark.parametrize("training", HEALTHY)
def test_a_healthy_program_trains_as_stock_without_a_word(training: Callable[[], list[Tensor]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SentinelNotice)
        weights = training()
    drawn = torch.rand(3)
    with guards.suspended(kind="sentinel"):
        assert loops.same(weights, training())
        assert torch.equal(drawn, torch.rand(3))
    needless = [("stopped-gpu", "needless")] * (torch_release() >= (2, 15))  # that torch raises the error itself
    assert [(each.name, each.state) for each in guards.report().sentinels if each.state != "on"] == needless
