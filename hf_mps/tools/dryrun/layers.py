"""A deep model is told by a few of its layers: which ones short traces keep, and what a step of all of them is.

Layers of a kind are alike, so what a step holds and calls grows by the same with each: its weights, gradients and
moments, what it keeps for the backward pass, and its operators. A first trace keeps the first layer of each long list,
the last, and one of each kind between, but two of layers that share weights; a further trace has one more of each kind
of which it lacks as many. A model may have several lists (a vision tower and a text tower) and several kinds of layers
in one (`config.layer_types`).
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from hf_mps.core.extras import unheard
from hf_mps.metal.operators.launch_class import Call, Operand

LEAST = 6
"""Layers of a list that is worth the traces."""
FIRST_LAYER, INNER_LAYER, LAST_LAYER, ADDED = "first", "between", "last", "-added"
# Lists of a model's configuration or a tower's attributes that name some of its layers by their numbers, as
# `fullatt_block_indexes` of Qwen2.5-VL does.
_NUMBERS = re.compile(r"index|indices|idx|layers")
_OWN = ("layer_idx", "layer_id")  # a layer's own number
Kept = Mapping[str, Sequence[int]]
Told = TypeVar("Told")


@dataclass(frozen=True)
class Cut:
    """The numbers of the layers that the first trace keeps of each list, by the list's name.

    `more` has, for some kinds, what a further trace keeps, and how many of each the first one lacks. `kinds` is the
    kind of each layer.
    """

    base: Kept
    more: Sequence[tuple[Kept, int]]
    kinds: Mapping[str, Sequence[str]]

    def named(self, kept: Kept, module: str) -> str:
        """Return a module's name in a trace of the layers `kept`, with its layer's kind in place of the number.

        The kind of one that the first trace has not ends in ADDED.
        """
        for name, numbers in kept.items():
            if module.startswith(f"{name}."):
                place, dot, rest = module[len(name) + 1 :].partition(".")
                number = numbers[int(place)]
                added = "" if number in self.base[name] else ADDED
                return f"{name}.{self.kinds[name][number]}{added}{dot}{rest}"
        return module


def cut(*models: Any) -> Cut | None:
    """Return which layers tell all of `models`, the one that trains and those beside it (a teacher).

    None where short traces, with one before, are no less than two whole ones. A list whose name another model has too
    stays whole.
    """
    base: dict[str, list[int]] = {}
    kinds: dict[str, list[str]] = {}
    further: dict[int, dict[str, list[int]]] = {}
    whole, added, seen = 0, 0, set[int]()
    for place, model in enumerate(models):
        for name, module in model.named_modules():
            if not isinstance(module, torch.nn.ModuleList) or any(name.startswith(f"{each}.") for each in base):
                continue
            if id(module) in seen:  # a loss of sentence-transformers' has the model that trains in it
                continue
            seen.add(id(module))
            count, last = len(module), len(module) - 1
            if count < LEAST or any(map(_shortens, module)):
                continue
            if _owner(models[:place], name) is not None:
                continue
            settings = list(_of_layers(_holders(model, name), count))
            told = [tuple(str(value(number)) for *_, value in settings) for number in range(count)]
            signatures = list(zip(map(_signature, module), map(_shared(module), module), told, strict=True))
            between: dict[Any, list[int]] = {}
            for number, signature in enumerate(signatures[1:last], 1):
                between.setdefault(signature, []).append(number)
            # Of layers that share weights two: with the second one gradients are added up.
            ends = (of_kind[-2 if shared else -1 :] for (_, shared, _), of_kind in between.items())
            inner = sorted(number for end in ends for number in end)
            if len(inner) + 3 >= count:
                continue
            base[name] = [0, *inner, last]
            words = {each: INNER_LAYER + (f"-{kind}" if kind else "") for kind, each in enumerate(between)}
            kinds[name] = [FIRST_LAYER, *(words[each] for each in signatures[1:last]), LAST_LAYER]
            for (_, shared, _), of_kind in between.items():
                if shared:  # the moments of two layers are two
                    kinds[name][of_kind[-1]] += "-again"
                if lacks := sum(number not in inner for number in of_kind):
                    more = further.setdefault(lacks, {})
                    more[name] = sorted([of_kind[0], *more.get(name, base[name])])
                    added += 1
            whole += count
    kept = sum(map(len, base.values()))
    # The further traces and the one before are to be less work than two of the whole model.
    if not base or (2 + len(further)) * kept + added >= 2 * whole:
        return None
    return Cut(base, [({**base, **each}, lacking) for lacking, each in further.items()], kinds)


def told(work: Callable[[Cut | None], Told], shorter: Cut | None) -> Told:
    """Return what `work` finds by the layers of a cut, or by all where the model cannot do without those left out.

    XLM goes through its lists by `n_layers`, layers of Gemma 3n share what others have made, and DPT's neck takes what
    four layers return.
    """
    if shorter is not None:
        # What is no fault of the cut comes again. torch logs a traceback before it raises.
        with suppress(Exception), unheard("torch._subclasses.fake_tensor", logging.CRITICAL):
            return work(shorter)
    return work(None)


@contextmanager
def few(kept: Kept, *models: Any) -> Iterator[None]:
    """Leave `models` the layers `kept` of their lists while the context lasts, under new numbers."""
    with ExitStack() as stack:
        for name, numbers in kept.items():
            model = _owner(models, name)
            holders = _holders(model, name)
            parent, whole = holders[0], model.get_submodule(name)
            for values, key, each, value in _of_layers(holders, len(whole)):
                found = [value(number) for number in numbers]
                if isinstance(found[0], _Place):
                    found = [place for place, one in enumerate(found) if one.named]
                else:  # a cache of keys and values is as long, and asked for layers by their former numbers
                    found += each[len(found) :]
                stack.enter_context(patch.dict(values, {key: type(each)(found)}))
            own = name.rpartition(".")[2]
            layers = torch.nn.ModuleList(whole[number] for number in numbers)
            stack.enter_context(patch.dict(parent._modules, {own: layers}))
            given: dict[Any, Any] = {}
            for layer in layers:
                first = layer is layers[0]
                hook = layer.register_forward_pre_hook(partial(_given, given, first), with_kwargs=True)
                stack.callback(hook.remove)
        # A step makes its own weights of those it sees: layers left out would share the former ones no more.
        for module in (module for model in models if kept for module in model.modules()):
            stack.enter_context(patch.dict(module._parameters))
            stack.enter_context(patch.dict(module._buffers))
        yield


@dataclass(frozen=True)
class _Place:
    """Whether a list of numbers names a layer."""

    named: bool


def _owner(models: Sequence[Any], name: str) -> Any:
    """Return the first model that has a module of this name, or None."""
    return next((model for model in models if any(name == each for each, _ in model.named_modules())), None)


def _holders(model: Any, name: str) -> list[Any]:
    """Return what may say something of each layer of the list `name`: the module that has it, its configuration."""
    parent = model.get_submodule(name.rpartition(".")[0])
    return [each for each in (parent, getattr(parent, "config", None)) if each is not None]


def _of_layers(holders: Sequence[Any], count: int) -> Iterator[tuple[dict[str, Any], str, Any, Callable[[int], Any]]]:
    """The lists that say something of each of `count` layers: where each is, its name, itself, and what of a layer."""
    for holder in holders:
        for key, each in list(vars(holder).items()):
            if type(each) not in (list, tuple) or not each:
                continue
            numbers = all(isinstance(one, int) and 0 <= one < count for one in each)
            if len(each) == count:
                yield vars(holder), key, each, each.__getitem__
            elif numbers and _NUMBERS.search(key) and len(set(each)) == len(each):
                yield vars(holder), key, each, lambda number, each=each: _Place(number in each)  # type: ignore[misc]


def _shortens(layer: Any) -> bool:
    """Return whether a layer makes fewer places of what it is given, so that the layers after it have less to do."""
    strides = (getattr(each, "stride", 1) for each in layer.modules())
    return any(one != 1 for each in strides for one in (each if isinstance(each, tuple) else (each,)))


def _given(before: dict[Any, Any], first: bool, layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise RuntimeError where a layer gets other shapes than the one `before` it.

    Inkling 2 gives each layer what all blocks before it made, so that a layer does more, the more there are.
    """
    if first:
        before.clear()
        return
    for key, one in (*enumerate(args), *kwargs.items()):
        # Layers of another kind get another kind of mask.
        if isinstance(one, torch.Tensor) and before.setdefault((key, one.ndim), one.shape) != one.shape:
            raise RuntimeError(f"layers get tensors of {tuple(before[key, one.ndim])} and {tuple(one.shape)}")


