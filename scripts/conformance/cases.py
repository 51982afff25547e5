"""The cases of a rule: its calls by form, dtype, layout and size, in an order that every process shares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from hf_mps.metal.kernels.rules import RULES, Rule
from scripts.conformance import calls, layouts, samples, schema
from scripts.conformance.calls import Call

FLOATING = (torch.float32, torch.float16, torch.bfloat16)
INTEGER = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SAMPLES = {"dense": 6, "transposed": 3, "strided": 3, "offset": 2, "broadcast": 2, "one": 1, "empty": 1, "large": 2}
"""Calls of an operator in each layout (small) and size (dense and strided), for each dtype."""


class Case(NamedTuple):
    """One call to compare, and what it is a case of."""

    name: str
    """ "mul.Tensor/float16/strided/large/0": the same in every run of this version."""
    rule: str
    form: str
    dtype: str
    layout: str
    size: str
    call: Call


def wanted() -> list[str]:
    """The overloads whose calls are of use: every rule's, in all its forms."""
    return [name for rule in RULES.values() for name in calls.forms(rule)]


def every(
    captured: Iterable[Call],
    operators: frozenset[str] = frozenset(),
    name: str = "",
    share: tuple[int, int] = (0, 1),
    *,
    quick: bool = False,
) -> Iterator[Case]:
    """The cases of the rules, or of some operators' ("mul.Tensor", "mul"), or the one of a name.

    `quick` is one call of each operator, dtype and layout, and of the integers int64 alone. `share` is one process's
    place among some: whole rules, since their kernels are compiled once in a process.
    """
    known: dict[str, list[Call]] = defaultdict(list)
    for call in captured:
        known[call.operator].append(call)
    place = -1
    for rule in RULES.values():
        packet = rule.operator.partition(".")[0]
        if (operators and not operators & {rule.operator, packet}) or (name and not name.startswith(packet)):
            continue
        place += 1
        if place % share[1] != share[0]:
            continue
        numbers: dict[str, int] = defaultdict(int)
        for form, call, dtype, layout, size in _of_rule(rule, known, quick):
            kind = f"{call.operator}/{_name(dtype)}/{layout}/{size}"
            case = Case(f"{kind}/{numbers[kind]}", rule.operator, form, _name(dtype), layout, size, call)
            numbers[kind] += 1
            if name in ("", case.name):
                yield case


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_rule(
    rule: Rule, known: dict[str, list[Call]], quick: bool
) -> Iterator[tuple[str, Call, torch.dtype, str, str]]:
    for operator, form in calls.forms(rule).items():
        base = (known.get(operator) if form != "out" else None) or known.get(rule.operator)
        if not base:
            base = schema.generated(rule.operator)
        base = [*base, *filter(None, map(schema.with_optional_tensors, base[:3]))] if form == "as named" else base
        for dtype, calls_of_it in _by_dtype(base).items():
            few = form != "as named" or quick
            if quick and dtype not in (*FLOATING, torch.int64):
                continue
            for layout, size, call in _varied(calls_of_it, dtype, few):
                formed = _formed(call, operator, form, layout)
                if formed is not None:
                    yield form, formed, dtype, layout, size


def _by_dtype(base: list[Call]) -> dict[torch.dtype, list[Call]]:
    """The calls in every dtype: floating and integer ones of those that were captured in float32 and int64."""
    groups: dict[torch.dtype, list[Call]] = defaultdict(list)
    for call in base:
        own = next((each.dtype for each in call.tensors), torch.float32)
        targets = FLOATING if own.is_floating_point else INTEGER if own in INTEGER else (own,)
        for dtype in targets:
            groups[dtype].append(call if dtype == own else _cast(call, dtype))
    return {dtype: found for dtype, found in groups.items() if dtype != torch.float64}


def _cast(call: Call, dtype: torch.dtype) -> Call:
    """All tensors of the kind in the dtype, or the first alone where PyTorch refuses that."""
    whole = layouts.cast(call, dtype)
    if call.origin.startswith("by schema") or "optional tensors" in call.origin:
        return whole if schema.accepted(whole) else layouts.cast(call, dtype, first_alone=True)
    return whole


def _varied(found: list[Call], dtype: torch.dtype, few: bool) -> Iterator[tuple[str, str, Call]]:
    """Layout, size and call; the calls are taken from the whole list, not from its beginning alone."""
    plenty = dtype in FLOATING or dtype == torch.int64
    small = [each for each in found if each.size == "small"]
    for layout in layouts.LAYOUTS if plenty else ("dense",):
        for call in _spread(small, 1 if few or not plenty else SAMPLES[layout]):
            changed = layouts.laid_out(call, layout)
            if changed is not None:
                yield layout, "small", changed
    for size in samples.SIZES if plenty else ():
        for layout in ("dense",) if few else ("dense", "strided", "transposed") if size == "large" else ("dense",):
            for call in _resized(found, size, 1 if few else SAMPLES[size]):
                changed = layouts.laid_out(call, layout)
                if changed is not None:
                    yield layout, size, changed


def _resized(found: list[Call], size: str, count: int) -> list[Call]:
    """Forward calls in another size; autograd's come from samples that were resized before they ran."""
    ours = [each for each in found if each.size == "small" and not each.of_backward]
    made = [layouts.sized(each, size) for each in _spread(ours, count)]
    return [each for each in made if each is not None] or [each for each in found if each.size == size][:count]


def _spread(found: list[Call], count: int) -> list[Call]:
    if len(found) <= count:
        return found
    return [found[place * len(found) // count] for place in range(count)]


def _formed(call: Call, operator: str, form: str, layout: str) -> Call | None:
    """The call as another overload: out= gets tensors of the right shape full of sevens, in the layout."""
    if call.operator == operator or form == "as named":
        return call
    named = call._replace(operator=operator)
    if form == "in place":
        return None if layout == "broadcast" else named  # PyTorch refuses to write elements that are one
    try:
        results = calls.run(calls.on(call, "cpu"))
    except Exception:
        return None
    names = [each.name for each in calls.overload(operator)._schema.arguments if each.is_out]
    if len(names) != len(results):
        return None
    change = layouts.LAYOUTS["dense" if layout == "broadcast" else layout]
    made = zip(names, results, strict=True)
    given = {name: change(torch.full_like(each, 7)) for name, each in made if each is not None}
    return named._replace(options={**call.options, **given})
