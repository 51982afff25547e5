"""How a part puts a kernel above autograd, in the place of an operator that PyTorch makes of others on Metal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from hf_mps.core.patching import Around, Patch, Patcher
from hf_mps.layer.fused_step.switch import Part

KEY = "AutogradMPS"


class AutogradKernel(Patch):
    """The target is a composite operator ("aten::dropout"), the method is called as `method(stock, *arguments)`.

    Whoever calls the operator meets it, torch's own C++ among them. `when(*arguments)` says which calls concern the
    part, called with what the method is given too, as the dispatcher does, which leaves out what is the default; all
    others, and all of those that a compiler or torch.func traces, go to what PyTorch makes of the operator. It stays
    for the rest of the process.
    """

    way = "before the composite kernel of"

    def __init__(self, method: Any, *given: Any, when: str) -> None:
        super().__init__(method, *given)
        self.when = when

    def arm(self, owner: Patcher, target: str, module: ModuleType | None) -> None:
        """Put it there, unless it is."""
        assert isinstance(owner, Part)
        if target in owner.registered:
            return
        owner.registered.add(target)
        operator = getattr(torch.ops.aten, target.removeprefix("aten::")).default
        stock = functools.partial(_composite, operator)
        concerns = functools.partial(getattr(owner, self.when), *self.given)
        around = Around(
            owner, target, stock, self.ours(owner), lambda *args, **kwargs: runs(args[0]) and concerns(*args, **kwargs)
        )
        owner.arounds.append(around)
        # Not torch.library.Library, which remembers the name and refuses whoever registers a kernel there later.
        library: Any = torch._C._dispatch_library("IMPL", "aten", KEY, __file__)
        library.impl(target.removeprefix("aten::"), KEY, around.replacement())
        # A kernel lives as long as the library object that it was registered with.
        _libraries.append(library)


_libraries: list[Any] = []


def _composite(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what PyTorch makes of it: while it traces, by the rule that a tracer has for it, if any."""
    python: Callable[..., Any] | None = None
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher):
        python = operator.py_kernels.get(torch._C.DispatchKey.Autograd)
    if python is not None:
        return python(*args, **kwargs)
    return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def runs(tensor: Any) -> bool:
    """Return whether a call computes: an ordinary tensor, and neither a compiler, torch.func nor a tangent with it."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad.unpack_dual(tensor).tangent is None  # type: ignore[no-untyped-call]
    )
