"""Guards, sentinels and integrations broken on purpose: a training has stock's numbers, and one line says so."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers.trainer_utils import get_last_checkpoint

from hf_mps.core import notices
from hf_mps.core.patching import Around, Faults
from hf_mps.layer import guards, integrations
from hf_mps.layer.guards import SentinelNotice
from hf_mps.layer.guards.base import Safeguard
from hf_mps.layer.guards.catalogue import GUARDS, SENTINELS, registry
from hf_mps.layer.guards.sentinels.stream import STREAM
from hf_mps.metal import simulator
from tests.layer.guards import lightning_loops, loops

HOOKS = ("look", "look_at_skipped", "before_update", "_look", "replayed", "_before_update", "_count")
"""Methods that are called by a hook or an iterator and not from around a function (`Installed.safely`)."""


def plain(folder: Path) -> list[Tensor]:
    """A plain loop with GradScaler, an LSTM, a convolution, checkpointing, moves that do not block, and an average.

    Around it CUDA's words for a function's passes, and a product into a slice.
    """
    torch.manual_seed(1)
    lstm, layer = nn.LSTM(4, 4, 2, batch_first=True).to("mps"), nn.Linear(4, 4).to("mps")
    convolution = nn.Conv1d(3, 3, 1).to("mps")
    optimizer = torch.optim.AdamW([*lstm.parameters(), *layer.parameters(), *convolution.parameters()], lr=1e-2)
    scaler = torch.amp.GradScaler("mps")
    for step in range(20):
        rows = torch.ones(2, 3, 4).to("mps", non_blocking=True)
        found: Any = checkpoint(layer, convolution(lstm(rows)[0]), use_reentrant=False)
        copied = torch.empty_like(rows).copy_(rows, non_blocking=True)
        scaler.scale((found - copied).square().mean() * (float("inf") if 4 < step < 14 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    for words in (torch.amp.custom_fwd, torch.amp.custom_bwd):
        words(lambda ctx: None, device_type="cuda")
    products = torch.zeros(2, 4, 4, device="mps")
    torch.mm(layer.weight.detach(), layer.weight.detach(), out=products[1])
    average = torch.zeros(3, device="mps").lerp_(layer.weight.detach()[0, :3], torch.tensor(0.5))
    torch.stack([average]).t()[:, :1].t().cumsum(0)
    average.index_add_(0, torch.tensor([1], device="mps"), torch.ones(1, device="mps"))
    pooled = nn.functional.adaptive_max_pool2d(products, 2)
    rest = [nn.functional.pad(average, (0, 1)).cpu(), products.cpu(), pooled.cpu()]
    return [*loops.weights(nn.ModuleList([lstm, layer, convolution])), *rest]


def by_trainer(folder: Path) -> list[Tensor]:
    """Trainer with checkpoints and memory's figures, and a second one that goes on from the first's checkpoint.

    The first one's model is read from a folder.
    """
    settings = {"save_strategy": "steps", "save_steps": 3, "skip_memory_metrics": False}
    loops.bert().save_pretrained(folder / "model")
    run = loops.trainer(folder, **settings)
    run.model.load_state_dict(type(run.model).from_pretrained(folder / "model").state_dict())
    run.train()
    run.evaluate(loops.rows())
    again = loops.trainer(folder, **settings, num_train_epochs=2)
    again.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    return loops.weights(run.model) + loops.weights(again.model)


def by_accelerate(folder: Path) -> list[Tensor]:
    """An Accelerate loop that saves in an epoch, and goes on from there."""
    accelerator = loops.new_accelerator()
    model = loops.bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loops.batches())
    for epoch in range(2):
        for number, batch in enumerate(accelerator.skip_first_batches(loader, 2) if epoch else loader):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            if (epoch, number) == (0, 1):
                accelerator.save_state(str(folder / "state"))
        accelerator.load_state(str(folder / "state"))
    return loops.weights(model)


def by_lightning(folder: Path) -> list[Tensor]:
    """Lightning with a checkpoint, and the batch size search's look at an error."""
    pl = lightning_loops.library()
    from lightning.pytorch.utilities import memory

    torch.manual_seed(2)
    saving = pl.callbacks.ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=2)
    module = lightning_loops.module(pl, loops.bert())
    lightning_loops.trainer(pl, folder, max_epochs=1, enable_checkpointing=True, callbacks=[saving]).fit(module)
    rest = lightning_loops.module(pl, loops.bert())
    last = sorted(folder.glob("*.ckpt"))[0]
    lightning_loops.trainer(pl, folder, max_epochs=1).fit(rest, ckpt_path=str(last), weights_only=False)
    assert not memory.is_oom_error(ValueError("another"))
    return loops.weights(module)


