"""What a call should give: the CPU in float64, the CPU's own error beside it, and what counts as agreement."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from scripts.conformance import calls, conditioning, contract, layouts
from scripts.conformance.calls import Call

RELATIVE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.complex64: 2e-6}
ABSOLUTE = 1e-5
"""Beside the relative tolerance: torch.testing's defaults, with two units in the last place of a half."""
OF_THE_CPU = 8.0
"""An error is no difference up to this many times the CPU's own in the same call."""
OF_THE_ARGUMENTS = 4.0
"""Nor by so many times the result's change more, where the arguments change in their last place."""
SIGNIFICANT = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.complex64: 24}
LEAST_EXPONENT = {torch.float32: -126, torch.float16: -14, torch.bfloat16: -126, torch.complex64: -126}
DRAWS = 4096
"""Random results are compared as distributions from this many elements on."""


class Wanted(NamedTuple):
    """The right results, in float64 where they are floating; the CPU's own, or None where it has no such kernel."""

    right: list[Tensor | None]
    own: list[Tensor | None] | None
    largest: float
    """Of the floating arguments: what errors are measured by where the CPU has no kernel for the dtype."""
    call: Call | None = None
    wide: Call | None = None
    """The call whose results these are, and the same in float64."""


class Verdict(NamedTuple):
    """Whether results agree, in words where they do not, and the largest errors in units in the last place."""

    agrees: bool
    detail: str
    error: float
    own_error: float
    conditioned: bool = False
    """They agree by the change of the arguments in their last place, and not by the plain tolerance."""


def wanted(call: Call) -> Wanted | None:
    """The right results of a call, or None where PyTorch refuses its arguments or no oracle is there.

    They are those of dense tensors with the same values: no result depends on how memory is laid out, and the CPU's
    own kernels are wrong for some layouts (native_group_norm_backward reads a transposed input as if it were dense).
    """
    call = layouts.dense(call)
    own: list[Tensor | None] | None
    try:
        own = calls.run(calls.on(call, "cpu"))
    except Exception as error:
        if "not implemented for" not in str(error) and "Could not run" not in str(error):
            return None
        own = None
    for first_alone in (False, True):
        wide = layouts.cast(call, torch.float64, first_alone=first_alone)
        wide = layouts.cast(wide, torch.complex128, first_alone=first_alone)
        try:
            right = calls.run(calls.on(wide, "cpu"))
        except Exception:
            continue
        return Wanted(right, own, _magnitude(call), call, wide)
    return None if own is None else Wanted(own, own, _magnitude(call), call)


def _magnitude(call: Call) -> float:
    floating = [each.float() for each in call.tensors if each.is_floating_point() and each.numel()]
    return max((float(each.nan_to_num(0, 0, 0).abs().max()) for each in floating), default=0.0)


def verdict(found: list[Tensor | None], expected: Wanted, *, random: bool) -> Verdict:
    """Compare results with the right ones."""
    if len(found) != len(expected.right):
        return Verdict(False, f"{len(found)} results, not {len(expected.right)}", math.inf, 0.0)
    compared = _drawn_results(found, expected) if random else _results(found, expected)
    worst = Verdict(True, "", 0.0, 0.0)
    for place, one in compared:
        worst = Verdict(
            worst.agrees and one.agrees,
            worst.detail or (one.detail and f"result {place}: {one.detail}"),
            max(worst.error, one.error),
            max(worst.own_error, one.own_error),
            worst.conditioned or one.conditioned,
        )
    return worst


def _drawn_results(found: list[Tensor | None], expected: Wanted) -> Iterator[tuple[int, Verdict]]:
    for place, (mine, right) in enumerate(zip(found, expected.right, strict=True)):
        own = expected.own[place] if expected.own is not None else None
        if mine is not None and right is not None:
            yield place, _drawn(mine, right if own is None else own)


def _results(found: list[Tensor | None], expected: Wanted) -> Iterator[tuple[int, Verdict]]:
    """The results that are compared; an error above the plain tolerance is looked at in the light of the arguments."""
    call, wide = expected.call, expected.wide
    moved: list[Tensor | None] | None = None
    for place, (mine, right) in enumerate(zip(found, expected.right, strict=True)):
        if mine is None or right is None or (call is not None and contract.private(call.operator, place)):
            continue
        own = expected.own[place] if expected.own is not None else None
        one = _compared(mine, right, own, expected.largest)
        if not one.agrees and call is not None and mine.shape == right.shape:
            excused = contract.as_good(call, found, place)
            if excused is None:
                excused = contract.failed(call.operator, expected.right, place)
            if moved is None:
                moved = [None] * len(found) if wide is None else conditioning.changes(call, wide, expected.right)
            again = _compared(mine, right, own, expected.largest, excused, moved[place])
            one = again._replace(conditioned=again.agrees and excused is None)
        yield place, one


