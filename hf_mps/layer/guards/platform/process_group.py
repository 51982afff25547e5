"""process-group: process groups take tensors on mps, by the backend `metal` where PyTorch has none."""

from __future__ import annotations

import functools
import sys
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.patching import OriginalCall, Patch, Put, Register
from hf_mps.distributed.metal import backend
from hf_mps.layer.guards.base import Guard

C10D = "torch.distributed.distributed_c10d"
DEFAULTS, CAPABILITIES = "default_device_backend_map", "backend_capability"
PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param"


class ProcessGroup(Guard):
    """Names the backend when torch is imported; what it does comes with the first process group."""

    name = "process-group"
    what = "PyTorch's process groups take no tensors on mps: DDP and every collective over several Macs end in an error"
    issue = "https://github.com/pytorch/pytorch/issues/160732"
    until = "PyTorch has its own backend for mps (pytorch#189856), which is taken where it is there"
    patches = {
        f"{C10D}:Backend.register_backend": Register(
            backend.create, under=backend.NAME, keywords={"devices": list(backend.DEVICES)}
        ),
        f"{C10D}:Backend.{DEFAULTS}": Put("_defaults"),
        f"{C10D}:Backend.{CAPABILITIES}": Put("_capabilities"),
        f"{C10D}:_new_process_group_helper": "_group_made",
        "torch.distributed.device_mesh:_get_device_handle": "_handle",
        f"{PARAMETER}:free_storage": Patch("_freed", after=PARAMETER),
        "torch.nn.parallel.distributed:DistributedDataParallel.register_comm_hook": "_hook",
        "torch.nn.parallel.distributed:DistributedDataParallel._register_builtin_comm_hook": "_builtin_hook",
    }

    def __init__(self) -> None:
        super().__init__()
        self._stock: dict[str, Any] = {}  # PyTorch's own tables of backends, by their names

    def switched(self, on: bool) -> None:
        """Also leave PyTorch's tables and operators as they are without it, or as they are with it."""
        from torch.distributed import Backend

        from hf_mps.distributed.metal import operators

        for name, stock in self._stock.items():
            made = self._defaults if name == DEFAULTS else self._capabilities
            setattr(Backend, name, made(stock) if on else stock)
        if not on:
            operators.unregister()

    def concerns(self, module: Any) -> bool:
        """Return whether this torch has torch.distributed."""
        return bool(sys.modules["torch"].distributed.is_available())

    def applies(self) -> Choice[bool]:
        """Return whether PyTorch lacks kernels of collectives for mps."""
        own = backend.pytorchs()
        return Choice(not own.value, own.reason)

    def _defaults(self, stock: dict[str, str]) -> dict[str, str]:
        """Return a device's backend where the script names none."""
        name = backend.pytorchs().value or backend.NAME
        if stock.get("mps") == name:
            return stock
        self._stock[DEFAULTS] = stock
        return {**stock, "mps": name}

    def _capabilities(self, stock: dict[str, list[str]]) -> dict[str, list[str]]:
        """A script that names Gloo, and Lightning, which does, can use it for mps (pytorch#160733 wanted the same)."""
        if backend.pytorchs().value or "mps" in stock.get("gloo", ("mps",)):
            return stock
        self._stock[CAPABILITIES] = stock
        return {**stock, "gloo": [*stock["gloo"], "mps"]}

    def _group_made(
        self, stock: OriginalCall, size: int, rank: int, ranks: Any, asked: str, *more: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        from torch.distributed import Backend

        chosen = backend.choice(asked)
        if chosen.value != str(asked):
            self.acted(f"the process group is {chosen.value}: {chosen.reason}", aloud=False)
        own = backend.pytorchs()
        if not own.value:
            if chosen.value == "gloo":
                self.acted(f"the process group gloo takes tensors on mps: {own.reason}", aloud=False)
            # Asks the dispatcher for its names, which only a program that needs it is to pay for.
            from hf_mps.distributed.metal import operators

            operators.register()
            backend.forget()
        # PyTorch's own object where the choice is what was asked for.
        named = asked if chosen.value == str(asked) else Backend(chosen.value)
        made: tuple[Any, Any] = stock(size, rank, ranks, named, *more, **kwargs)
        if backend.NAME in chosen.value:
            backend.join_cpu(made[0])
        if not own.value:
            backend.keep(made[0])
        return made

    def _hook(self, stock: OriginalCall, model: Any, state: object, hook: Any) -> Any:
        """Have what a hook does after its collective done in the thread that runs the backward pass."""
        if not _on_metal(model):
            return stock(model, state, hook)
        from hf_mps.distributed.metal import works

        @functools.wraps(hook)
        def complete(state: object, bucket: Any) -> Any:
            with works.complete():
                return hook(state, bucket)

        # DDP refuses bfloat16's hooks by their names where the GPU is not CUDA's (distributed.py, _check_comm_hook).
        complete.__name__ = f"{hook.__name__}_on_metal"
        return stock(model, state, complete)

    def _builtin_hook(self, stock: OriginalCall, model: Any, kind: Any) -> Any:
        """Register the twin in Python of the one that compresses; the other stays."""
        # Of PyTorch's two in C++ that one uses the device from Gloo's threads.
        if not _on_metal(model) or kind.name != "FP16_COMPRESS":
            return stock(model, kind)
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        self.acted(
            "DDP's FP16_COMPRESS is fp16_compress_hook, which does the same in the training's own thread", aloud=False
        )
        return stock.foreign(model.register_comm_hook, None, fp16_compress_hook)

    def _handle(self, stock: OriginalCall, device_type: str = "cuda") -> Any:
        """Return what a mesh takes for the module of a device."""
        if device_type != "mps":
            return stock(device_type)
        from hf_mps.distributed.metal import sharding

        return sharding.handle()

    def _freed(self, stock: OriginalCall, tensor: Any) -> None:
        """Leave a storage on mps its memory."""
        # PyTorch cannot take it away there (Resize.cpp, resize_bytes_nocuda).
        if tensor.device.type != "mps":
            stock(tensor)
            return
        self.acted(
            "FSDP2 keeps gathered parameters on mps, where PyTorch cannot free a storage: gradients and states of the "
            "optimizer are sharded, parameters are not"
        )


def _on_metal(model: Any) -> bool:
    return getattr(model, "device_type", "") == "mps"
