"""What a run under FSDP needs of accelerate and transformers beside their settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.core.notices import ignoring
from hf_mps.finetune.sharding import settings

BLOCKS = "FSDP_TRANSFORMER_CLS_TO_WRAP"


@contextmanager
def ready(model: Any, device: str) -> Iterator[None]:
    """Around the making of a Trainer under FSDP: its accelerator takes the plugin on a CPU too, and blocks that can be.

    Accelerate 1.15 takes FSDP on GPUs alone (state.py, AcceleratorState.__init__) and trains with DDP on a CPU, without
    a word. Raises UserError where PyTorch would take a GPU beside the CPU.
    """
    if os.environ.get(settings.ASKED) and (names := settings.blocks(model)):
        os.environ.setdefault(BLOCKS, ",".join(names))
    if device != "cpu":
        yield
        return
    import torch
    from accelerate.state import AcceleratorState

    beside = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if beside is not None and beside.type != "cpu":
        raise UserError(f"FSDP would take the device {beside.type} beside the CPU that trains; next: without use_cpu")
    stock = AcceleratorState.__init__
    AcceleratorState.__init__ = _taking_fsdp(stock)
    try:
        yield
    finally:
        AcceleratorState.__init__ = stock


def quiet() -> AbstractContextManager[None]:
    """Suppress FSDP2's warning of a module that returns a view, which nobody changes: a deferred head does."""
    return ignoring(UserWarning, r"FSDP2-wrapped module .*DeferredHead.* returned a view tensor")


def _taking_fsdp(stock: Callable[..., None]) -> Callable[..., None]:
    """AcceleratorState's `__init__`, which on a CPU does with the plugin what it does on a GPU."""

    def __init__(state: Any, *arguments: Any, **said: Any) -> None:
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        stock(state, *arguments, **said)
        plugin = said.get("fsdp_plugin")
        if plugin is not None and state.distributed_type == DistributedType.MULTI_CPU:
            if state._mixed_precision != "no":
                plugin.set_mixed_precision(state._mixed_precision)
            state.fsdp_plugin = plugin
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    return __init__


def save_whole(trainer: Any, folder: Path) -> None:
    """Write the whole model as `from_pretrained` reads it; called by every rank, written by the main one.

    Trainer.save_model writes nothing where checkpoints are of parts (SHARDED_STATE_DICT).
    """
    state = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.args.should_save:
        trainer._save(str(folder), state_dict=state)