def by_compiler(folder: Path) -> list[Tensor]:
    """A step of a compiled layer."""
    torch.manual_seed(3)
    layer = nn.Linear(3, 1).to("mps")
    with loops.own_compiler():
        torch.compile(layer)(torch.ones(2, 3, device="mps")).square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    return loops.weights(layer)


def in_a_world(folder: Path) -> list[Tensor]:
    """A process group of one, and DDP with a hook of Python's and one of PyTorch's own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    models = [DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2)]
    try:
        models[0].register_comm_hook(None, allreduce_hook)
        models[1]._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        for model in models:
            model(torch.ones(1, 2)).sum().backward()
        return [each.grad for model in models for each in model.module.parameters()]
    finally:
        # DDP's reducer, where it is the last to hold the group, waits for Gloo's threads with the GIL that one of them
        # needs to let the hook go; the group's own end waits without it.
        models.clear()
        gc.collect()
        dist.destroy_process_group()


def notebook() -> None:
    from accelerate import notebook_launcher

    loops.forget_accelerators()
    notebook_launcher(lambda: None, num_processes=1)


def program(folder: Path) -> list[Tensor]:
    """All of them, from the same random numbers on."""
    torch.manual_seed(0)
    notebook()
    weights = []
    for part in (plain, by_trainer, by_accelerate, by_lightning, by_compiler, in_a_world):
        (folder / part.__name__).mkdir(parents=True)
        weights += part(folder / part.__name__)
    return weights


def things() -> dict[str, Safeguard]:
    """Every guard, every sentinel, and what shows trainings to the sentinels."""
    both = (*registry().each("guard"), *registry().each("sentinel"))
    return {each.name: each for each in both} | {STREAM.name: STREAM}


def of_integrations() -> list[Around]:
    """What integrations have put around functions."""
    return [put for each in integrations.registry().made("integration") for put in each.arounds]


@dataclass
class Broken:
    """What a run of `program` showed with everything broken."""

    weights: list[Tensor]
    hits: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)


def forget() -> None:
    notices.forget()
    for put in of_integrations():
        put.owner.on = True
    for each in (*things().values(), STREAM):
        each.forget()


def broken(folder: Path, how: str) -> Broken:
    """Run with an error in every function that is around another or called by a hook.

    `how`: before or after the function did its work; `always` lets none be switched off by its first error.
    """
    found = Broken([])

    def fails(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **kwargs: Any) -> Any:
            found.hits[name] += 1
            if "after" in how:
                stock(*args, **kwargs)
            raise ZeroDivisionError("on purpose")

        return failing

    with pytest.MonkeyPatch.context() as monkey, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for name, thing in things().items():
            if thing is STREAM and "always" not in how:  # it takes every sentinel along
                continue
            for put in thing.arounds:
                # A question that comes before a kernel of ours fails as the kernel does.
                what = "wrapper" if put.when is None else "when"
                monkey.setattr(put, what, fails(f"{name}: {put.place}", getattr(put, what)))
            for hook in HOOKS:
                # `_look` of some guards is called from around a function, which fails itself above.
                if hasattr(thing, hook) and (hook != "_look" or name in SENTINELS.names):
                    monkey.setattr(thing, hook, fails(f"{name}: {hook}", getattr(thing, hook)))
        for put in of_integrations():
            monkey.setattr(put, "wrapper", fails(f"integration: {put.place}", put.wrapper))
        if "always" in how:
            for kind in (Safeguard, type(STREAM)):
                monkey.setattr(kind, "failed", lambda thing, error: found.failed.add(thing.name))
            monkey.setattr(Faults, "failed", lambda *_: None)
        found.weights = program(folder)
        found.failed |= {name for name, thing in things().items() if thing.broken}
        found.lines = [str(each.message) for each in told if " failed: ZeroDivisionError" in str(each.message)]
    return found


UNREACHED = {
    "atomic-checkpoint: Trainer._push_from_checkpoint": "pushes to the hub",
    "atomic-order: torch.set_deterministic_debug_mode": "is another way to ask for determinism",
    "batch-waits: transformers.masking_utils._ignore_causal_mask_sdpa": "is a decoder's",
    "integration: DDPStrategy._determine_ddp_device_ids": "wants several hosts",
    "integration: DDPStrategy.determine_ddp_device_ids": "wants several hosts",
    "integration: _Connector._check_config_and_set_final_flags": "is Fabric's",
    "integration: _Connector._check_device_config_and_set_final_flags": "is Fabric's",
    "one-device: _Connector._lazy_init_strategy": "is Fabric's",
    "oom-text: accelerate.utils.memory.should_reduce_batch_size": "follows an error of Metal's",
    "oom-text: lightning.pytorch.utilities.memory.garbage_collection_cuda": "follows an error of CUDA's",
    "process-group: torch.distributed.device_mesh._get_device_handle": "is a mesh's",
    "process-group: torch.distributed.fsdp._fully_shard._fsdp_param.free_storage": "is FSDP2's",
    "resume-batches: DataLoaderDispatcher.__iter__": "wants several processes",
    "resume-epoch: DataLoaderDispatcher.__iter__": "wants several processes",
    "resume-names: Trainer._load_best_model": "wants an evaluation that picks the best checkpoint",
    "torn-checkpoint: Trainer.call_model_init": "wants a trainer that makes its models itself",
}
"""What the program does not call, and why; each is put there by the function that the others are."""

ABSENT = {
    "adaptive-max-pool": "is there with torch before 2.14",
    "conv3d-layout": "is there on macOS 26.0 to 26.2 with torch 2.14 or later",
    "huge-cat": "is there with torch before 2.15",
    "huge-products": "is there on machines with more than 16 GiB",
    "index-add-gaps": "is there on macOS 14 with torch before 2.14",
    "large-pad": "is there with torch before 2.15",
    "lerp-weight": "is there with torch before 2.15",
    "permuted-activations": "is there on macOS 14, and with torch before 2.14 on 26 for batch norm",
}
"""Guards that the tests' device and release may be without."""

