"""Arguments for an operator that no sample of PyTorch calls, from its schema: types, and what their names mean.

An argument's name says the same thing in every operator (`inv_scale` is one float32 number, `dim` a dimension), so
that what is here knows names and no operator. Several shapes are tried; what PyTorch accepts on the CPU is a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from scripts.conformance import calls
from scripts.conformance.calls import Call

SHAPES = ((7, 5), (3, 4, 6), (11,), (2, 3, 8, 8), (1, 6), ())
MOST = 4
"""Calls that are kept of one operator."""


def _number(value: float, dtype: torch.dtype = torch.float32) -> Callable[[Any], Any]:
    return lambda shape: torch.tensor(value, dtype=dtype)


TENSORS: dict[str, Callable[[Any], Any]] = {
    "found_inf": _number(0.0),
    "inv_scale": _number(0.5),
    "grad_scale": _number(8.0),
    "lr": _number(0.01),
    "growth_tracker": lambda shape: torch.zeros(1, dtype=torch.int32),
    "indices": lambda shape: torch.randint(3, shape),
    "index": lambda shape: torch.randint(3, shape),
    "mask": lambda shape: torch.rand(shape) < 0.5,
    "condition": lambda shape: torch.rand(shape) < 0.5,
}
"""Tensors that are no ordinary values, by their name."""
LISTS: dict[str, Callable[[Any], Any]] = {"state_steps": lambda shape: torch.tensor(3.0)}
NUMBERS: dict[str, Any] = {
    **{"p": 0.25, "dropout": 0.0, "train": True, "lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
    **{"momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False, "amsgrad": False, "eps": 1e-6},
    **{"scale_growth_factor": 2.0, "scale_backoff_factor": 0.5, "growth_interval": 3, "num_weights": 9, "dim": 0},
    **{"padding_idx": -1, "maximize": False, "k": 2, "diagonal": 0, "to": 100, "from": 3, "low": 0, "high": 9},
    **{"std": 2.0, "mean": 0.5, "scale": 2.0},
}
POSITIVE = frozenset(["exp_avg_sqs", "max_exp_avg_sqs", "rstd", "invstd", "variance"])


def generated(operator: str) -> list[Call]:
    """Calls of an operator that PyTorch accepts on the CPU, of several shapes, with optional tensors and without.

    None of a gradient's operator: autograd alone calls it, and PyTorch does not check that its shapes fit together.
    """
    if "_backward" in operator or operator.endswith("_grad"):
        return []
    torch.manual_seed(11)
    found: list[Call] = []
    for shape in SHAPES:
        for optional in (False, True):
            for call in _attempts(operator, shape, optional):
                if torch.Tag.nondeterministic_seeded in calls.overload(operator).tags:
                    call = call.with_tensors(torch.abs)  # parameters of distributions
                if len(found) < MOST and accepted(call):
                    found.append(call)
                    break
    return found


def with_optional_tensors(call: Call) -> Call | None:
    """A captured call with what it left out, where the name of an optional tensor says what it is."""
    schema = calls.overload(call.operator)._schema.arguments
    options = dict(call.options)
    for each in schema:
        if str(each.type) == "Optional[Tensor]" and each.name in TENSORS and each.kwarg_only:
            options.setdefault(each.name, None)
            if options[each.name] is None:
                options[each.name] = TENSORS[each.name](())
    changed = call._replace(options=options, origin=f"{call.origin}, optional tensors given")
    return changed if options != call.options and accepted(changed) else None


def _attempts(operator: str, shape: tuple[int, ...], optional: bool) -> Iterator[Call]:
    """With a list's tensors alike, or each of another shape, and numbers as one-element tensors where that is asked."""
    schema = calls.overload(operator)._schema.arguments
    for single in (False, True):
        arguments, options = [], {}
        for each in schema:
            value = _value(each, shape, optional, single)
            if each.kwarg_only:
                options[each.name] = value
            else:
                arguments.append(value)
        yield Call(operator, tuple(arguments), options, "by schema")


def _value(argument: Any, shape: tuple[int, ...], optional: bool, single: bool) -> Any:
    kind, name = str(argument.type), argument.name
    if kind.startswith("Optional["):
        kind = kind.removeprefix("Optional[").removesuffix("]")
        if not (optional and kind == "Tensor"):
            return argument.default_value if argument.has_default_value() else NUMBERS.get(name)
    if kind == "Tensor":
        made = TENSORS[name](shape) if name in TENSORS else _values(name, shape)
        return made.reshape(1) if single and made.dim() == 0 else made
    if kind == "List[Tensor]":
        return _list(name, shape)
    if argument.has_default_value():
        return argument.default_value
    if name in NUMBERS:
        return NUMBERS[name]
    return {"float": 0.5, "int": 1, "bool": False, "number": 2, "Scalar": 2, "List[int]": list(shape[-1:])}.get(kind)


def _values(name: str, shape: tuple[int, ...]) -> Tensor:
    values = torch.randn(shape)
    return values.abs() + 0.1 if name in POSITIVE else values


def _list(name: str, shape: tuple[int, ...]) -> list[Tensor]:
    """Three tensors of different shapes, and each list of an operator alike."""
    shapes = (shape, (13,), (*shape, 2))
    return [LISTS[name](each) if name in LISTS else _values(name, each) for each in shapes]


def accepted(call: Call) -> bool:
    """Whether PyTorch takes the arguments on the CPU."""
    try:
        calls.run(calls.on(call, "cpu"))
    except Exception:
        return False
    return True
