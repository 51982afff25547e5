"""How a guard puts a kernel of its own before the device's, and still calls that one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_mps.guards.guard import Guard
from hf_mps.stock import Around
from hf_mps.unheard import overriding

# A kernel lives as long as the library object that it was registered with.
_kept: list[Callable[[], None]] = []
# Those that were taken away, which may be in the midst of a call: they are not freed.
_running: list[Any] = []


def before(guard: Guard, name: str, wrapper: Callable[..., Any]) -> None:
    """Have operator `name` (`mm`, `addmm.out`) call `wrapper(stock, *arguments)` on the device, below autograd.

    `stock` is the kernel that was there; a wrapper that fails ends in it, as around any function. Raises RuntimeError
    where this torch has no such operator or kernel, AttributeError before torch 2.9, which cannot give a kernel out
    (torch.library.get_kernel).
    """
    _kept.append(put(guard, name, wrapper))


def put(
    guard: Guard, name: str, wrapper: Callable[..., Any], *, otherwise: Callable[..., Any] | None = None
) -> Callable[[], None]:
    """Do the same and return what puts the kernel back that was there; it may be called from inside the wrapper.

    `otherwise` is `stock` in the place of the kernel that was there, which torch 2.8 does not give out.
    """
    import torch

    around = Around(guard, f"aten::{name}", otherwise or _given_out(name), wrapper)
    library: Any = torch._C._dispatch_library("IMPL", "aten", "MPS", __file__)
    # PyTorch warns, once in a process, that a kernel takes another's place: it is meant to.
    with overriding():
        library.impl(name, "MPS", around.replacement())
    guard.arounds.append(around)

    def back() -> None:
        if hasattr(torch.library, "get_kernel"):
            _running.append(torch.library.get_kernel(f"aten::{name}", "MPS"))
        library.reset()
        guard.arounds.remove(around)

    return back


def _given_out(name: str) -> Callable[..., Any]:
    import torch

    there = torch.library.get_kernel(f"aten::{name}", "MPS")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.MPS)

    def stock(*args: Any, **kwargs: Any) -> Any:
        return there.call_boxed(keys, *args, **kwargs)

    return stock
