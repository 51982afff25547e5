"""Runs that end in an error, or late, or without a sign of it: they train, or a line says at once what can be done."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_mps.core.errors import UserError
from hf_mps.layer import guards
from hf_mps.metal.simulator import compiled
from tests.layer.guards import lightning_loops, loops


def worked(train: Callable[[], object]) -> bool:
    """Whether a training came to its end, with the workers that it started."""
    try:
        train()
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error):
            raise
        return False
    finally:
        _end_server()
    return True


def _end_server() -> None:
    """End the server of workers, which waits for all that have its pipe: also where one of them hangs."""
    for worker in multiprocessing.active_children():
        worker.kill()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
    server._stop()


def workers_of_trainer(folder: Path) -> bool:
    """Trainer with two workers, after its model lies on the device."""
    return worked(lambda: loops.trained(folder, dataloader_num_workers=2, max_steps=1))


def workers_of_an_evaluation(folder: Path) -> bool:
    """An evaluation of Trainer's, whose loader is one of its own."""
    return worked(lambda: loops.trainer(folder, dataloader_num_workers=2).evaluate(loops.rows()))


def refused(train: Callable[[], object], words: str) -> bool:
    """Whether a training came to its end or was refused in one line that says `words` and what to do next."""
    try:
        train()
    except UserError as refusal:
        line = str(refusal)
        return words in line and "next: " in line and "\n" not in line
    except (ImportError, RuntimeError, TypeError, ValueError):
        return False
    return True


def fp16_trainer(folder: Path) -> bool:
    """Trainer with fp16=True trains in it, or the line names the accelerate that it needs."""
    return refused(lambda: loops.trained(folder, fp16=True, max_steps=1), "needs accelerate 1.11 or newer")


def fp16_accelerator(folder: Path) -> bool:
    """The same for an Accelerate loop with mixed_precision."""

    def train() -> None:
        loops.accelerated(accelerator=loops.new_accelerator(mixed_precision="fp16"))

    return refused(train, "needs accelerate 1.11 or newer")


def paged_optimizer(folder: Path) -> bool:
    """A paged optimizer of bitsandbytes takes a step, or the line names another."""

    def step() -> None:
        from bitsandbytes.optim import PagedAdamW8bit

        weight = torch.nn.Parameter(torch.ones(400, 300, device="mps"))  # smaller states than 100,000 are not paged
        weight.grad = torch.ones_like(weight)
        PagedAdamW8bit([weight]).step()

    return refused(step, "next: AdamW8bit")


def several_processes(folder: Path) -> bool:
    """An Accelerator in one of two processes knows of the other, or the line says how to start one."""

    def start() -> None:
        if loops.new_accelerator().num_processes != 2:
            raise RuntimeError("each of the two would train the whole run")

    with pytest.MonkeyPatch.context() as launched:
        # As torchrun's, without the address at which it would wait for the other one.
        for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
            launched.setenv(name, value)
        launched.setenv("MASTER_PORT", "29500")
        try:
            return refused(start, "one Metal device")
        finally:
            loops.forget_accelerators()


def processes_of_a_notebook(folder: Path) -> bool:
    """notebook_launcher with two processes starts none, and the line says how to train in one."""
    from accelerate import notebook_launcher

    def started(config: Any, entrypoint: Any) -> Any:
        raise RuntimeError(f"{config.max_nodes} x {config.nproc_per_node} processes would be forked")

    loops.forget_accelerators()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.launcher.api.elastic_launch", started)
        return refused(lambda: notebook_launcher(print, (), 2), "num_processes=2): there is one Metal device")


def compiled_accelerator(folder: Path) -> bool:
    """A model that cannot be compiled takes its steps as it is, in an Accelerate loop."""
    plain = loops.accelerated()
    return compiles(lambda: loops.accelerated(accelerator=loops.new_accelerator(dynamo_backend="inductor")), plain)


def compiled_trainer(folder: Path) -> bool:
    """The same for Trainer's torch_compile."""
    return compiles(lambda: loops.trained(folder, torch_compile=True, max_steps=2), loops.trained(folder, max_steps=2))


def compiles(train: Callable[[], list[Tensor]], plain: list[Tensor]) -> bool:
    """Whether a training with torch.compile ends with the weights of one without."""
    # Dropout draws eager's numbers: Inductor has its own, on a Mac too.
    with loops.own_compiler(), torch._inductor.config.patch(fallback_random=True):
        try:
            # Adam makes a step of full size out of a gradient's last place.
            return loops.close(train(), plain, tolerance=1e-2)
        except Exception as error:  # dynamo's own kinds are known once it is imported
            if "Metal source of this graph" not in str(error):
                raise
            return False


class ProcessEnds(BaseException):
    """In the place of the signal that ends the process."""


