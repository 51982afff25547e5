"""Launch rules: what an aten operator launches on Metal, and how that takes the place of the simulated kernel.

A rule is a function of the operator's arguments, in a file of `launch/`, under `@rule`. Without `outputs`
it serves the overloads that it names and returns their results. With `outputs`, which makes or checks what is written
to, it fills that, and serves the functional overload that it names, its `out=` overload and its in-place one, as
PyTorch's structured operators share one kernel. Operators that differ in a word share a function: each decorator gives
it the word as a keyword (`kernel="tril"`). A rule that does not cover a call raises NoRule with the reason: the
operator then runs as it does without kernels, and is counted.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from hf_mps.core.notices import overriding
from hf_mps.metal.kernels.coverage import Counts
from hf_mps.metal.kernels.runtime import Kernel, recording
from hf_mps.metal.kernels.values import NoRule
from hf_mps.metal.operators.calls import OutputSpec, OutputSpecs, call_of, inputs_of, on_device, text_of
from hf_mps.metal.operators.dispatcher import registered_kernel

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from hf_mps.metal.kernels.release import Release

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)
MPS = torch._C.DispatchKeySet(torch._C.DispatchKey.MPS)
GRAPH = "MPSGraph on this release"
"""Why a call has no rule: the release has no kernel for it, and computes it with MPSGraph."""


@dataclass(frozen=True)
class Rule:
    """What launches one operator: the function, and how outputs come."""

    operator: str
    """The overload that the rule names, as "gelu" or "add.Tensor"."""
    function: Function
    outputs: Function | None = None
    """Returns what is written: `outputs(given, *arguments)`, where `given` is the tensor to write to, or None for a new
    one. Without it the rule returns its results."""


RULES: dict[str, Rule] = {}


class Kernels:
    """The kernels of the release that this process computes with, by name."""

    # A process computes with one release (`enable` refuses a second), so that no rule need hand it on.
    release: Release | None = None

    def __getitem__(self, name: str) -> Kernel:
        """Return a kernel, compiled if this CPU has not had it yet. Raises NoRule where the release has none."""
        assert self.release is not None, "rules run behind Dispatch.install"
        return self.release.kernel(name)

    def __contains__(self, name: object) -> bool:
        return self.release is not None and name in self.release

    def need(self, name: str) -> None:
        """Raise NoRule where the release has no such kernel: it computes the operator with MPSGraph."""
        refuse(name not in self, GRAPH)


kernels = Kernels()


def refuse(condition: object, reason: str = "PyTorch refuses the arguments") -> None:
    """Raise NoRule, with the reason, where a rule does not cover a call."""
    if condition:
        raise NoRule(reason)


def rule(*operators: str, outputs: Function | None = None, **fixed: Any) -> Callable[[F], F]:
    """Declare `function(*arguments, **fixed)` as what launches these overloads; it returns their results.

    With `outputs` it is `function(outputs, *arguments, **fixed)`, and fills a tensor or tuple of them for the
    functional overload that is named, and for those that have the same arguments and `out=`, or write `self`.
    """

    def declare(function: F) -> F:
        for operator in operators:
            if operator in RULES:
                raise ValueError(f"two rules for {operator}")
            RULES[operator] = Rule(operator, partial(function, **fixed) if fixed else function, outputs)
        return function

    return declare


def by_meta(given: Any, *arguments: Any, **options: Any) -> Any:
    """As `outputs` of a rule: PyTorch's Meta kernel says shape, dtype and strides. Never called itself."""
    raise NotImplementedError


class Dispatch:
    """The rules of a release in front of the simulated device's kernels.

    `device` is the simulated one: `begin_launch(tensors)` brings in what is queued, `launched(name, text)` counts.
    `ledger` has all other counts.
    """

    def __init__(self, release: Release, device: Any) -> None:
        self.release, self.ledger, self.device = release, Counts(), device
        self._library: Any = None

    def install(self) -> None:
        """Register every rule's overloads for the device, below autograd.

        The kernel of before is the device's own, or one below autograd for every device, as that of `copy_` is.
        """
        kernels.release = self.release
        self._library = torch._C._dispatch_library("IMPL", "aten", "MPS", __file__)
        with overriding():
            for each in RULES.values():
                for overload, form in overloads(each):
                    # Of a rule with outputs a composite form calls the one with a kernel, and so comes here by itself.
                    keys = ("MPS", "CompositeExplicitAutograd") if each.outputs is None else ("MPS",)
                    if any(torch._C._dispatch_has_kernel_for_dispatch_key(overload._name, key) for key in keys):
                        self._library.impl(
                            overload._name.removeprefix("aten::"), "MPS", self._kernel(each, overload, form)
                        )

    def remove(self) -> None:
        """Give every operator its kernel of before back."""
        self._library.reset()

    def _kernel(self, rule: Rule, overload: OpOverload, form: Form) -> Function:
        name = overload._name
        stock = registered_kernel(name)
        short, ledger, device = name.removeprefix("aten::"), self.ledger, self.device
        # A number in a tensor's place comes as Python's, and a boxed kernel takes tensors.
        places = {at for at, each in enumerate(overload._schema.arguments) if str(each.type) == "Tensor"}

        def kernel(*arguments: Any, **options: Any) -> Any:
            device.begin_launch(on_device(arguments, options))
            with recording() as launched:
                try:
                    result = form(rule, arguments, options)
                except NoRule as reason:
                    ledger.reasons[short, str(reason)] += 1
                else:
                    given = (arguments, options)
                    device.launched(name, text_of(call_of(name, given, ())) if device.recording() else "")
                    ledger.operators[short] += 1
                    ledger.kernels.update(launched)
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
            self.install()
            return overload.redispatch(MPS, *boxed, **options)

        return kernel


