"""One rank of several in this one process: a model sharded by FSDP2, over a process group that sends nothing.

Accelerate shards the model as in a run (`fsdp2_prepare_model`), PyTorch gathers and frees its weights as in a run, and
the trace follows what a rank then holds. PyTorch's fake process group (torch/testing/_internal/distributed/fake_pg.py)
answers every collective at once with whatever the output holds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line
from hf_mps.finetune import sharding
from hf_mps.layer.activation.activate import activate
from hf_mps.tools.dryrun import prepare
from hf_mps.tools.dryrun.layers import Cut
from hf_mps.tools.dryrun.memory.fit import MemoryPlan
from hf_mps.tools.dryrun.memory.machine import Machine, of_ranks
from hf_mps.tools.dryrun.memory.moments import Peak
from hf_mps.tools.dryrun.memory.trace import Tracer, followed
from hf_mps.tools.dryrun.resolve import Target
from hf_mps.tools.dryrun.step import TrainingStep, model_errors

DIMENSION = "dp_shard"
DEVICE = Choice(
    "cpu", "FSDP asks a device for streams, which the CPU plays and Metal has not; CUDA's tensors are alike"
)
"""Where the trace's tensors lie."""
ELSEWHERE = ("bf16", "fp16", "tf32", "dataloader_pin_memory", "fsdp", "fsdp_config")
"""What a recipe's `training` section says to a run's device, its ranks or accelerate, and not to a traced step."""


class ShardedTracer(Tracer):
    """Traces the steps of the first of `ranks`, which holds the largest part where a weight cannot be divided evenly.

    `parts` are of a recipe without ELSEWHERE; `training` is its section as the user has it.
    """

    def __init__(
        self, parts: prepare.Parts, ranks: int, training: Mapping[str, Any], length: int | None = None
    ) -> None:
        super().__init__(parts, DEVICE, length)
        self._ranks, self._training = ranks, training

    def _moments(self, rows: int, cut: Cut | None) -> tuple[TrainingStep, Mapping[Any, Peak]]:
        precision = _precision(self._training)
        with fake_ranks(self._ranks) as mesh:
            step = self._step(min(self.accumulation, 2), rows)
            with step.fake:
                shard(step.model, mesh, sharding.plugin(self._training, step.model), precision)
            with sharding.quiet():
                return step, followed(step, device=DEVICE.value, moments=True).moments or {}


def plan(target: Target, ranks: int, machine: Machine | None = None, *, length: int | None = None) -> MemoryPlan:
    """What each of `ranks` holds in a training step of `target` under FSDP2, against `machine` (default: this one's).

    Raises UserError where the recipe does not ask for FSDP, and as `hf_mps.tools.dryrun.memory.plan.plan` does.
    """
    activate()
    training = target.resolved.recipe.training
    if not sharding.asked(training):
        raise UserError(
            f"--ranks {ranks} divides a model by FSDP, and the recipe does not say so; next: training.fsdp=true"
            " (without it each rank holds what one process holds, and the gradients twice)"
        )
    machine = machine or of_ranks(ranks)
    with model_errors(target.resolved), weightless(target) as parts:
        tracer = ShardedTracer(parts, ranks, training, length)
        estimate, most = tracer(), tracer.largest(machine.comfortable)
    told = f"of each rank; {sharding.asked(training)} divides weights, gradients and the optimizer's state"
    facts = {"device": DEVICE, **estimate.facts, "ranks": Choice(ranks, told)}
    if (precision := _precision(training)) != "no":
        facts["precision"] = Choice(precision, "weights are gathered in it, and kept and stepped in float32")
    return MemoryPlan(target.name, machine, estimate, most, facts=facts)


def _precision(training: Mapping[str, Any]) -> str:
    """Accelerate's word for the precision that a recipe asks for."""
    return next((name for name in ("bf16", "fp16") if training.get(name)), "no")


def weightless(target: Target) -> AbstractContextManager[prepare.Parts]:
    """The parts of `target` as `prepare.weightless` makes them, for a ShardedTracer."""
    recipe = target.resolved.recipe
    training = {key: value for key, value in recipe.training.items() if key not in ELSEWHERE}
    return prepare.weightless(target, on=DEVICE, training=training)


@contextmanager
def fake_ranks(size: int) -> Iterator[Any]:
    """A mesh of `size` ranks, of which this process is the first; none of the others exists.

    Raises UserError where this process is one of several already.
    """
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if distributed.is_initialized():
        raise UserError("a trace of several ranks needs a process that is alone; next: hf-mps plan, without a launcher")
    distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh(DEVICE.value, (size,), mesh_dim_names=(DIMENSION,))
    finally:
        distributed.destroy_process_group()


def shard(model: Any, mesh: Any, plugin: Mapping[str, Any], precision: str) -> Any:
    """Shard `model` in place over `mesh` as accelerate does with a plugin of these settings, and return it.

    `precision` is accelerate's word: no, fp16 or bf16. Raises UserError for what accelerate refuses.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    try:
        with patch.dict(os.environ):  # accelerate writes there whether a model is still to be loaded
            made = FullyShardedDataParallelPlugin(**plugin)
        if precision != "no":
            made.set_mixed_precision(precision)
        accelerator = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=made),
            torch_device_mesh=mesh,
            parallelism_config=SimpleNamespace(fsdp_dim_names=(DIMENSION,)),
            mixed_precision=precision,
            is_main_process=False,
            device=torch.device(DEVICE.value),
        )
        return fsdp2_prepare_model(accelerator, model)
    except (ValueError, TypeError) as error:
        raise UserError(f"training.fsdp: accelerate refuses it: {first_line(error)}") from error
