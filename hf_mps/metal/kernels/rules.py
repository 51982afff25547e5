"""Launch rules: what an aten operator launches on Metal, and how that stands in the place of the simulated kernel.

A rule is a function of a release and the operator's arguments, in a file of `launch/`. `@rule` is for one overload, and
returns its results. `@out_rule` gets the outputs first, already made, and serves the functional overload that it
names, its `out=` overload and its in-place one, as PyTorch's structured operators share one kernel. Operators that
differ in a word share a function: each decorator gives it the word as a keyword (`kernel="tril"`). A rule that does not
cover a call raises NoRule with the reason: the operator then runs as it does without kernels, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from hf_mps.core.notices import overriding
from hf_mps.core.text import first_line
from hf_mps.metal.kernels.runtime import NoRule, recording
from hf_mps.metal.operators.dispatcher import registered_kernel

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch._ops import OpOverload

    from hf_mps.metal.kernels.release import Release
from collections import Counter
from dataclasses import field

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


@dataclass(frozen=True)
class Rule:
    """What launches one operator: the function, the file of PyTorch that decides it, how outputs come."""

    operator: str
    """The overload that the rule names, as "gelu" or "add.Tensor"."""
    function: Function
    source: str
    """PyTorch's file with the host's decision, below aten/src/ATen/native/mps."""
    family: str
    """The file of `launch/` that the rule is in."""
    makes_outputs: bool
    """The rule returns its results; else they are made before and given to it."""
    outputs: Function | None = None
    """Makes them: `outputs(given, *arguments)`, where `given` is the tensor to write to, or None. Without it, PyTorch's
    Meta kernel does, in 90 µs."""


RULES: dict[str, Rule] = {}


def rule(*operators: str, source: str, **fixed: Any) -> Callable[[F], F]:
    """`function(release, *arguments, **fixed)` returns the results of these overloads ("native_layer_norm", …)."""
    return _declared(operators, source, fixed, makes_outputs=True)


def out_rule(*operators: str, source: str, outputs: Function | None = None, **fixed: Any) -> Callable[[F], F]:
    """`function(release, outputs, *arguments, **fixed)` fills `outputs`, a tensor or a tuple, for these overloads.

    The functional overload is named; what has the same arguments and `out=`, or writes `self`, is served too. Outputs
    have the shape, dtype and strides that PyTorch's own Meta kernel gives them, or `outputs(given, *arguments)` makes
    the one that there is, or checks what is to be written to and returns it (`given`).
    """
    return _declared(operators, source, fixed, makes_outputs=False, outputs=outputs)


def _declared(
    operators: tuple[str, ...],
    source: str,
    fixed: dict[str, Any],
    *,
    makes_outputs: bool,
    outputs: Function | None = None,
) -> Callable[[F], F]:
    def declare(function: F) -> F:
        bound = partial(function, **fixed) if fixed else function
        family = function.__module__.rpartition(".")[2]
        for operator in operators:
            if operator in RULES:
                raise ValueError(f"two rules for {operator}")
            RULES[operator] = Rule(operator, bound, source, family, makes_outputs, outputs)
        return function

    return declare


class Dispatch:
    """The rules of a release in front of the simulated device's kernels.

    `device` is the simulated one: `begin_launch(tensors)` brings in what is queued, `launched(name, text)` counts.
    """

    def __init__(self, release: Release, ledger: Ledger, device: Any) -> None:
        self.release, self.ledger, self.device = release, ledger, device
        self._library: Any = None
        self._rules: dict[str, Rule] = {}

    def install(self, rules: dict[str, Rule]) -> None:
        """Register every rule's overloads for the device, below autograd.

        The kernel of before is the device's own, or one below autograd for every device, as that of `copy_` is.
        """
        import torch

        self._rules = rules
        self._library = torch._C._dispatch_library("IMPL", "aten", "MPS", __file__)
        with overriding():
            for each in rules.values():
                for overload, form in overloads(each):
                    keys = ("MPS", "CompositeExplicitAutograd") if each.makes_outputs else ("MPS",)
                    if any(torch._C._dispatch_has_kernel_for_dispatch_key(overload._name, key) for key in keys):
                        self._library.impl(
                            overload._name.removeprefix("aten::"), "MPS", self._kernel(each, overload, form)
                        )

    def remove(self) -> None:
        """Give every operator its kernel of before back."""
        self._library.reset()

    def _kernel(self, rule: Rule, overload: OpOverload, form: Form) -> Function:
        import torch

        from hf_mps.metal.operators.calls import call_of, text_of

        name, here = overload._name, torch._C.DispatchKeySet(torch._C.DispatchKey.MPS)
        stock = registered_kernel(name)
        short, release, ledger, device = name.removeprefix("aten::"), self.release, self.ledger, self.device
        # A number in a tensor's place comes as Python's, and a boxed kernel takes tensors.
        places = {at for at, each in enumerate(overload._schema.arguments) if str(each.type) == "Tensor"}

        def kernel(*arguments: Any, **options: Any) -> Any:
            device.begin_launch(tensors((arguments, tuple(options.values()))))
            with recording() as launched:
                try:
                    result = form(rule, release, arguments, options)
                except NoRule as reason:
                    ledger.without(short, str(reason))
                else:
                    given = (arguments, options)
                    device.launched(name, text_of(call_of(name, given, ())) if device.recording() else "")
                    ledger.ran(short, launched)
                    return result
            boxed = tuple(
                device.wrapped_number(each) if at in places and isinstance(each, int | float | complex) else each
                for at, each in enumerate(arguments)
            )
            try:
                return stock(*boxed, **options)
            except RuntimeError as error:
                if "SafeKernelFunction has been invalidated" not in str(error):
                    raise
            # A guard took its kernel away, which was there when the rules came: what is there now is below it.
            self.remove()
            self.install(self._rules)
            return overload.redispatch(here, *boxed, **options)

        return kernel


Form = Callable[["Rule", "Release", tuple[Any, ...], dict[str, Any]], Any]


def overloads(rule: Rule) -> list[tuple[OpOverload, Form]]:
    """The overloads that a rule serves, each with the way its outputs come to it; none where torch has no such one."""
    import torch

    packet, _, name = rule.operator.partition(".")
    family = getattr(torch.ops.aten, packet, None)
    if family is None or (name or "default") not in family.overloads():
        return []
    first = getattr(family, name or "default")
    if rule.makes_outputs:
        return [(first, lambda rule, release, arguments, options: rule.function(release, *arguments, **options))]
    found: list[tuple[OpOverload, Form]] = [(first, partial(_functional, first))]
    given = _inputs(first)
    for other in family.overloads():
        overload = getattr(family, other)
        if _outputs(overload) and _inputs(overload) == given:
            found.append((overload, partial(_into_out, first, tuple(_outputs(overload)))))
    in_place = getattr(torch.ops.aten, f"{packet}_", None)
    for other in in_place.overloads() if in_place is not None else ():
        overload = getattr(in_place, other)
        if _inputs(overload) == given:
            found.append((overload, partial(_in_place, first)))
    return found


def _inputs(overload: OpOverload) -> list[tuple[str, str]]:
    given = [each for each in overload._schema.arguments if not each.is_out]
    return [(each.name, str(each.type)) for each in given]


def _outputs(overload: OpOverload) -> list[str]:
    return [each.name for each in overload._schema.arguments if each.is_out]


def _functional(
    first: OpOverload, rule: Rule, release: Release, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    make = rule.outputs
    outputs = made(first, arguments, options) if make is None else make(None, *arguments, **options)
    rule.function(release, outputs, *arguments, **options)
    return outputs


def _into_out(
    first: OpOverload,
    names: tuple[str, ...],
    rule: Rule,
    release: Release,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    given = [options[name] for name in names]
    rest = {name: value for name, value in options.items() if name not in names}
    outputs = given[0] if len(given) == 1 else tuple(given)
    _fit(first, rule, given, arguments, rest)
    rule.function(release, outputs, *arguments, **rest)
    return outputs


def _in_place(
    first: OpOverload, rule: Rule, release: Release, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    target = arguments[0]
    _fit(first, rule, [target], arguments, options)
    rule.function(release, target, *arguments, **options)
    return target


def made(first: OpOverload, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """New outputs of an operator, by PyTorch's Meta kernel: it computes shapes, dtypes and strides, and no values.

    Raises NoRule where that refuses the arguments, so that the device's kernel words the error.
    """
    import torch

    try:
        found = first.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.Meta), *arguments, **options)
    except Exception as error:
        raise NoRule(f"PyTorch refuses the arguments: {first_line(error)}") from None
    return tuple(map(_with_memory, found)) if isinstance(found, tuple) else _with_memory(found)


def _with_memory(output: Tensor) -> Tensor:
    """An output as the inputs' device has it: a few Meta kernels (upsample_nearest3d_backward) leave theirs on meta."""
    import torch

    if not output.is_meta:
        return output
    return torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device="mps")


