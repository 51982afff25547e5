"""Notes every operator that a training step calls on the device, below autograd: how often, where, in which dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_mps.audit.kinds import NO_OPERATORS
from hf_mps.target.places import Places, family

# Where a composite kernel calls other operators in C++, nobody sees them. It is called once more, in the open.
COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd


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

    `unfold(name)` says of which composite operators the inner calls are wanted; those are found with fake tensors only,
    where calling twice changes nothing.
    """

    def __init__(self, where: Places, device: str = "mps", unfold: Callable[[str], bool] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, Seen] = {}
        self._where, self._device, self._unfold = where, device, unfold
        self._inner: dict[str, list[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.name()
        if not name.startswith(NO_OPERATORS):
            # What a call without arguments made, or moved here, counts as the device's too.
            found = [each.dtype for each in self._on_device((args, kwargs, result))]
            if found:
                self._note(name, found)
                for inner in self._called_inside(func, args, kwargs):
                    self._note(inner, [])
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

    def _called_inside(self, func: Any, args: Any, kwargs: Any) -> list[str]:
        """The operators that a composite kernel calls, found once for each operator."""
        name = func.name()
        if name not in self._inner:
            wanted = self._unfold is not None and self._unfold(name)
            self._inner[name] = self._open(func, args, kwargs) if wanted else []
        return self._inner[name]

    def _open(self, func: Any, args: Any, kwargs: Any) -> list[str]:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeExplicitAutograd"):
            return []
        inside = _Names()
        try:
            with inside:
                func._op_dk(COMPOSITE, *args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError):
            pass  # it asked fake tensors for a value; what it had called before that is known
        return [name for name in inside.names if name != func.name() and not name.startswith(NO_OPERATORS)]


class _Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))
