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


def differentiated(work: Callable[[], Any]) -> Any:
    """What `work` returns inside of torch.func.grad."""
    found = []

    def function(given: torch.Tensor) -> torch.Tensor:
        found.append(work())
        return given.sum()

    torch.func.grad(function)(torch.ones(2))
    return found[0]


def vectorized(work: Callable[[], Any]) -> Any:
    """What it returns inside of torch.func.vmap."""
    found = []

    def function(given: torch.Tensor) -> torch.Tensor:
        found.append(work())
        return given

    torch.func.vmap(function)(torch.ones(2))
    return found[0]


def traced(work: Callable[[], Any]) -> Any:
    """What it returns inside of torch.jit.trace."""
    found = []

    def function(given: torch.Tensor) -> torch.Tensor:
        found.append(work())
        return given * 2

    made = torch.jit.trace(function, torch.ones(2), check_trace=False)
    assert [node.kind() for node in made.graph.nodes()] == ["prim::Constant", "aten::mul"], "work stands in the trace"
    return found[0]


def within(mode: str, work: Callable[[], Any]) -> Any:
    """What `work` returns in the mode of that name."""
    with MODES[mode]():
        return work()


WAYS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    **{mode: (lambda work, mode=mode: within(mode, work)) for mode in MODES},
    "torch.func.grad": differentiated,
    "torch.func.vmap": vectorized,
    "torch.jit.trace": traced,
}
"""Name -> a function that calls another in that mode and returns what that does."""
