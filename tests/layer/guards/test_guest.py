"""A program that needs no help sees nothing of this layer: arguments, callbacks, screen and warnings are stock's."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import hf_mps
from hf_mps.core.notices import ignoring
from hf_mps.layer.guards import SentinelNotice
from tests.layer.guards import lightning_loops, loops
from tests.layer.guards.experiments import failures


class Failing(torch.nn.Module):
    """A model that ends the second step with an error."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(loops.LENGTH, 1)
        self.steps = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.steps += 1
        if self.steps == 2:
            raise ZeroDivisionError
        return {"loss": self.layer(input_ids.float()).square().mean()}


@pytest.mark.parametrize("fails", [False, True], ids=["to its end", "to an error"])
def test_a_trainer_leaves_its_arguments_as_they_were_given(fails: bool, tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), save_strategy="no", report_to="none", disable_tqdm=True)
    stored = args.to_dict()
    run = Trainer(model=Failing() if fails else loops.bert(), args=args, train_dataset=loops.rows())
    if fails:
        with pytest.raises(ZeroDivisionError):
            run.train()
    else:
        run.train()
    assert run.args is args
    run.save_model()
    saved = torch.load(tmp_path / "training_args.bin", weights_only=False)
    for found in (args, saved):
        assert not [name for name in vars(found) if "hf_mps" in name]
        assert found.to_dict() == stored
        assert (found.dataloader_pin_memory, found.logging_nan_inf_filter) == (True, True)


@pytest.mark.parametrize("given", [True, False])
def test_a_diverging_training_ends_as_stock_does_whatever_the_filter(given: bool, tmp_path: Path) -> None:
    run = loops.trainer(tmp_path, loops.Diverging(), logging_nan_inf_filter=given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SentinelNotice)
        run.train()
    assert run.state.global_step == 4
    assert [math.isfinite(loss) for loss in failures.losses(run)] == [True, given, given, given]


def test_the_callbacks_of_a_trainer_are_stocks(tmp_path: Path) -> None:
    class Own(TrainerCallback):  # type: ignore[misc]
        pass

    def kinds(run: Any) -> list[str]:
        return [type(each).__name__ for each in run.callback_handler.callbacks]

    seen = []
    for layer in (nullcontext, loops.stock):
        with layer():
            run = loops.trainer(tmp_path / layer.__name__, save_strategy="steps", save_steps=4)
            steps = [kinds(run), run.callback_handler.callback_list]
            run.add_callback(Own)
            steps += [kinds(run), type(run.pop_callback(Own)).__name__]
            run.remove_callback(PrinterCallback)
            run.train()
            state = json.loads((tmp_path / layer.__name__ / "checkpoint-4" / "trainer_state.json").read_text())
            steps += [kinds(run), state["stateful_callbacks"], sorted(state), sorted(state["log_history"][0])]
            seen.append(steps)
    assert seen[0] == seen[1]


def test_a_loader_and_an_optimizer_are_as_they_were(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, device="mps"))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    loader: Any = torch.utils.data.DataLoader([1.0, 2.0], pin_memory=True)  # type: ignore[arg-type]
    before = [dict(vars(optimizer)), {name: vars(loader)[name] for name in vars(loader)}]
    list(loader)
    scaler = torch.amp.GradScaler("mps")
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert sorted(vars(loader)) == sorted(before[1])
    assert optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]
    assert not [name for name in (*vars(optimizer), *vars(loader)) if "hf_mps" in name]


def of_trainer(folder: Path) -> None:
    run = loops.trainer(folder, loops.bert(0.3))
    run.train()
    run.evaluate(loops.rows())


def of_accelerate(folder: Path) -> None:
    loops.accelerated(loops.bert(0.3))


def of_lightning(folder: Path) -> None:
    pl = lightning_loops.library()
    lightning_loops.trainer(pl, folder, max_epochs=1).fit(lightning_loops.module(pl))


@pytest.mark.parametrize("program", [of_trainer, of_accelerate, of_lightning])
def test_a_plain_program_says_nothing_beyond_stock(
    program: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(tmp_path)  # what libraries say at their first use
    said = []
    for layer in (nullcontext, loops.stock):
        capsys.readouterr()
        with warnings.catch_warnings(record=True) as warned, layer():
            warnings.simplefilter("always")
            program(tmp_path)
        screen = re.sub(r"[\d.]+", "N", capsys.readouterr().err)
        said.append((screen, {str(each.message) for each in warned}))
    screen, ours = said[0]
    assert screen == said[1][0]
    assert ours <= said[1][1]  # less by what PyTorch says of pinned memory
    assert not any("hf_mps" in line or "hf-mps" in line for line in (screen, *ours))


def test_a_trainer_shows_it_no_oftener_than_stock(tmp_path: Path) -> None:
    counts = []
    for layer in (nullcontext, loops.stock):
        registry: dict[str, Any] = {}
        with warnings.catch_warnings(record=True) as shown, layer():
            warnings.simplefilter("default")
            for make in (lambda: loops.trainer(tmp_path), lambda: None):
                warnings.warn_explicit("said once", UserWarning, "library.py", 1, registry=registry)
                made = make()
                if made is not None:
                    made.train()
        counts.append([str(each.message) for each in shown].count("said once"))
    assert counts == [1, 1]


def test_warnings_that_are_ignored_for_a_while_come_afterwards() -> None:
    registry: dict[str, Any] = {}

    def warn(text: str) -> None:
        warnings.warn_explicit(text, UserWarning, "library.py", 1, registry=registry)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        with ignoring(UserWarning, "of fonts"):
            warn("of fonts: one")
            warn("of rows")
        warn("of fonts: one")
        warn("of rows")
    assert [str(each.message) for each in shown] == ["of rows", "of fonts: one"]


def test_no_module_of_the_package_touches_the_filters_in_another_way() -> None:
    package = Path(hf_mps.__file__).parent
    told = re.compile(r"warnings\.(catch_warnings|simplefilter|filterwarnings|resetwarnings)\(")
    assert [str(path) for path in package.rglob("*.py") if told.search(path.read_text())] == []