def survives(**how: Any) -> bool:
    """Whether a deep float16 model that is compiled like that gives its values without torch.compile."""

    def end(issue: str) -> None:
        raise ProcessEnds

    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(40) for layer in (nn.Linear(4, 4), nn.ReLU()))).half().to("mps")
    x = torch.ones(2, 4, dtype=torch.float16, device="mps")
    with loops.own_compiler(), pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(compiled, "end", end)
        for name in ("DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI"):  # torch sets them where it hears of CUDA graphs
            patch.setenv(name, "0")
        try:
            return torch.equal(torch.compile(model, **how)(x), model(x))
        except ProcessEnds:
            return False


def deep_in_half_precision(folder: Path) -> bool:
    """torch.compile in the mode that is to save launches."""
    return survives(mode="reduce-overhead")


def deep_by_an_option(folder: Path) -> bool:
    """The same by the one option that the mode sets."""
    return survives(options={"triton.cudagraphs": True})


def converted_checkpoint(folder: Path) -> bool:
    """A bfloat16 checkpoint is loaded as float32 straight onto the device, as every TRL trainer does."""
    from transformers import AutoModelForSequenceClassification as Auto

    loops.bert().to(torch.bfloat16).save_pretrained(folder)
    try:
        model = Auto.from_pretrained(folder, dtype=torch.float32, device_map={"": "mps"})
    except RuntimeError as error:
        if "Segmentation fault" not in str(error):
            raise
        return False
    ours, theirs = model.state_dict(), loops.bert().to(torch.bfloat16).float().state_dict()
    return all(torch.equal(ours[name].cpu(), theirs[name]) for name in theirs)


def flash_attention(folder: Path) -> bool:
    """A checkpoint that asks for flash attention is loaded and trains."""
    return all(attention(folder / name, name) for name in ("flash_attention_2", "flash_attention_3"))


def flex_attention(folder: Path) -> bool:
    """One that asks for flex attention does."""
    return attention(folder, "flex_attention")


def attention(folder: Path, name: str) -> bool:
    """Whether a checkpoint is loaded with an attention implementation and trains as with torch's own."""
    from transformers import AutoModelForSequenceClassification

    loops.bert().save_pretrained(folder / "model")
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # its threads outlive the load
            model = AutoModelForSequenceClassification.from_pretrained(folder / "model", attn_implementation=name)
        return loops.close(loops.trained(folder, model=model, max_steps=1), loops.trained(folder, max_steps=1))
    except ImportError:
        return False
    except Exception as error:
        if "does not support backward on MPS" not in str(error) and "Metal source" not in str(error):
            raise
        return False


def with_floats() -> list[dict[str, Any]]:
    """Rows with a column of NumPy's own floats."""
    return [{"x": np.full(3, number / 8), "labels": number % 2} for number in range(8)]


class OnFloats(nn.Module):
    """A model over such a column."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        from transformers.modeling_outputs import SequenceClassifierOutput

        logits = self.layer(x)
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def float64_trainer(folder: Path) -> bool:
    """Trainer trains on a column of float64."""
    return takes_float64(lambda: loops.trained(folder, model=OnFloats(), data=with_floats()))


def float64_accelerator(folder: Path) -> bool:
    """An Accelerate loop does."""

    def train() -> None:
        accelerator = loops.new_accelerator()
        model, loader = accelerator.prepare(OnFloats(), torch.utils.data.DataLoader(with_floats(), batch_size=4))
        for batch in loader:
            accelerator.backward(model(**batch).loss)

    return takes_float64(train)


def float64_lightning(folder: Path) -> bool:
    """Lightning does, under both of its names."""

    def train() -> None:
        for name in lightning_loops.NAMES:
            pl = lightning_loops.library(name)
            rows = torch.utils.data.DataLoader(with_floats())
            lightning_loops.trainer(pl, folder, max_steps=1).fit(lightning_loops.module(pl, OnFloats()), rows)

    return takes_float64(train)


def takes_float64(train: Callable[[], object]) -> bool:
    """Whether a training came to its end, and not to Metal's error."""
    try:
        train()
    except TypeError as error:
        if "doesn't support float64" not in str(error):
            raise
        return False
    return True


def losses(run: Any) -> list[float]:
    """The losses in a Trainer's log."""
    return [each["loss"] for each in run.state.log_history if "loss" in each]


def shown_loss(folder: Path) -> bool:
    """A loss that is no number stands in Trainer's log; what stops the run at it is off here."""
    with guards.suspended("non-finite"):
        run = loops.trainer(folder, loops.Diverging())
        run.train()
    return not np.isfinite(losses(run)).all()


def quiet_loaders(folder: Path) -> bool:
    """Trainer's loaders do not warn that they pin memory in vain."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loops.trained(folder, max_steps=1)
    return not any("'pin_memory' argument is set as true" in str(each.message) for each in said)
