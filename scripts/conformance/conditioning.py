"""How far a call's results move when its arguments do: by as much any sound way of computing may be off.

A sum of halves depends on its order, a difference of near numbers on the last place of each, a function beside a pole
on that of its argument. None is a fault: the result is the exact one of arguments that differ in the last place. So
where an error is above the plain tolerance, the arguments are moved by a unit in their last place and the call is
computed again in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from scripts.conformance import calls
from scripts.conformance.calls import Call

DRAWS = 8
"""Signs of the movements are random; the largest change of so many is taken."""
FINER = 16.0
"""A second movement is so many times smaller, and has to change the result less: at a step (floor, argmax) it does not,
and what lies on the wrong side of a step is a fault."""
EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.complex64: 2.0**-23}


def changes(call: Call, wide: Call, right: list[Tensor | None]) -> list[Tensor | None]:
    """Each result's largest change, in float64; None where a result is not floating or the call cannot be moved.

    `wide` is the call in float64 and `right` its results; the units are those of the call's own dtypes.
    """
    found: list[Tensor | None] = [None] * len(right)
    for draw in range(DRAWS):
        try:
            coarse, fine = (calls.run(_moved(call, wide, draw, scale)) for scale in (1.0, 1 / FINER))
        except Exception:
            return [None] * len(right)
        for place, exact in enumerate(right):
            change, lesser = (_change(exact, each[place]) for each in (coarse, fine))
            if change is None or lesser is None:
                continue
            smooth = torch.where(lesser <= change * (4 / FINER), change, 0.0)
            before = found[place]
            found[place] = smooth if before is None else torch.maximum(before, smooth)
    return found


def _moved(call: Call, wide: Call, draw: int, scale: float) -> Call:
    """The wide call with its numbers moved, those in tensors by their own dtype, others by the coarsest of these."""
    generator = torch.Generator().manual_seed(draw)
    units = [EPSILON.get(each.dtype, 0.0) * scale for each in call.tensors]
    of_tensors = iter(units)

    def signs(shape: tuple[int, ...]) -> Tensor:
        return torch.randint(2, shape, generator=generator).double() * 2 - 1

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            unit = next(of_tensors)
            return value * (1.0 + unit * signs(value.shape)) if unit else value.clone()
        return value * (1.0 + max(units) * int(signs(()))) if isinstance(value, float) and units else value

    arguments, options = tree_map(moved, (wide.arguments, wide.options))
    return wide._replace(arguments=arguments, options=options)


def _change(exact: Tensor | None, other: Tensor | None) -> Tensor | None:
    floating = exact is not None and (exact.is_floating_point() or exact.is_complex())
    if exact is None or other is None or not floating or exact.shape != other.shape:
        return None
    difference = other - exact
    parts = torch.view_as_real(difference) if difference.is_complex() else difference
    return parts.abs().nan_to_num(0.0, 0.0)
