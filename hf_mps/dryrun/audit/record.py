"""Notes every operator that a training step calls on the device, below autograd: how often, where, in which dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_mps.dryrun.modules import Places, family
from hf_mps.operators.support import NO_OPERATORS, SEEN_AS


@dataclass
class Seen:
    """What one operator ("aten::add.Tensor") did: calls for each (phase, module), and dtypes on the device."""

    name: str
    places: dict[tuple[str, str], int] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)

    @property
    def calls(self) -> int:
        """Calls of all places together."""
        return sum(self.places.values())


class Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it around a step; `seen` maps each operator's name to what it did.

    What a composite kernel calls inside, in C++, is not seen; of a structured operator's forms that is known from the
    table (`hf_mps.operators.table.Table.kernel_owners`).
    """

    def __init__(self, where: Places, device: str = "mps") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, Seen] = {}
        self._where, self._device = where, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = SEEN_AS.get(func.name(), func.name())
        if not name.startswith(NO_OPERATORS):
            # What a call without arguments made, or moved here, counts as the device's too.
            found = [each.dtype for each in self._on_device((args, kwargs, result))]
            if found:
                self._note(name, found)
        return result

    def _on_device(self, tree: Any) -> Iterator[torch.Tensor]:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device:
                yield leaf

    def _note(self, name: str, dtypes: list[torch.dtype]) -> None:
        seen = self.seen.setdefault(name, Seen(name))
        phase, module = self._where.here()
        place = (phase, family(module))
        seen.places[place] = seen.places.get(place, 0) + 1
        seen.dtypes.update(dtypes)
