"""Whether a run's steps are recorded, with the reason, before its first step; other devices hear nothing of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from transformers import Trainer

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.features import cuda_graphs as decide
from hf_mps.finetune.run.trainer import StepMethod
from tests.finetune import builders
from tests.finetune.cuda_graphs.recorders import trainer
from tests.finetune.tiny import Command
from tests.refusals import refusal


def recipe(**said: Any) -> Any:
    columns = {"text": "a", "text_pair": "b"}
    return builders.recipe(
        task="text-classification", model="m", data={"generated": "pairs", "columns": columns}, **said
    )


@pytest.mark.parametrize("device", ["mps", "cpu"])
def test_another_device_is_told_nothing(device: str) -> None:
    assert decide.decide(recipe(), {}, device) is None
    assert decide.decide(recipe(cuda_graphs=False), {}, device) is None


def test_what_is_asked_for_on_another_device_is_refused_in_one_line(desk: Path, finetune: Command) -> None:
    ended = finetune("my.yaml", "cuda_graphs=true")
    assert (ended.code, ended.err.splitlines()[-1]) == snapshot(
        (2, "hf-mps: cuda_graphs is true, and the device is mps; leave it out")
    )


@pytest.mark.parametrize(
    ("said", "training", "choice"),
    [
        ({}, {}, snapshot("on (a step's hundreds of launches become one; the numbers are the same)")),
        ({"cuda_graphs": True}, {}, snapshot("on (the recipe says so)")),
        ({"cuda_graphs": False}, {}, snapshot("off (the recipe says so)")),
        ({"optimizations": False}, {}, snapshot("off (optimizations is false in the recipe)")),
        ({"optimizations": False, "cuda_graphs": True}, {}, snapshot("on (the recipe says so)")),
        (
            {},
            {"gradient_checkpointing": True},
            snapshot("off (checkpointed layers read the random state, which CUDA cannot record)"),
        ),
        ({}, {"torch_compile": True}, snapshot("off (torch.compile makes its own)")),
    ],
)
def test_on_cuda(said: dict[str, Any], training: dict[str, Any], choice: str) -> None:
    assert str(decide.decide(recipe(**said), training, "cuda")) == choice


def test_an_option_against_what_is_asked_for_is_refused() -> None:
    assert refusal(decide.decide, recipe(cuda_graphs=True), {"gradient_checkpointing": True}, "cuda") == snapshot(
        "cuda_graphs is true, and checkpointed layers read the random state, which CUDA cannot record; leave one of"
        " them out"
    )


def test_a_trainer_with_a_loss_of_its_own_is_left_alone(tmp_path: Path) -> None:
    class Mine(Trainer):  # type: ignore[misc]
        def compute_loss(self, *arguments: Any, **settings: Any) -> Any:
            return super().compute_loss(*arguments, **settings)

    plan: Any = SimpleNamespace(recipe=recipe(), choices={decide.KEY: Choice(decide.ON, "")})
    mine = trainer(tmp_path, kind=Mine)
    decide.CudaGraphs().apply(mine, plan, None)  # type: ignore[arg-type]
    assert str(plan.choices[decide.KEY]) == snapshot(
        "off (Mine defines its own compute_loss, which may do more than CUDA can record)"
    )
    assert type(mine.step_method) is StepMethod
    plan = SimpleNamespace(recipe=recipe(cuda_graphs=True), choices={decide.KEY: Choice(decide.ON, "")})
    with pytest.raises(UserError):
        decide.CudaGraphs().apply(mine, plan, None)  # type: ignore[arg-type]


def test_weights_with_hooks_are_left_alone(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    assert decide.obstacle(made) == ""
    next(made.model.parameters()).register_post_accumulate_grad_hook(lambda weight: None)
    assert decide.obstacle(made) == snapshot("the model's parameters have hooks, which a graph would leave out")


def test_a_plan_without_cuda_imports_nothing_of_it(desk: Path, finetune: Command) -> None:
    ended = finetune("my.yaml", "training.max_steps=2", "use_cpu=true" if torch.cuda.is_available() else "seed=2")
    assert ended.code == 0
    assert "cuda graphs" not in ended.out
