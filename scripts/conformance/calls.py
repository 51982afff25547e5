"""A call of an aten operator as data: it is stored, varied, moved between devices and written down to be pasted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hf_mps.metal.kernels.rules import Rule, overloads
from hf_mps.metal.operators import dispatcher


class Call(NamedTuple):
    """An overload ("add.Tensor") with arguments whose tensors are on the CPU; `origin` says where it comes from."""

    operator: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    origin: str
    size: str = "small"
    """"one", "empty" or "large" where the sample that made the call was resized before it ran."""
    of_backward: bool = False
    """Autograd made it: its arguments belong together, and PyTorch does not check that they do."""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        return [each for each in tree_leaves((self.arguments, self.options)) if isinstance(each, Tensor)]

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Call:
        """The same call with each tensor changed."""

        def leaf(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        arguments, options = tree_map(leaf, (self.arguments, self.options))
        return self._replace(arguments=arguments, options=options)


def short(overload: Any) -> str:
    """ "add.Tensor", "gelu": the name that rules and the ledger have for an overload."""
    return str(overload._name).removeprefix("aten::")


def overload(operator: str) -> Any:
    """The overload of a name. Raises AttributeError where this PyTorch has none."""
    return dispatcher.overload(f"aten::{operator}")


def forms(rule: Rule) -> dict[str, str]:
    """The overloads that a rule serves, each with "as named", "out" or "in place"."""
    found = [short(each) for each, _ in overloads(rule)]
    base = rule.operator.partition(".")[0]
    return {
        name: "as named" if place == 0 else "in place" if name.startswith(f"{base}_") and _in_place(name) else "out"
        for place, name in enumerate(found)
    }


def _in_place(name: str) -> bool:
    return not any(each.is_out for each in overload(name)._schema.arguments)


def written(operator: str) -> list[tuple[int | None, str]]:
    """The arguments that an overload writes: each by its place (None where it is given by keyword alone) and name."""
    found: list[tuple[int | None, str]] = []
    for place, each in enumerate(overload(operator)._schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            found.append((None if each.kwarg_only else place, each.name))
    return found


def argument(call: Call, name: str) -> Any:
    """What a call gives for an argument, or its default; None where the operator has no such one."""
    for place, each in enumerate(overload(call.operator)._schema.arguments):
        if each.name == name:
            given = call.arguments[place] if place < len(call.arguments) and not each.kwarg_only else None
            return given if given is not None else call.options.get(name, each.default_value)
    return None


def run(call: Call) -> list[Tensor | None]:
    """The tensors that a call returns and those it wrote, in order; None where an operator leaves a result out.

    Its arguments are the call's own: they are changed.
    """
    with torch.no_grad():
        returned = overload(call.operator)(*call.arguments, **call.options)
    leaves = [] if returned is None else tree_leaves(returned)
    results: list[Tensor | None] = [each for each in leaves if each is None or isinstance(each, Tensor)]
    for _, name in written(call.operator):
        results += [each for each in tree_leaves(argument(call, name)) if isinstance(each, Tensor)]
    return results


def on(call: Call, device: str) -> Call:
    """A call with memory of its own on a device: the same strides, storage offsets and values."""
    moved = call.with_tensors(lambda tensor: twin(tensor, device))

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device(device)
        return torch.Generator(device).manual_seed(7) if isinstance(value, torch.Generator) else value

    arguments, options = tree_map(leaf, (moved.arguments, moved.options))
    return moved._replace(arguments=arguments, options=options)


def twin(tensor: Tensor, device: str) -> Tensor:
    """A copy of a tensor with its whole storage, so that strides and the storage offset stay."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.detach().as_strided((size,), (1,), 0).clone().to(device)
    return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
