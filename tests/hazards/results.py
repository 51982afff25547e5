"""Kernels that compute something else without an error, as upstream issues describe them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hf_mps.simulator import strictness
from tests.hazards.kernels import host, kernels


@contextmanager
def non_blocking() -> Iterator[None]:
    """pytorch#189690 and #140296, as up to torch 2.12: a copy that nobody waits for does not hold its source."""
    from hf_mps.guards.numerics import non_blocking as module

    guard: Any = module
    release, guard.torch_release = guard.torch_release, lambda: (2, 12, 0)
    try:
        with strictness.on("late-copies", "freed-sources"):
            yield
    finally:
        guard.torch_release = release


def fp16_fused_adam() -> Any:
    """pytorch#186360: the fused kernels read neither grad_scale nor found_inf."""
    import torch

    def deaf(name: str) -> Callable[..., Any]:
        def step(*lists: Any, grad_scale: Any = None, found_inf: Any = None, **numbers: Any) -> None:
            getattr(torch.ops.aten, name)(*([host(tensor) for tensor in each] for each in lists), **numbers)

        return step

    return kernels({name: deaf(name) for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_")})


def non_contiguous() -> Any:
    """pytorch#118115: what addcmul_ and addcdiv_ compute for a tensor that is not contiguous never reaches it."""
    import torch

    def losing(function: Callable[..., Any]) -> Callable[..., Any]:
        def into(self: Any, one: Any, other: Any, *, value: Any = 1) -> Any:
            if self.is_contiguous():
                function(host(self), host(one), host(other), value=value, out=host(self))
            return self

        return into

    return kernels({"addcmul_": losing(torch.addcmul), "addcdiv_": losing(torch.addcdiv)})


def layernorm_frozen() -> Any:
    """pytorch#183825: where the input needs no gradient, those of weight and bias are what lay in their memory."""
    import torch

    def backward(grad: Any, input: Any, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: Any) -> Any:
        given = (host(each) if each is not None else None for each in (mean, rstd, weight, bias))
        found = torch.ops.aten.native_layer_norm_backward(host(grad), host(input), shape, *given, mask)
        moved = [each if each is None else each.to("mps") for each in found]
        return tuple(moved if mask[0] else [each if each is None else each.zero_() for each in moved])

    return kernels({"native_layer_norm_backward": backward})


def huge_embedding() -> Any:
    """pytorch#188756: rows that lie beyond 2^31 elements come back as zeros."""
    import torch

    def select(self: Any, dim: int, index: Any) -> Any:
        rows = torch.index_select(host(self), dim, host(index))
        beyond = host(index) * (self.numel() // self.size(dim)) >= 2**31
        rows.index_fill_(dim, beyond.nonzero().view(-1), 0)
        return rows.to("mps")

    return kernels({"index_select": select})
