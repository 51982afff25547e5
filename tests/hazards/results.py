"""Kernels that compute something else without an error, as upstream issues describe them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.hazards.kernels import host, kernels


def fused_overflow() -> Any:
    """As up to torch 2.12 (pytorch#186360): the fused kernels read neither grad_scale nor found_inf."""
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


def frozen_norm() -> Any:
    """As up to torch 2.12 (pytorch#183825): where the input needs no gradient, the weights get what lay in memory."""
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


@contextmanager
def adaptive_max_pool() -> Iterator[None]:
    """pytorch#190064: one stride for all windows. The guard's kernel stands before the faulty one."""
    import torch

    from hf_mps.layer import guards
    from hf_mps.layer.guards import kernel_overrides

    guard = guards.get("adaptive-max-pool")

    def pooled(given: Any, sizes: Any) -> Any:
        steps = [size // wanted for size, wanted in zip(given.shape[-2:], sizes, strict=True)]
        windows = [n - (out - 1) * step for n, out, step in zip(given.shape[-2:], sizes, steps, strict=True)]
        return tuple(each.to("mps") for each in torch.ops.aten.max_pool2d_with_indices(host(given), windows, steps))

    def anew() -> None:
        guard.release()
        for target in guard.patches:
            kernel_overrides._places.pop(target.removeprefix("aten::"), None)
        guard.install(torch)

    with kernels({"adaptive_max_pool2d": pooled}):
        anew()
        yield
        guard.release()
    anew()
