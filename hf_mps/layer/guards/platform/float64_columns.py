"""float64-columns: columns of float64 in a batch become float32, which Metal has."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.layer.guards import training_hooks
from hf_mps.layer.guards.base import Guard


class Float64Columns(Guard):
    """Looks at batches just before they are moved; what a script moves itself keeps Metal's error."""

    name = "float64-columns"
    what = "a NumPy or torch column of float64 ends the run with Metal's TypeError when its batch is moved"
    issue = "https://github.com/pytorch/pytorch/issues/77781"
    until = "Metal has float64, which Apple's GPUs do not"
    patches = training_hooks.batches("_change")

    def applies(self) -> Choice[bool]:
        """Whether the device refuses float64."""
        import torch

        try:
            torch.zeros(1, dtype=torch.float64, device="mps")
        except TypeError as error:
            return Choice(True, f"tried on the device: {error}")
        return Choice(False, "tried on the device: it takes float64")

    def _change(self, batch: Any) -> Any:
        names: list[str] = []
        changed = _single(batch, "", names)
        if names and self.needed:
            self.acted(f"float64 became float32, which Metal has: {', '.join(sorted(set(names)))}")
            return changed
        return batch


def _single(value: Any, name: str, names: list[str]) -> Any:
    """`value` with its float64 tensors as float32; what holds none is returned itself. Appends their names."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.dtype != torch.float64:
            return value
        names.append(name or "the batch")
        return value.float()
    if isinstance(value, Mapping):
        inside = {key: _single(each, str(key), names) for key, each in value.items()}
        if all(inside[key] is value[key] for key in inside):
            return value
        changed: Any = copy.copy(value)  # a BatchEncoding keeps more than its columns
        for key, each in inside.items():
            changed[key] = each
        return changed
    if isinstance(value, tuple | list):
        items = [_single(each, name, names) for each in value]
        if all(one is other for one, other in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


GUARD = Float64Columns()
