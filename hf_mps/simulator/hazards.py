"""Known faults of Metal, switched on by name for a while: each guard is shown to be needed, and to help.

    with hazards.on("non-blocking"):
        ...

Each is modelled after the upstream issue that METAL.md names, as a kernel of its own over the device's, or as the
library's state that has the fault. Faults that the installed libraries have anyhow (checkpoint-rng, resume-rng, …) need
none. For tests only: slow, and one thread at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from hf_mps.errors import UserError, nearest

_active: set[str] = set()


@contextmanager
def on(*names: str) -> Iterator[None]:
    """Switch hazards on for a while. Raises UserError for a name that there is not, or where no simulator is loaded."""
    from hf_mps import simulator

    unknown = next((name for name in names if name not in HAZARDS), None)
    if unknown is not None:
        raise UserError(f"{unknown} is no hazard; there are {', '.join(HAZARDS)}{nearest(unknown, HAZARDS)}")
    if simulator.loaded() is None:
        raise UserError("hazards are faults of the simulated device, which is not loaded: HF_MPS_SIMULATE=1")
    with ExitStack() as stack:
        for name in names:
            if name not in _active:
                stack.enter_context(_marked(name))
                stack.enter_context(HAZARDS[name]())
        yield


def active() -> frozenset[str]:
    """The hazards that are on now."""
    return frozenset(_active)


@contextmanager
def _marked(name: str) -> Iterator[None]:
    _active.add(name)
    try:
        yield
    finally:
        _active.discard(name)


@contextmanager
def kernels(functions: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Put Python kernels over the device's own for a while, by the operators' names: `copy_`, `addcdiv.out`."""
    import torch

    # The library that torch.library.Library wraps: this one forgets a kernel when told, and the former one is back.
    library: Any = torch._C._dispatch_library("IMPL", "aten", "MPS", __file__)
    try:
        for name, function in functions.items():
            library.impl(name, "MPS", function)
        yield
    finally:
        library.reset()


def host(tensor: Any) -> Any:
    """A CPU tensor over the memory of a device tensor; a CPU tensor is returned as it is."""
    import torch

    if tensor.device.type != "mps":
        return tensor
    storage = torch._C._mps_host_alias_storage(tensor.untyped_storage())
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


@contextmanager
def _non_blocking() -> Iterator[None]:
    """pytorch#189690: the copy reads its source when the GPU comes to it; freed before that, it reads something else.

    What it reads then is zero here. Waiting for the GPU, as each read of a result does, ends the danger.
    """
    import torch

    pending: dict[int, Any] = {}

    def copy(self: Any, src: Any, non_blocking: bool = False) -> Any:
        host(self).copy_(host(src))
        if src.device.type == "cpu" and self.device.type == "mps" and non_blocking:
            late = host(self)
            pending[late.data_ptr()] = weakref.finalize(src, late.zero_)
        elif self.device.type == "cpu":
            settle()
        return self

    def settle() -> None:
        for finalizer in pending.values():
            finalizer.detach()
        pending.clear()

    with kernels({"copy_": copy}):
        stock = torch.mps.synchronize

        def synchronize() -> None:
            stock()
            settle()

        torch.mps.synchronize = synchronize
        try:
            yield
        finally:
            torch.mps.synchronize = stock
            settle()


HAZARDS: dict[str, Callable[[], Any]] = {
    "non-blocking": _non_blocking,
}
