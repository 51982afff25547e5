"""The modes of PyTorch in which a program may stand when the layer computes something of its own for the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode


class Refusing(TorchDispatchMode):
    """A mode that no operator may reach."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} ran inside the caller's mode")


def refuse(tensor: torch.Tensor) -> None:
    """A hook that nothing may reach."""
    raise AssertionError("a tensor was kept by the caller's hook")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What `from_pretrained` sets while it makes a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "fake tensors": FakeTensorMode,
    "a dispatch mode": Refusing,
    "device meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("mps", torch.float16),
    "autocast of the CPU": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "default float16": lambda: default_dtype(torch.float16),
    "default float64": lambda: default_dtype(torch.float64),
    "hooks for what is kept": lambda: saved_tensors_hooks(refuse, refuse),
}
"""Name -> what makes it, to stand in."""


Way = Callable[[Callable[[], Any]], Any]
"""Calls a function somewhere, and returns what that does."""


def within(mode: Callable[[], AbstractContextManager[Any]]) -> Way:
    """In a mode."""

    def way(work: Callable[[], Any]) -> Any:
        with mode():
            return work()

    return way


def inside(transform: Callable[[Any], Any]) -> Way:
    """In a function that `transform` makes another of, which is called."""

    def way(work: Callable[[], Any]) -> Any:
        found = []

        def function(given: torch.Tensor) -> torch.Tensor:
            found.append(work())
            return given.sum()

        transform(function)(torch.ones(2))
        return found[0]

    return way


def traced(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The function by torch.jit.trace, which has seen nothing but the function's own sum."""
    made = torch.jit.trace(function, torch.ones(2), check_trace=False)
    assert [node.kind() for node in made.graph.nodes()] == ["prim::Constant", "aten::sum"], "work stands in the trace"
    return made


WAYS: dict[str, Way] = {
    **{name: within(mode) for name, mode in MODES.items()},
    "torch.func.grad": inside(torch.func.grad),
    "torch.func.vmap": inside(torch.func.vmap),
    "torch.jit.trace": inside(traced),
}
"""Name -> the way to be there."""