def _compared(
    mine: Tensor,
    right: Tensor,
    own: Tensor | None,
    largest: float,
    excused: Tensor | None = None,
    moved: Tensor | None = None,
) -> Verdict:
    """`excused` is what is right though it differs; `moved` how far the result moves with its arguments."""
    if mine.shape != right.shape:
        return Verdict(False, f"shape {list(mine.shape)}, not {list(right.shape)}", math.inf, 0.0)
    if own is not None and own.shape != right.shape:
        own = None  # what the CPU leaves in a result that it does not use is its own affair
    if own is not None and mine.dtype != own.dtype:
        return Verdict(False, f"{mine.dtype}, not {own.dtype}", math.inf, 0.0)
    if mine.dtype not in SIGNIFICANT:
        same = mine == right.to(mine.dtype)
        if own is not None:
            same |= mine == own
        if excused is not None:
            same |= excused
        wrong = int((~same).sum())
        detail = f"{wrong} of {mine.numel()} differ: {_shown(mine, right, ~same)}" if wrong else ""
        return Verdict(not wrong, detail, 0.0, 0.0)
    found, target = _real(mine), _real(right)
    if excused is not None:
        found = torch.where(excused, target.to(found.dtype), found)
    rounded = target.to(found.dtype)
    error, ulps = _errors(found, target, rounded, mine.dtype)
    own_error = own_ulps = torch.zeros(())
    if own is not None and own.numel():
        own_error, own_ulps = _errors(_real(own), target, rounded, mine.dtype)
    allowed = ABSOLUTE + RELATIVE[mine.dtype] * target.abs().nan_to_num(0, 0, 0)
    slack = OF_THE_CPU * float(own_error.nan_to_num(0, 0, 0).max()) if own_error.numel() else 0.0
    slack = RELATIVE[mine.dtype] * largest if own is None else slack
    allowed = torch.clamp(allowed, min=slack)
    if moved is not None:
        allowed = allowed + OF_THE_ARGUMENTS * moved
    bad = ~(error <= allowed)
    if bool((target.isfinite() & (target.abs() > torch.finfo(found.dtype).max)).any()):
        bad &= found.isfinite()  # a value on the way, or at the end, is beyond the dtype's range
    if own is not None:
        bad &= ~_alike(found, _real(own))
    count = int(bad.sum())
    detail = f"{count} of {found.numel()} differ: {_shown(found, target, bad)}" if count else ""
    return Verdict(not count, detail, _largest(ulps), _largest(own_ulps))


def _errors(found: Tensor, target: Tensor, rounded: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Absolute errors and units in the last place; 0 for the same infinity or NaN, infinite for another."""
    alike = _alike(found, rounded)
    error = torch.where(alike, 0.0, (found.double() - target.double()).abs())
    error = error.nan_to_num(math.inf, math.inf)
    least = LEAST_EXPONENT[dtype]
    _, exponent = torch.frexp(target.double().abs().nan_to_num(0, 0, 0))
    exponent = torch.where(target == 0, least, torch.clamp(exponent - 1, min=least))
    unit = torch.pow(2.0, (exponent - (SIGNIFICANT[dtype] - 1)).double())
    return error, error / unit


def _alike(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | (one.isnan() & other.isnan())


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _shown(found: Tensor, target: Tensor, bad: Tensor) -> str:
    place = int(bad.reshape(-1).nonzero()[0])
    return f"element {place} is {found.reshape(-1)[place].item():.9g}, not {target.reshape(-1)[place].item():.9g}"


def _drawn(mine: Tensor, theirs: Tensor) -> Verdict:
    """Two draws of one distribution: Kolmogorov and Smirnov's distance, at one error in about a million."""
    if mine.shape != theirs.shape:
        return Verdict(False, f"shape {list(mine.shape)}, not {list(theirs.shape)}", math.inf, 0.0)
    count = mine.numel()
    if count < DRAWS or mine.is_complex():
        return Verdict(True, "", 0.0, 0.0)
    one, other = (each.reshape(-1).double().sort().values for each in (mine, theirs.to(mine.dtype)))
    both = torch.cat([one, other])
    distance = float(
        (torch.searchsorted(one, both, right=True) - torch.searchsorted(other, both, right=True)).abs().max() / count
    )
    limit = 2.7 * math.sqrt(2 / count)
    detail = f"another distribution: distance {distance:.3g}, at most {limit:.3g} expected" if distance > limit else ""
    return Verdict(not detail, detail, 0.0, 0.0)
