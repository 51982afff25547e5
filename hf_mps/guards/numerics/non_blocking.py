"""non-blocking: copies to the CPU, and on older releases to the device, wait until they are done."""

from __future__ import annotations

from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.guards.base import Guard
from hf_mps.guards.introspect import torch_release

HOLDS = (2, 13)
"""From here on a copy to the device keeps its source's storage until the GPU has read it.

pytorch#181017, in the notes of that release; the block that holds it is in the macOS wheel of 2.13.0, not of 2.12.0.
"""


class NonBlocking(Guard):
    """Wraps Tensor.to and Tensor.copy_, the lowest place where a `non_blocking=True` can be seen.

    Module.to, accelerate's send_to_device, Trainer and BatchEncoding.to all end there. A kernel under aten::copy_ would
    lie lower, and would put Python into each of a step's thousands of copies.

    A copy to the device that waits drains the GPU's queue, so it does so only where it must. From 2.13 on a source that
    was freed is held; one that the script itself writes to before the GPU has read it is not, as with pinned memory on
    CUDA. No release makes the CPU wait for a copy to it: whoever reads the result at once reads too soon.
    """

    name = "non-blocking"
    what = (
        "a non_blocking copy reads its source after that was freed, or is read before it is there: silent wrong values"
    )
    issue = "https://github.com/pytorch/pytorch/issues/189690"
    until = "the oldest supported torch is 2.13 and a non_blocking copy to the CPU is there when it is read"
    releases = ">=2.8"
    patches = {"torch:Tensor.to": "_to", "torch:Tensor.copy_": "_copy"}

    def applies(self) -> Choice[bool]:
        """Always where there is Metal, and by release: a race that a trial does not show is not known to be absent."""
        release = ".".join(map(str, torch_release()))
        if torch_release() < HOLDS:
            return Choice(True, f"torch {release} holds no source of a copy to the device: 2.13 does (pytorch#181017)")
        return Choice(True, f"copies to the CPU alone: torch {release} holds the source of one to the device")

    def _to(self, stock: Any, tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("non_blocking") or (len(args) > 1 and True in args[1:])
        if asked and not has_its_own(tensor):
            target = target_device(args, kwargs)
            if target is not None and _unsafe(tensor.device.type, target):
                args, kwargs = _blocking(args, kwargs)
                self._tell()
        return stock(tensor, *args, **kwargs)

    def _copy(self, stock: Any, tensor: Any, src: Any, *args: Any, **kwargs: Any) -> Any:
        asked = args[0] if args else kwargs.get("non_blocking")
        if asked and not has_its_own(tensor, src) and _unsafe(src.device.type, tensor.device.type):
            self._tell()
            return stock(tensor, src)
        return stock(tensor, src, *args, **kwargs)

    def _tell(self) -> None:
        self.acted("copies between the CPU and the device wait: non_blocking=True would corrupt them", aloud=False)


def holds_sources() -> bool:
    """Whether this release keeps the source of a copy to the device until the GPU has read it."""
    return torch_release() >= HOLDS


def _unsafe(source: str, target: str) -> bool:
    """Whether such a copy, which does not wait, can give other values than one that does."""
    return (source, target) == ("mps", "cpu") or ((source, target) == ("cpu", "mps") and not holds_sources())


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
