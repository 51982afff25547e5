"""non-blocking: copies between the CPU and the device wait until they are done, whatever non_blocking says."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hf_mps.choice import Choice
from hf_mps.guards.guard import Guard, around

_ENDS = {"cpu", "mps"}


class NonBlocking(Guard):
    """Wraps Tensor.to and Tensor.copy_, the lowest place where a `non_blocking=True` can be seen.

    Module.to, accelerate's send_to_device, Trainer and BatchEncoding.to all end there. A kernel under aten::copy_ would
    lie lower, and would put Python into each of a step's thousands of copies.
    """

    name = "non-blocking"
    what = "a non_blocking copy to the device reads its source after that was freed or changed: silently other values"
    issue = "https://github.com/pytorch/pytorch/issues/189690"
    until = "pytorch#189690 and #139550 are closed and the oldest supported torch has the fix"

    def applies(self) -> Choice[bool]:
        """Always where there is Metal: a race that a trial does not show is not known to be absent."""
        return Choice(True, "no released torch holds the source of such a copy, and a trial cannot show that one does")

    def install(self, module: ModuleType) -> None:
        """Put it around the two methods of torch.Tensor."""
        around(self, module.Tensor, "to", self._to)
        around(self, module.Tensor, "copy_", self._copy)

    def _to(self, stock: Any, tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("non_blocking") or (len(args) > 1 and True in args[1:]):
            target = target_device(args, kwargs)
            if target is not None and {tensor.device.type, target} == _ENDS:
                args, kwargs = _blocking(args, kwargs)
                self._tell()
        return stock(tensor, *args, **kwargs)

    def _copy(self, stock: Any, tensor: Any, src: Any, non_blocking: bool = False) -> Any:
        if non_blocking and {tensor.device.type, src.device.type} == _ENDS:
            non_blocking = False
            self._tell()
        return stock(tensor, src, non_blocking)

    def _tell(self) -> None:
        self.acted("copies between the CPU and the device wait: non_blocking=True would corrupt them", aloud=False)


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
