"""The peak of a deep model's step from traces of a few of its layers, which are all alike.

A moment's bytes grow by the same number with each layer: its weights, gradients and moments, and what it keeps for the
backward pass. Which moment is the highest changes with the depth, so each is scaled by itself, told by its phase, its
module (in the first layer, the last one, or between) and its operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hf_mps.tools.dryrun.memory.peak import Peak

FEW = (3, 4)
"""Layers of the two traces: with three there is one between the first and the last."""
LEAST = 10
"""Layers of a model for which two short traces cost less than a whole one."""
FIRST, BETWEEN, LAST = "first", "between", "last"
Key = tuple[str, str, str]


def identical_layers(model: Any) -> str | None:
    """The name of the longest list of at least LEAST layers that differ in their numbers alone; None without one."""
    lists = {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) >= LEAST and len(set(map(_signature, module))) == 1
    }
    return max(lists, key=lambda name: lists[name], default=None)


@contextmanager
def few(model: Any, name: str, count: int) -> Iterator[None]:
    """Leave `model` the first `count` layers of the list `name` while the context lasts."""
    parent = model.get_submodule(name.rpartition(".")[0])
    own = name.rpartition(".")[2]
    whole = parent._modules[own]
    parent._modules[own] = torch.nn.ModuleList(list(whole)[:count])
    try:
        yield
    finally:
        parent._modules[own] = whole


def folded(moments: Mapping[tuple[tuple[str, str], str], Peak], name: str, count: int) -> dict[Key, Peak]:
    """The highest moments of a trace of `count` layers by what they have in common with those of a trace of more."""

    def position(match: re.Match[str]) -> str:
        number = int(match[1])
        return f"{name}.{FIRST if number == 0 else LAST if number == count - 1 else BETWEEN}"

    layer = re.compile(rf"{re.escape(name)}\.(\d+)")
    found: dict[Key, Peak] = {}
    for ((phase, module), operator), one in moments.items():
        each = (phase, layer.sub(position, module), operator)
        found[each] = max(found.get(each, one), one, key=lambda peak: peak.bytes)
    return found


def scaled(found: Mapping[int, Mapping[Key, Peak]], depth: int) -> Peak | None:
    """The highest moment of `depth` layers, from those of the traces of FEW; None where they are not the same ones."""
    fewer, more = (found[count] for count in FEW)
    if fewer.keys() != more.keys():
        return None
    steps = (depth - FEW[1]) / (FEW[1] - FEW[0])
    made = (_further(fewer[each], more[each], steps) for each in more)
    return max(made, key=lambda one: one.bytes, default=None)


def _further(fewer: Peak, more: Peak, steps: float) -> Peak:
    parts = {part: round(size + steps * (size - fewer.parts.get(part, 0))) for part, size in more.parts.items()}
    return Peak(sum(parts.values()), parts, more.where)


def _signature(layer: Any) -> tuple[Any, ...]:
    """What a layer is made of and how it is set, without its number."""
    modules = [(name, type(one), _settings(one)) for name, one in layer.named_modules()]
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    held = [(name, one.shape, one.dtype, one.stride(), one.requires_grad) for name, one in tensors]
    return (*modules, *held)


def _settings(module: Any) -> tuple[Any, ...]:
    values = sorted(vars(module).items())
    plain = (bool, int, float, str, type(None))
    return tuple((name, value) for name, value in values if name != "layer_idx" and isinstance(value, plain))
