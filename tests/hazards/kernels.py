"""How a fault of a kernel is put over the device's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def kernels(functions: dict[str, Callable[..., Any]], key: str = "MPS") -> Iterator[None]:
    """Put Python kernels over the device's own for a while, by the operators' names: `copy_`, `addcdiv.out`."""
    import torch

    # The library that torch.library.Library wraps: this one forgets a kernel when told, and the former one is back.
    library: Any = torch._C._dispatch_library("IMPL", "aten", key, __file__)
    try:
        for name, function in functions.items():
            library.impl(name, key, function)
        yield
    finally:
        library.reset()


def host(tensor: Any) -> Any:
    """A CPU tensor over the memory of a device tensor; a CPU tensor is returned as it is."""
    import torch

    from hf_mps.metal import simulator

    if tensor.device.type != "mps" or simulator.loaded() is None:
        return tensor
    simulator._metal().finish()  # a kernel comes after what was queued before it
    storage = torch._C._mps_host_alias_storage(tensor.untyped_storage())
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
