"""dtype-copies: a copy to the CPU that also changes the dtype is made in two steps, the move and the change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.original_call import OriginalCall
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.numerics.non_blocking import has_its_own, target_device
from hf_mps.metal.device import faults

WIDE = ("torch.float64", "torch.complex128")
"""What torch 2.14.0 writes nothing of, without an error; 2.13 and 2.14.1 raise (pytorch#197715)."""


class DtypeCopies(Guard):
    """Wraps Tensor.to and Tensor.copy_ on the releases that have the fault; others keep their own methods.

    Up to 2.13 the device converts into the memory of the source where elements do not grow, unless the end happens to
    begin a page of memory (#189563), and reads a view's result at the wrong place (#194344): half weights that are
    saved, embeddings that are kept as float16. `tensor.to("cpu", torch.float64)`, which those releases refuse, works.
    Not seen: values assigned to a part of a CPU tensor (`kept[3:7] = there`) and Tensor.type_as.
    """

    name = "dtype-copies"
    what = "a copy from the device to the CPU that also changes the dtype overwrites its source or reads beside it"
    until = "the oldest supported torch is 2.14.1"
    patches = {"torch:Tensor.to": "_to", "torch:Tensor.copy_": "_copy"}

    untried = "a trial would depend on where the CPU's memory happens to lie"

    def trial(self) -> Choice[bool]:
        """Whether such copies, to ends that begin no page of memory, leave their source and their end right."""
        with self.left_alone():
            wrong = [name for name, copied in TRIALS.items() if not copied()]
        if wrong:
            return Choice(True, f"tried on the device: wrong are copies {' and '.join(wrong)}")
        return Choice(False, f"tried on the device: right are copies {' and '.join(TRIALS)}")

    def _to(self, stock: OriginalCall, tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not has_its_own(tensor) and tensor.device.type == "mps" and target_device(args, kwargs) == "cpu":
            wanted = _dtype(args, kwargs)
            if wanted is not None and self._wrong(tensor.dtype, wanted):
                tensor = stock.partial(tensor, "cpu")
        return stock(tensor, *args, **kwargs)

    def _copy(self, stock: OriginalCall, tensor: Any, src: Any, *args: Any, **kwargs: Any) -> Any:
        plain = not has_its_own(tensor, src)
        if plain and src.device.type == "mps" and tensor.device.type == "cpu" and self._wrong(src.dtype, tensor.dtype):
            src = stock.foreign(src.to, "cpu")
        return stock(tensor, src, *args, **kwargs)

    def _wrong(self, given: Any, wanted: Any) -> bool:
        if given == wanted or (str(wanted) not in WIDE and not faults.possible("dtype-copies")) or not self.needed:
            return False
        self.acted("copies to the CPU that also change the dtype are made in two steps", aloud=False)
        return True


def _dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dtype that Tensor.to is asked for, or None: to(device, dtype), to(other), by position or by name."""
    other = args[0] if args else kwargs.get("tensor")
    if hasattr(other, "is_floating_point") and hasattr(other, "device"):
        return getattr(other, "dtype", None)
    return kwargs.get("dtype", args[1] if len(args) > 1 else None)


def _keeps_its_source() -> bool:
    """Whether 1,024 values are the same after a copy of them as float16 (pytorch#189563)."""
    import torch

    values = torch.arange(1024.0, device="cpu")
    there = values.to("mps")
    end = torch.zeros(1027, dtype=torch.float16, device="cpu")[3:]  # begins no page of memory
    end.copy_(there)
    return torch.equal(there.cpu(), values) and torch.equal(end, values.half())


def _reads_a_view() -> bool:
    """Whether a view that begins behind its storage's first value arrives as it is (pytorch#194344)."""
    import torch

    values = torch.arange(1024.0, device="cpu")
    return torch.equal(values.to("mps")[512:].to("cpu", torch.float16), values[512:].half())


TRIALS: dict[str, Callable[[], bool]] = {"as float16": _keeps_its_source, "of a view": _reads_a_view}

GUARD = DtypeCopies()
