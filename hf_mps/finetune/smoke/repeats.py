"""Calls on fake tensors that equal an earlier one, answered without PyTorch's way to their result.

A traced step makes a few hundred different calls many thousand times. PyTorch keeps their results too, but behind every
dispatch mode and with a slower key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hf_mps.finetune.smoke.fake import BY_MASKS, OF_A_SHAPE, OF_A_SIZE, FakeScalars

_aten = torch.ops.aten
# Those whose last argument says at which place of a tensor, and changes nothing else of what they return.
_PLACED = (_aten.select.int, _aten.select_backward.default)
# Those that FakeScalars answers by values or by a size, that count from where memory begins, and (by their tags) that
# change the form of what they are given.
_ANEW = {*OF_A_SHAPE, *OF_A_SIZE, _aten.all.default, _aten._local_scalar_dense.default, _aten.as_strided.default}
_ANEW_TAGS = {torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass
class Known:
    """What calls return: a tensor, a list or tuple of some, or None, each tensor as its `Form`, or as its number among
    those that the call is given.

    `noted` is the caller's to keep what it makes of such a call.
    """

    result: Any
    noted: Any = None


class Form(NamedTuple):
    """A tensor that a call makes: new memory, or a `view` of its only tensor, `offset` behind where that begins."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    view: bool
    state: dict[str, Any]
    """The attributes of the fake tensor but for its mode."""


_KNOWN: dict[tuple[Any, ...], Known | None] = {}
"""What calls return, by operator and arguments, a tensor as its form; None where the next such call is made anew."""


def answered(func: Any, args: Any, kwargs: Any) -> tuple[Any, Known | None]:
    """Return the result of a call within a dispatch mode, and what is known of all its equals.

    That is None where nothing is: outside of a step of fake tensors, of other tensors, of libraries' operators, and
    where the result depends on values.
    """
    scalars, unknown, tensors = FakeScalars.active, _unknown(func), list[FakeTensor]()
    key: list[Any] = [func, torch.get_default_dtype()]
    if scalars is None or unknown is None or not _described((*args, *kwargs, *kwargs.values()), key, tensors):
        return func(*args, **kwargs), None
    if not tensors or not scalars.lacks(tensors, unknown):
        return func(*args, **kwargs), None
    name, shift = tuple(key), _shift(*args) if func in _PLACED else None
    if shift is not None and name not in _KNOWN and (known := _KNOWN.get(name[:-1])) is not None:
        _KNOWN[name] = Known(known.result._replace(offset=known.result.offset + shift))
    if name in _KNOWN:
        known = _KNOWN[name]
        return (func(*args, **kwargs) if known is None else made(known.result, tensors)), known
    result, known = func(*args, **kwargs), None
    with suppress(LookupError):
        known = Known(_forms(result, tensors))
    _KNOWN[name] = known
    if known is not None and shift is not None:
        _KNOWN[name[:-1]] = Known(known.result._replace(offset=known.result.offset - shift))
    return result, known


def _shift(tensor: torch.Tensor, *place: Any) -> int | None:
    """Return how far behind the begin of `tensor` a call of _PLACED finds its place, None where there is none.

    The gradient of such a part is new memory, which begins where it begins.
    """
    if len(place) > 2:
        return 0
    axis, number = place
    size = tensor.shape[axis]
    return number % size * tensor.stride(axis) if -size <= number < size else None


@cache
def _unknown(func: Any) -> Callable[[Iterable[bool]], bool] | None:
    """Whether the values of `all` or `any` of a call's tensors have to be unknown, so that its equals return the same;
    None where they never do.
    """
    if func.namespace != "aten" or func in _ANEW or func._overloadname.endswith("out"):
        return None
    if func in BY_MASKS:
        return all
    return None if _ANEW_TAGS & {*func.tags} else all if func._schema.is_mutable else any


def _described(values: Any, key: list[Any], tensors: list[FakeTensor]) -> bool:
    """Add to `key` what makes a call's arguments equal to others, and to `tensors` their tensors; False: of no use."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor and value.constant is None and value.layout is torch.strided and not value.is_conj():
            key += (value.shape, value.stride(), value.dtype, value.fake_device, value.requires_grad, value.is_neg())
            tensors.append(value)
        elif isinstance(value, torch.Tensor):
            return False
        elif not isinstance(value, (list, tuple)):
            key += (kind, value)  # 1, 1.0 and True are equal
        else:
            key += (kind, len(value))
            if not _described(value, key, tensors):
                return False
    return True


def _forms(result: Any, tensors: list[FakeTensor]) -> Any:
    """Return the result of a call on `tensors` as `Known` has it. Raises LookupError for what cannot be made again."""
    if isinstance(result, (list, tuple)):
        return type(result)(_forms(each, tensors) for each in result)
    for number, each in enumerate(tensors):
        if each is result:
            return number
    if result is None:
        return None
    form = form_of(result)
    if not _described([result], [], []) or result.is_neg() or result.requires_grad:
        raise LookupError
    storage = result.untyped_storage()
    if all(each.untyped_storage() is not storage for each in tensors):
        if form.offset or made(form, tensors).untyped_storage().nbytes() != storage.nbytes():
            raise LookupError
        return form
    # Of which of several it is a view is not known, nor where one as another dtype begins.
    if len(tensors) > 1 or result.dtype != tensors[0].dtype:
        raise LookupError
    return form._replace(view=True, offset=form.offset - int(tensors[0].storage_offset()))


def form_of(tensor: Any) -> Form:
    """Return the form of a fake tensor in new memory."""
    state = {name: value for name, value in vars(tensor).items() if name != "fake_mode"}
    return Form(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device, False, state)


def made(form: Any, tensors: Sequence[Any]) -> Any:
    """Return what a call on the fake `tensors` returns."""
    if type(form) is int:
        return tensors[form]
    if type(form) is not Form:
        return None if form is None else type(form)(made(each, tensors) for each in form)
    # Below all dispatch modes, which would see operators of the step in it.
    with torch._C._DisableTorchDispatch():
        empty = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
        if form.view:
            begin = tensors[0].storage_offset()
            empty.set_(tensors[0].untyped_storage(), begin + form.offset, form.shape, form.stride)
        # As FakeTensor(mode, empty, device) does, which takes ten times as long.
        where: Any = {"dispatch_device": True, "device_for_backend_keys": form.device}
        new: Any = torch.Tensor._make_subclass(FakeTensor, empty, False, **where)
        torch._C._set_warn_deprecated_on_mutable_data_ptr(new)
    vars(new).update(form.state, fake_mode=tensors[0].fake_mode)
    return new