def _shared(layers: Iterable[Any]) -> Callable[[Any], tuple[int, ...]]:
    """Return a function that names a layer's weights which others of its list have too, as Zamba's hybrid layers do."""
    uses = Counter(id(one) for layer in layers for one in layer.parameters())
    return lambda layer: tuple(id(one) for one in layer.parameters() if uses[id(one)] > 1)


def _signature(layer: Any) -> tuple[Any, ...]:
    """Return what a layer is made of and how it is set, without its number."""
    made: list[Any] = []
    for name, module in layer.named_modules():
        kinds = (bool, int, float, str, type(None))
        plain = {key: value for key, value in vars(module).items() if isinstance(value, kinds) and key not in _OWN}
        made.append((name, type(module), tuple(sorted(plain.items()))))
    for name, one in (*layer.named_parameters(), *layer.named_buffers()):
        made.append((name, one.shape, one.dtype, one.stride(), one.requires_grad))
    return tuple(made)


def of_all(base: Mapping[Any, int], more: Sequence[tuple[Mapping[Any, int], int]]) -> Counter[Any]:
    """Return the counts of the whole model, from those of the first trace and of each further one with its lack."""
    found: Counter[Any] = Counter(base)
    for each, lacking in more:
        for key in each.keys() | base.keys():
            found[key] += lacking * (each.get(key, 0) - base.get(key, 0))
    return Counter({key: count for key, count in found.items() if count})


