"""non-blocking: copies to the CPU wait until they are done."""

from __future__ import annotations

from typing import Any

from hf_mps.layer.guards.base import Guard


class NonBlocking(Guard):
    """Wraps Tensor.to and Tensor.copy_, the lowest place where a `non_blocking=True` can be seen.

    Module.to, accelerate's send_to_device, Trainer and BatchEncoding.to all end there. A kernel under aten::copy_ would
    lie lower, and would put Python into each of a step's thousands of copies.

    No release makes the CPU wait for a copy to it: whoever reads the result at once reads too soon. A copy to the
    device stays as it was asked for: torch holds its source until the GPU has read it (pytorch#181017). A script that
    writes to the source meanwhile changes what arrives, as with pinned memory on CUDA.
    """

    name = "non-blocking"
    what = "a non_blocking copy to the CPU is read before it is there: silent wrong values"
    until = "a non_blocking copy to the CPU is there when it is read"
    untried = "a race that a trial does not show is not known to be absent"
    patches = {"torch:Tensor.to": "_to", "torch:Tensor.copy_": "_copy"}

    def _to(self, stock: Any, tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("non_blocking") or (len(args) > 1 and True in args[1:])
        if asked and not has_its_own(tensor):
            target = target_device(args, kwargs)
            if tensor.device.type == "mps" and target == "cpu":
                args, kwargs = _blocking(args, kwargs)
                self._tell()
        return stock(tensor, *args, **kwargs)

    def _copy(self, stock: Any, tensor: Any, src: Any, *args: Any, **kwargs: Any) -> Any:
        asked = args[0] if args else kwargs.get("non_blocking")
        if asked and not has_its_own(tensor, src) and src.device.type == "mps" and tensor.device.type == "cpu":
            self._tell()
            return stock(tensor, src)
        return stock(tensor, src, *args, **kwargs)

    def _tell(self) -> None:
        self.acted("copies to the CPU wait: with non_blocking=True they would be read too early", aloud=False)


def has_its_own(*tensors: Any) -> bool:
    """Whether a tensor's class is asked first what a function of torch does: it is called, and calls the plain one.

    Its `__torch_function__` would be told of every attribute that is read before.
    """
    import torch

    return torch.overrides.has_torch_function(tensors)


def target_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The device type that Tensor.to is asked for, or None where it only changes the dtype."""
    first = args[0] if args else kwargs.get("device", kwargs.get("tensor"))
    if isinstance(first, str):
        return first.partition(":")[0]
    device = getattr(first, "device", first)  # `to(other)` goes to another tensor's device
    kind = getattr(device, "type", None)
    return kind if isinstance(kind, str) else None


def _blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same with non_blocking=False; by position: to(other, non_blocking), to(device, dtype, non_blocking)."""
    if kwargs.get("non_blocking"):
        return args, {**kwargs, "non_blocking": False}
    place = 1 if hasattr(args[0], "is_floating_point") and hasattr(args[0], "device") else 2
    return tuple(False if index == place else each for index, each in enumerate(args)), kwargs


GUARD = NonBlocking()
