"""c10d's operators on mps: each waits for the device, and runs its own CPU form on the CPU's view of the same memory.

Every collective of a process group, whoever calls it (Python, DDP's reducer, FSDP, DTensor), is an operator of c10d
that the dispatcher runs for its tensors' device (torch/csrc/distributed/c10d/Ops.cpp). Those for the CPU ask the group
for its CPU backend, which is Gloo; for mps there are none in torch 2.13 and 2.14, and these stand there. A Python class
cannot be the backend itself: torch._C._distributed_c10d.Backend has no trampoline, and a subclass of ProcessGroup would
take the whole group's place, the CPU's part too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup

from hf_mps.core.errors import UserError
from hf_mps.distributed.metal import works
from hf_mps.distributed.metal.collectives import HostSide, start
from hf_mps.distributed.world import World
from hf_mps.metal.operators.calls import tensors_of

PROBED = "c10d::allreduce_"
"""The operator whose kernel for mps says that PyTorch has its own backend."""
_registered: list[Any] = []


def pytorch_has_them() -> bool:
    """Return whether PyTorch itself, or somebody else, runs collectives on mps."""
    return not _registered and bool(torch._C._dispatch_has_kernel_for_dispatch_key(PROBED, "MPS"))


def register() -> None:
    """Register a kernel for mps under each operator of c10d that has one for the CPU; once in a process."""
    if _registered or pytorch_has_them():
        return
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        name, _, overload = full.removeprefix("c10d::").partition(".")
        if not full.startswith("c10d::") or not torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU"):
            continue
        operator = getattr(getattr(torch.ops.c10d, name), overload or "default")
        if any("ProcessGroup" in str(argument.type) for argument in operator._schema.arguments):
            kernel = _Kernel(name, operator)
            library.impl(name, kernel, "MPS")
            # allreduce_, whose gradients of an embedding may be sparse.
            if torch._C._dispatch_has_kernel_for_dispatch_key(full, "SparseCPU"):
                library.impl(name, kernel, "SparseMPS")
    _registered.append(library)


def unregister() -> None:
    """Take the kernels away again."""
    while _registered:
        _registered.pop()._destroy()


class _Kernel:
    """One operator of c10d for tensors on mps."""

    def __init__(self, name: str, operator: Any) -> None:
        self._name, self._operator = name, operator
        self._arguments = [argument.name for argument in operator._schema.arguments]
        self._returns_tensors = len(operator._schema.returns) > 1

    def __call__(self, *given: Any) -> Any:
        arguments = dict(zip(self._arguments, given, strict=False))
        world = World.here()
        if world.local_size > 1:
            raise UserError(
                f"{world.local_size} processes of this host would share its one Metal device; next: one process a host,"
                f" torchrun --nnodes {world.size} --nproc_per_node 1 …, or HF_MPS_DEVICE=cpu"
            )
        # Gloo reads the memory on the CPU: what the device was given has to be done.
        torch.mps.synchronize()
        side = HostSide()
        on_host = {name: side.of(value, **self._use(name)) for name, value in arguments.items()}
        what = f"{self._name.strip('_')} on rank {ProcessGroup.unbox(arguments['process_group']).rank()}"
        try:
            started = start(self._name, self._operator, on_host)
        except RuntimeError as error:
            raise works.failed(what, error) from None
        # c10d's operators write one argument, whatever else they are given.
        written: Any = next((arguments[name] for name in arguments if self._use(name)["written"]), [])
        ends_here = not arguments.get("async_op", True) or works.completing()
        finish = works.completed if ends_here else works.MetalWork
        # The future of Gloo's own work has the tensors of a list of lists as one list too.
        work = finish(what, started, side, tensors_of(written)).boxed()
        return (written, work) if self._returns_tensors else work

    def _use(self, argument: str) -> dict[str, bool]:
        """Return whether an argument is read, and whether it is written."""
        if argument.startswith("input") or self._name in ("send", "barrier"):
            return {"read": True, "written": False}
        return {"read": not (argument.startswith("output") or self._name.startswith("recv")), "written": True}
