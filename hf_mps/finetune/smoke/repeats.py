"""Calls on fake tensors that equal an earlier one, answered without PyTorch's way to their result.

A traced step makes a few hundred different calls many thousand times. PyTorch keeps their results too, but behind every
dispatch mode and with a slower key.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hf_mps.finetune.smoke.fake import BY_MASKS, OF_A_SHAPE, OF_A_SIZE, FakeScalars

_aten = torch.ops.aten
# Those that FakeScalars answers by values or by a size, that count from where memory begins, and (by their tags) that
# change the form of what they are given.
_ANEW = {*OF_A_SHAPE, *OF_A_SIZE, _aten.all.default, _aten._local_scalar_dense.default, _aten.as_strided.default}
_ANEW_TAGS = {torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(slots=True)
class Known:
    """What a call returns: a tensor, a list or tuple of some, or None, each tensor as its `_Form` or `_Given`.

    `noted` is the caller's to keep what it makes of such a call.
    """

    result: Any
    noted: Any = None


@dataclass(frozen=True, slots=True)
class _Given:
    """The tensor with this number among a call's arguments."""

    number: int


@dataclass(frozen=True, slots=True)
class _Form:
    """A tensor that the call makes: new memory, or a `view` of its only tensor, `offset` behind where that begins."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    view: bool

    def made(self, tensors: list[FakeTensor]) -> Any:
        """Return such a tensor; `tensors` are the call's."""
        device = self.device
        # Below all dispatch modes, which would see operators of the step in it.
        with torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            if self.view:
                whole = tensors[0]
                empty.set_(whole.untyped_storage(), whole.storage_offset() + self.offset, self.shape, self.stride)
            # As FakeTensor(mode, empty, device) does, which takes ten times as long.
            new = torch.Tensor._make_subclass(
                FakeTensor, empty, False, dispatch_device=True, device_for_backend_keys=device
            )
            torch._C._set_warn_deprecated_on_mutable_data_ptr(new)
        vars(new).update(_attributes(device), fake_mode=tensors[0].fake_mode)
        return new


@cache
def _attributes(device: torch.device) -> dict[str, Any]:
    """Return the attributes of a fake tensor on `device`, but for its mode."""
    mode = FakeTensorMode()
    with torch._C._DisableTorchDispatch():
        empty = torch.empty((), device="meta")
    return {name: value for name, value in vars(FakeTensor(mode, empty, device)).items() if value is not mode}


_KNOWN: dict[tuple[Any, ...], Known | None] = {}
"""What calls return, by operator and arguments, a tensor as its form; None where the next such call is made anew."""


def answered(func: Any, args: Any, kwargs: Any) -> tuple[Any, Known | None]:
    """Return the result of a call within a dispatch mode, and what is known of all its equals.

    That is None where nothing is: outside of a step of fake tensors, of other tensors and libraries' operators, and where
    the result depends on values.
    """
    scalars = FakeScalars.active
    if scalars is None or not _repeats(func):
        return func(*args, **kwargs), None
    tensors: list[FakeTensor] = []
    key: list[Any] = [func, torch.get_default_dtype()]
    if not _described((*args, *kwargs, *kwargs.values()), key, tensors) or not _unknown(scalars, func, tensors):
        return func(*args, **kwargs), None
    name = tuple(key)
    if name in _KNOWN:
        known = _KNOWN[name]
        return (func(*args, **kwargs) if known is None else _made(known.result, tensors)), known
    result = func(*args, **kwargs)
    after = key[:2]
    same = _described((*args, *kwargs, *kwargs.values()), after, []) and after == key
    try:
        known = _KNOWN[name] = Known(_form(result, tensors)) if same else None
    except LookupError:
        known = _KNOWN[name] = None
    return result, known


@cache
def _repeats(func: Any) -> bool:
    return func.namespace == "aten" and func not in _ANEW and (func in BY_MASKS or _ANEW_TAGS.isdisjoint(func.tags))


@cache
def _by_values(func: Any) -> bool:
    """Whether a call is another one where the values of one of its tensors are known."""
    return func in BY_MASKS or func._schema.is_mutable


def _unknown(scalars: FakeScalars, func: Any, tensors: list[FakeTensor]) -> bool:
    """Whether the values of a call's tensors are unknown, so that FakeScalars has nothing to say."""
    known = [scalars.follows(each) for each in tensors]
    return not all(known) and not (any(known) and _by_values(func))


def _described(values: Any, key: list[Any], tensors: list[FakeTensor]) -> bool:
    """Add to `key` what makes a call's arguments equal to others, and to `tensors` their tensors; False: of no use."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided or value.is_conj():
                return False
            key += (value.shape, value.stride(), value.dtype, value.fake_device, value.requires_grad, value.is_neg())
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            key += (kind, len(value))
            if not _described(value, key, tensors):
                return False
        elif isinstance(value, torch.Tensor):
            return False
        else:
            key += (kind, value)  # 1, 1.0 and True are equal
    return True


def _form(result: Any, tensors: list[FakeTensor]) -> Any:
    """Return the result of a call on `tensors` as `Known` has it. Raises LookupError for what cannot be made again."""
    if result is None:
        return None
    if isinstance(result, (list, tuple)):
        forms = [_form(each, tensors) for each in result]
        new = [each for each, form in zip(result, forms, strict=True) if type(form) is _Form and not form.view]
        if len({id(each.untyped_storage()) for each in new}) < len(new):
            raise LookupError
        return type(result)(forms)
    given = next((number for number, each in enumerate(tensors) if each is result), None)
    if given is not None:
        return _Given(given)
    if type(result) is not FakeTensor or not _described([result], [], []) or result.is_neg() or result.requires_grad:
        raise LookupError
    storage = result.untyped_storage()
    shared = any(each.untyped_storage() is storage for each in tensors)
    offset = result.storage_offset() - (tensors[0].storage_offset() if shared else 0)
    form = _Form(result.shape, result.stride(), offset, result.dtype, result.fake_device, shared)
    if shared:
        # Of which it is a view would not be known, nor where a view as another dtype begins.
        if len(tensors) > 1 or result.dtype != tensors[0].dtype:
            raise LookupError
    elif offset or form.made(tensors).untyped_storage().nbytes() != storage.nbytes():
        raise LookupError
    return form


def _made(form: Any, tensors: list[FakeTensor]) -> Any:
    """Return what a call on `tensors` returns."""
    if type(form) is _Form:
        return form.made(tensors)
    if type(form) is _Given:
        return tensors[form.number]
    return None if form is None else type(form)(_made(each, tensors) for each in form)
