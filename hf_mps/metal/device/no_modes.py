"""What the layer computes for itself, it computes as if the caller were in no mode of PyTorch.

A trial of the device, or a number that is kept on it, is made when it is first needed: within autocast, `no_grad`, a
FakeTensorMode, `with torch.device("meta")`, a transform, a trace, a checkpointed block. There the trial would try
something else, and its tensors would be the mode's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any


@contextmanager
def no_modes() -> Iterator[None]:
    """Compute with real tensors in float32 with gradients, seen by no mode, hook or trace of the caller's.

    The caller's modes are there again at its end. Flags of the process stay as they are, but for the default dtype,
    which is float32 meanwhile: `from_pretrained` sets another while it makes a model.
    """
    import torch

    with ExitStack() as stack:
        for leave in (_leave_transforms, _leave_dispatch_modes, _leave_trace, _leave_functions, _leave_hooks):
            with suppress(AttributeError, ImportError):  # private names: a release without one costs that mode alone
                leave(stack, torch)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "mps"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if (dtype := torch.get_default_dtype()) != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        yield


def _leave_functions(stack: ExitStack, torch: Any) -> None:
    """A default device, and whatever else intercepts PyTorch's functions."""
    stack.enter_context(torch._C.DisableTorchFunction())


def _leave_hooks(stack: ExitStack, torch: Any) -> None:
    """Those for what autograd keeps, which a checkpointed block counts; and torch.func's refusal of them."""
    from torch._C import _autograd
    from torch.autograd.graph import saved_tensors_hooks

    if (refusal := _autograd._saved_tensors_hooks_get_disabled_error_message()) is not None:
        _autograd._saved_tensors_hooks_enable()
        stack.callback(_autograd._saved_tensors_hooks_disable, refusal)
    if _autograd._top_saved_tensors_default_hooks(True) is not None:  # PyTorch calls the innermost pair alone
        # What autograd keeps of a result must not hold the graph that made it.
        stack.enter_context(saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor))


def _leave_transforms(stack: ExitStack, torch: Any) -> None:
    """Those of torch.func: `grad`, `vmap` and their like."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        stack.enter_context(temporarily_clear_interpreter_stack())


def _leave_dispatch_modes(stack: ExitStack, torch: Any) -> None:
    """FakeTensorMode and whatever else sees every operator; torch's module for it is slow to import."""
    from torch._ops import _len_torch_dispatch_stack_pre_dispatch

    if torch._C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch():  # type: ignore[no-untyped-call]
        from torch.utils._python_dispatch import _disable_current_modes

        stack.enter_context(_disable_current_modes())


def _leave_trace(stack: ExitStack, torch: Any) -> None:
    """`torch.jit.trace`, by which models are exported."""
    if (state := torch._C._get_tracing_state()) is not None:
        torch._C._set_tracing_state(None)
        stack.callback(torch._C._set_tracing_state, state)