Form = Callable[["Rule", tuple[Any, ...], dict[str, Any]], Any]


def overloads(rule: Rule) -> list[tuple[OpOverload, Form]]:
    """Return the overloads that a rule serves, each with the way its outputs come to it; none where torch has none."""
    packet, _, name = rule.operator.partition(".")
    family = getattr(torch.ops.aten, packet, None)
    if family is None or (name or "default") not in family.overloads():
        return []
    first = getattr(family, name or "default")
    if rule.outputs is None:
        return [(first, lambda rule, arguments, options: rule.function(*arguments, **options))]
    found: list[tuple[OpOverload, Form]] = [(first, partial(_fill, first, ()))]
    given = inputs_of(first)
    for other in family.overloads():
        overload = getattr(family, other)
        names = tuple(each.name for each in overload._schema.arguments if each.is_out)
        if names and inputs_of(overload) == given:
            found.append((overload, partial(_fill, first, names)))
    in_place = getattr(torch.ops.aten, f"{packet}_", None)
    for other in in_place.overloads() if in_place is not None else ():
        overload = getattr(in_place, other)
        if inputs_of(overload) == given:
            found.append((overload, partial(_fill, first, None)))
    return found


def _fill(
    first: OpOverload, names: tuple[str, ...] | None, rule: Rule, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Run a rule into new outputs, into those that `names` name among the options, or for None into the first input."""
    written = [arguments[0]] if names is None else [options[name] for name in names]
    options = {name: value for name, value in options.items() if name not in (names or ())}
    if rule.outputs is not None and rule.outputs is not by_meta:
        outputs = rule.outputs(written[0] if written else None, *arguments, **options)
    elif written:
        inputs = on_device(arguments if names else arguments[1:])
        for spec, target in zip(_specs(first, arguments, options), written, strict=False):
            refuse_unfit(target, spec.shape if target.numel() else target.shape, spec.dtype, inputs)
            target.resize_(spec.shape)  # an empty one alone has another shape here
    else:
        outputs = made(first, arguments, options)
    # Threads would write an element that is there twice in no order.
    for target in written:
        refuse_repeated(target)
    if written:
        outputs = written[0] if len(written) == 1 else tuple(written)
    rule.function(outputs, *arguments, **options)
    return outputs


def made(first: OpOverload, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return new outputs of an operator, as PyTorch's Meta kernel lays them out. Raises NoRule as `_specs`."""
    found = tuple(each.empty() for each in _specs(first, arguments, options))
    return found if len(first._schema.returns) > 1 else found[0]


def _specs(first: OpOverload, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[OutputSpec, ...]:
    """Raises NoRule where PyTorch refuses the arguments, so that the device's kernel words the error."""
    found = _of_meta(first).infer(arguments, options)
    if found is None:
        raise NoRule("PyTorch refuses the arguments")
    return found


# Most Meta kernels are Python, and the first one imports SymPy (0.7 s), as a training's first optimizer does.
_of_meta = cache(OutputSpecs)


MISFIT = "the result has another shape or dtype than what it is written to"


def refuse_unfit(
    target: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None, inputs: Sequence[Tensor] = ()
) -> None:
    """Raise NoRule where what is written has another shape or dtype (None: any) than a result, or an input's memory."""
    refuse(tuple(target.shape) != tuple(shape) or (dtype is not None and target.dtype != dtype), MISFIT)
    place = target.untyped_storage().data_ptr()
    shared = target.numel() and any(each.untyped_storage().data_ptr() == place for each in inputs)
    refuse(shared, "an input shares memory with the output")


def refuse_repeated(target: Tensor) -> None:
    """Raise NoRule where a tensor that is written holds an element more than once."""
    if any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)):
        raise NoRule("what is written to holds elements more than once")


OUTSIDE = "an index out of bounds: the simulated device raises what a Mac raises"

SIZE = 15364
"""Bytes of ErrorMessages: a count, and room for 30 messages."""


class Errors(threading.local):
    """The buffer of this OS thread, as a kernel's argument: `tensor`; `any()` says whether something was reported."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(SIZE, dtype=torch.uint8, device="cpu")
        self._count = self.tensor[:4].view(torch.int32).numpy()

    def any(self) -> bool:
        """A kernel reported an error since the last question."""
        reported = bool(self._count[0])
        self._count[0] = 0
        return reported


errors = Errors()


def refuse_outside(index: torch.Tensor, size: int) -> None:
    """Raise NoRule where an index is out of bounds, of which a kernel says nothing: it would write beside the tensor.

    A kernel on a Mac does just that. The device's memory is the host's here, and is read in place.
    """
    flat = index.contiguous()
    count = flat.numel()
    if not count:
        return
    kind = ctypes.c_int64 if flat.dtype == torch.int64 else ctypes.c_int32
    there = torch.frombuffer((kind * count).from_address(flat.data_ptr()), dtype=flat.dtype)
    refuse(there.min() < -size or there.max() >= size, OUTSIDE)