def _fit(
    first: OpOverload, rule: Rule, given: list[Tensor], arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Refuse what a rule can't write its results to."""
    if rule.outputs is not None:
        rule.outputs(given[0], *arguments, **options)
    else:
        expected = made(first, arguments, options)
        for each, target in zip(expected if isinstance(expected, tuple) else (expected,), given, strict=True):
            refuse_misfit(target, each.shape, each.dtype)
    for target in given:
        refuse_repeated(target)


MISFIT = "the result has another shape or dtype than what it is written to"


def refuse_misfit(target: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> None:
    """Raises NoRule where a tensor that is written has another shape, or dtype, than the result (None: any dtype)."""
    if tuple(target.shape) != tuple(shape) or (dtype is not None and target.dtype != dtype):
        raise NoRule(MISFIT)


def refuse_repeated(target: Tensor) -> None:
    """Raises NoRule where a tensor that is written holds an element more than once."""
    if any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)):
        raise NoRule("what is written to holds elements more than once")


def tensors(values: Any) -> list[Tensor]:
    """The device's tensors in nested lists and tuples."""
    import torch

    if isinstance(values, torch.Tensor):
        return [values] if values.is_mps else []
    return [each for value in values for each in tensors(value)] if isinstance(values, list | tuple) else []


@dataclass
class Ledger:
    """Counts since it was made, of all threads."""

    operators: Counter[str] = field(default_factory=Counter)
    """Calls of an operator ("add.Tensor") that a rule ran whole."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Launches of a kernel by its name."""
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls of an operator that has a rule, and that the rule did not cover: the operator and the reason."""

    def ran(self, operator: str, kernels: list[str]) -> None:
        """An operator's rule ran, and launched these kernels."""
        self.operators[operator] += 1
        self.kernels.update(kernels)

    def without(self, operator: str, reason: str) -> None:
        """An operator's rule did not cover a call, and the simulated device ran it."""
        self.reasons[operator, reason] += 1

    def clear(self) -> None:
        """Forget all counts."""
        for counts in (self.operators, self.kernels, self.reasons):
            counts.clear()