MODES = ("before", "before, always", "after, always")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Broken]:
    """The program as stock runs it, and once for each way of breaking everything."""

    if simulator.loaded() is None:
        pytest.skip("only the simulated device is without faults")
    folder = tmp_path_factory.mktemp("broken")
    lightning_loops.library()
    import transformers.trainer  # noqa: F401

    forget()
    with ExitStack() as off, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        off.enter_context(guards.suspended())
        off.enter_context(guards.suspended(kind="sentinel"))
        found = {"stock": Broken(program(folder / "stock"))}
    for how in MODES:
        forget()
        found[how] = broken(folder / how.replace(", ", "_"), how)
    forget()
    loops.forget_accelerators()
    return found


@pytest.mark.slow
@pytest.mark.together
@pytest.mark.parametrize("how", MODES)
def test_everything_broken_trains_to_stocks_weights(runs: dict[str, Broken], how: str) -> None:
    assert loops.same(runs[how].weights, runs["stock"].weights)


@pytest.mark.slow
@pytest.mark.together
@pytest.mark.parametrize("name", [*GUARDS.names, *SENTINELS.names])
def test_each_says_one_line_and_is_off(runs: dict[str, Broken], name: str) -> None:
    thing = things()[name]
    if name in ABSENT and not thing.arounds:
        pytest.skip(f"{name} {ABSENT[name]}")
    assert name in runs["before"].failed
    lines = [line for line in runs["before"].lines if f"{thing.kind} {name} failed" in line]
    assert len(lines) == 1
    assert lines[0].endswith("it is disabled for this process; training continues")


@pytest.mark.slow
@pytest.mark.together
def test_each_function_that_is_around_another_was_broken(runs: dict[str, Broken]) -> None:
    every = {f"{name}: {put.place}" for name, thing in things().items() for put in thing.arounds}
    every |= {f"integration: {put.place}" for put in of_integrations()}
    # Lightning's other name, where a test came by it; and of the kernels of one guard some are enough.
    every = {each for each in every if "pytorch_lightning" not in each and ": aten::" not in each}
    assert every - set(runs["before, always"].hits) - set(UNREACHED) == set()


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", ["_backward", "_clipped", "_scaler_updated", "_begins", "_before_update", "_read"])
def test_what_shows_trainings_to_the_sentinels_says_one_line_and_they_are_off(name: str, tmp_path: Path) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    with guards.suspended(kind="sentinel"):
        stock = plain(tmp_path)
    with pytest.MonkeyPatch.context() as monkey:
        for put in STREAM.arounds:
            if getattr(put.wrapper, "args", (put.wrapper,))[0].__name__ == name:
                monkey.setattr(put, "wrapper", failing)
        monkey.setattr(STREAM, name, failing)
        with pytest.warns(SentinelNotice) as told:
            weights = plain(tmp_path)
    assert loops.same(weights, stock)
    (line,) = [str(each.message) for each in told if "stream" in str(each.message)]
    assert line.startswith("hf_mps: the sentinels' stream failed: ZeroDivisionError: on purpose")
    assert {each.state for each in guards.report().sentinels} - {"needless"} == {"failed"}