def calls_of_all(base: Sequence[Call], more: Sequence[tuple[Sequence[Call], int]]) -> Counter[Call]:
    """Return how often the whole model makes each call.

    A call over the tensors of all layers (an optimizer's, the norm of all gradients) is another one in each trace; it
    is told by its operator and its place among those, and gets the tensors of all layers.
    """
    counts = [_tally(base), *(_tally(each) for each, _ in more)]
    found = of_all(counts[0], [(each, lacking) for each, (_, lacking) in zip(counts[1:], more, strict=True)])
    changed = [[call for call in counts[0] if not all(call in each for each in counts[1:])]]
    changed += [[call for call in each if call not in counts[0]] for each in counts[1:]]
    for operator in {call.operator for call in changed[0]}:
        those = [[call for call in each if call.operator == operator] for each in changed]
        those = [each or those[0] for each in those]  # one more of a teacher's layers changes no optimizer's call
        if len({len(each) for each in those}) > 1:
            continue
        for first, *others in zip(*those, strict=True):
            for call in (first, *others):
                found.pop(call, None)
            pairs = [(other, lacking) for other, (_, lacking) in zip(others, more, strict=True)]
            found[_of_all_layers(first, pairs)] += counts[0][first]
    return found


def _tally(calls: Sequence[Call]) -> Counter[Call]:
    """Return how often each call is made, in the order of the first ones."""
    found: Counter[Call] = Counter()
    each = {id(call): call for call in calls}
    for number, count in Counter(map(id, calls)).items():  # a scan has millions of a few objects, slow to hash
        found[each[number]] += count
    return found


def _of_all_layers(base: Call, others: Sequence[tuple[Call, int]]) -> Call:
    """Return the call with the tensors of all layers, from those of the first trace and of the further ones."""
    split = [(_split(other), lacking) for other, lacking in others]
    lists = [
        _all_layers(part, [(parts[place], lacking) for parts, lacking in split])
        for place, part in enumerate(_split(base))
    ]
    inputs = tuple(operand for each in lists for operand in each)
    results = _all_layers(base.results, [(other.results, lacking) for other, lacking in others])
    return replace(base, inputs=inputs, results=results, lists=tuple(map(len, lists[: len(base.lists)])))


def _split(call: Call) -> list[Sequence[Operand]]:
    """Return the operands of each list, and the others, which come behind."""
    found: list[Sequence[Operand]] = []
    start = 0
    for length in (*call.lists, len(call.inputs) - sum(call.lists)):
        found.append(call.inputs[start : start + length])
        start += length
    return found


def _all_layers(base: Sequence[Operand], others: Sequence[tuple[Sequence[Operand], int]]) -> tuple[Operand, ...]:
    """Return operands with those that a further trace has between the others, as often as the first one lacks them.

    Where none has more of them, their shapes grow.
    """
    if all(len(each) == len(base) for each, _ in others):
        grown = []
        for place, one in enumerate(base):
            shape = list(one.shape)
            for each, lacking in others:
                for axis, size in enumerate(one.shape):
                    shape[axis] += lacking * (each[place].shape[axis] - size)
            grown.append(replace(one, shape=tuple(shape)))
        return tuple(grown)
    inserted: list[list[Operand]] = [[] for _ in range(len(base) + 1)]  # before each place, and at the end
    for each, lacking in others:
        place, block = 0, list[Operand]()
        for operand in (*each, None):
            if operand is not None and (place == len(base) or operand != base[place]):
                block.append(operand)
                continue
            inserted[place] += block * lacking
            place, block = place + 1, []
    return tuple(each for place, block in enumerate(inserted) for each in (*block, *base[place : place + 1]))
