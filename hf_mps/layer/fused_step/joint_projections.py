"""Linear layers that a module gives the same input, as queries, keys and values are made, computed as one."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hf_mps.core.patching import OriginalCall
from hf_mps.layer.fused_step import spans
from hf_mps.layer.fused_step.autograd_kernels import runs
from hf_mps.layer.fused_step.model_code import MODELS, ModelCode

Groups = Mapping[str, tuple[str, ...]]
"""A parameter of a module's `forward` -> the attributes that are called with it and nothing else."""


class JointProjections(ModelCode):
    """Which layers belong together is read in the source of transformers' modules: `self.query(hidden_states)`.

    The weights and biases of such layers move into one piece of memory, in which each stays the parameter that it was;
    so do layers that PEFT has put something around, and LoRA without dropout is computed with them. Whatever is not as
    it should be, a hook that took a layer's place or weights that lie elsewhere too, leaves the layers alone. Results
    differ by the rounding of a wider product.
    """

    name = "joint-projections"
    what = "queries, keys and values in one product, their weights side by side in memory"
    why = "the price of a small launch is the host's, and three products forward and three backward become two"
    on_cuda = "their input is cast once, and one wide product is faster than three"

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[str, Mapping[str, Groups]] = {}

    def pays(self, device_type: str) -> str:
        """On Metal where one operator has all gradients of a linear layer; on CUDA, measured (docs/benchmarks.md)."""
        return self.on_cuda if device_type == "cuda" else super().pays(device_type)

    def words(self, model: Any, device_type: str) -> str:
        """Nothing for a model without such layers."""
        layers = (_layers([getattr(each, name, None) for name in names]) for each, names in self._owners(model))
        return self.what if any(layers) else ""

    def _owners(self, model: Any) -> Iterator[tuple[Any, tuple[str, ...]]]:
        for each in model.modules():
            kind = type(each)
            if kind.__module__.startswith(MODELS):
                for names in self._groups(inspect.getmodule(kind)).get(kind.__name__, {}).values():
                    yield each, names

    def _look_through(self, module: ModuleType) -> None:
        if getattr(module.__spec__, "_initializing", False):
            # It imports what this part is armed after, and its classes are still to come.
            return
        for name, groups in self._groups(module).items():
            self.around(vars(module)[name], "forward", functools.partial(self._owned, groups))

    def _groups(self, module: Any) -> Mapping[str, Groups]:
        """Return the classes of a module of transformers' that have such layers."""
        name = getattr(module, "__name__", "")
        if name not in self._told:
            self._told[name] = dict(_of_file(module)) if name else {}
        return self._told[name]

    def _owned(self, groups: Groups, stock: OriginalCall, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the owner's `forward` with what its layers will be asked for ready."""
        ready: list[Any] = []
        if torch.is_grad_enabled() and "forward" not in vars(module):
            first = next(iter(groups))  # the only positional argument that is looked at is the first
            for name, names in groups.items():
                given = kwargs.get(name, args[0] if args and name == first else None)
                ready += self._computed(stock, given, [getattr(module, each, None) for each in names])
        try:
            return stock(module, *args, **kwargs)
        finally:
            for layer in ready:
                # One that was not called, as in a model that takes another way this time.
                vars(layer).pop("forward", None)

    def _computed(self, stock: OriginalCall, given: Any, asked: list[Any]) -> list[Any]:
        """Return those layers that have their results, or PEFT's around them."""
        layers = _layers(asked)
        if not (layers and runs(given) and self._fits(given, layers)):
            return []
        weights, biases = [each.weight for each in layers], [each.bias for each in layers if each.bias is not None]
        if any(kind and spans.brought_together(kind) is None for kind in (weights, biases)):
            return []
        device = given.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else given.dtype
        self.acts()
        adapters = _adapters(asked, [*weights, *biases], given)
        downs, ups, scales = zip(*adapters.values(), strict=True) if adapters else ((), (), ())
        plan = Plan(dtype, len(layers), tuple(adapters), scales)
        outs = stock.foreign(JointLinear.apply, given, plan, *weights, *biases, *downs, *ups)
        layers = [asked[place] if place in adapters else layer for place, layer in enumerate(layers)]
        for layer, out in zip(layers, outs, strict=True):
            layer.forward = functools.partial(_handed, layer, given, out)
        return layers

    def _fits(self, given: Tensor, layers: list[Any]) -> bool:
        """Return whether stock would compute the same with each layer, on a device that is ours."""
        kinds = {(each.weight.dtype, each.weight.device, each.weight.shape[1]) for each in layers}
        dtype = layers[0].weight.dtype
        alike = given.device.type in self.devices and kinds == {(dtype, given.device, given.shape[-1])}
        biases = {None if each.bias is None else each.bias.dtype for each in layers}
        cast = torch.is_autocast_enabled(given.device.type) or given.dtype == dtype
        return alike and biases in ({None}, {dtype}) and cast and given.is_floating_point() and given.numel() > 0


def _handed(layer: Any, given: Tensor, out: Tensor, asked: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a layer returns whose result is ready: that, where it is asked for the same."""
    vars(layer).pop("forward", None)
    return out if asked is given and not args and not kwargs else layer.forward(asked, *args, **kwargs)


def _layers(asked: list[Any]) -> list[Any]:
    """Return the linear layers among a module's, or none: PEFT's have the model's own layer inside."""
    peft = (type(each).__module__.startswith("peft.") for each in asked)
    found = [getattr(each, "base_layer", each) if its else each for each, its in zip(asked, peft, strict=True)]
    plain = all(type(each) is nn.Linear and "forward" not in vars(each) for each in found)
    ordinary = plain and all(type(each) is nn.Parameter for layer in found for each in layer.parameters())
    return found if ordinary and len(set(map(id, found))) == len(found) else []


def _adapters(asked: list[Any], frozen: list[Tensor], given: Tensor) -> dict[int, tuple[Tensor, Tensor, float]]:
    """Return which of the layers have adapters that can be computed with them, by their places."""
    if any(each.requires_grad for each in frozen):
        return {}
    simple = {place: _simple(each) for place, each in enumerate(asked)}
    found = {place: each for place, each in simple.items() if each is not None}
    kinds = {(each.dtype, each.device) for down, up, _ in found.values() for each in (down, up)}
    downs = [down for down, _, _ in found.values()]
    if kinds != {(given.dtype, given.device)} or spans.brought_together(downs) is None:
        return {}
    return found


def _of_file(module: ModuleType) -> Iterator[tuple[str, Groups]]:
    """Yield the classes of a module whose `forward` calls several of its layers with one argument."""
    tree = ast.parse(Path(inspect.getsourcefile(module) or "").read_text(encoding="utf-8"))
    for node in (each for each in tree.body if isinstance(each, ast.ClassDef)):
        kind = getattr(module, node.name, None)
        for function in node.body if isinstance(kind, type) else ():
            if isinstance(function, ast.FunctionDef) and function.name == "forward":
                groups = _of_function(function)
                if groups and _is_running(kind, function):
                    yield node.name, groups


def _is_running(kind: Any, function: ast.FunctionDef) -> bool:
    """Return whether the class has that function, and no other was put in its place."""
    code = getattr(inspect.unwrap(vars(kind).get("forward", _of_file)), "__code__", None)
    first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
    return code is not None and code.co_name == "forward" and code.co_firstlineno == first


def _of_function(function: ast.FunctionDef) -> dict[str, tuple[str, ...]]:
    arguments = [each.arg for each in function.args.args[1:2]]
    given = {each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    called: dict[str, list[str]] = {}
    for call in _always(function.body):
        match call:  # self.query(hidden_states)
            case ast.Call(ast.Attribute(ast.Name("self"), name), [ast.Name(tensor)], []):
                called.setdefault(tensor, []).append(name)
    return {
        name: tuple(layers)
        for name, layers in called.items()
        if name in arguments and name not in given and len(set(layers)) == len(layers) > 1
    }


def _always(nodes: list[Any]) -> Iterator[ast.Call]:
    """Yield the calls that no condition, loop or handler of errors encloses."""
    sometimes = ast.If | ast.For | ast.While | ast.Try | ast.IfExp | ast.BoolOp | ast.Lambda | ast.comprehension
    for node in nodes:
        if not isinstance(node, sometimes | ast.FunctionDef):
            if isinstance(node, ast.Call):
                yield node
            yield from _always(list(ast.iter_child_nodes(node)))


@dataclass(frozen=True)
class Plan:
    """Of layers computed together: the dtype to compute in, how many they are, which have LoRA, and its scales."""

    dtype: torch.dtype
    count: int
    adapted: tuple[int, ...] = ()
    scales: tuple[float, ...] = ()

    def split(self, learned: Sequence[Tensor]) -> tuple[Sequence[Tensor], ...]:
        """Weights, biases or none, A and B of each adapter."""
        adapters = len(learned) - 2 * len(self.adapted)
        middle = adapters + len(self.adapted)
        return learned[: self.count], learned[self.count : adapters], learned[adapters:middle], learned[middle:]

    def adapters(self, ups: Sequence[Tensor], few: Tensor | None, downs: Sequence[Tensor]) -> Iterable[Any]:
        """For each adapter its layer's place, its factor, its B, and what its A made (a part of `few`)."""
        parts = () if few is None else torch.split(few, [len(each) for each in downs], -1)
        return zip(self.adapted, self.scales, ups, parts, strict=True)


class JointLinear(torch.autograd.Function):
    """What several linear layers, LoRA included, make of (…, width): one product forward, one for all gradients back.

    The rows of the weights lie side by side, and so do the results. Gradients that arrive side by side, as short
    attention leaves them, are used as they lie; others are brought together first. PEFT computes each layer, then A and
    B one after the other, a factor and a sum (peft/tuners/lora/layer.py).
    """

    @staticmethod
    def forward(ctx: Any, given: Tensor, plan: Plan, *learned: Tensor) -> Any:
        """`learned` is what `Plan.split` takes apart."""
        weights, biases, downs, ups = plan.split(learned)
        with torch.autocast(given.device.type, enabled=False):
            rows, weight = given.to(plan.dtype), as_one(weights).to(plan.dtype)
            bias = as_one(biases).to(plan.dtype) if biases else None
            parts = spans.pieces(linear(rows, weight, bias), [len(each) for each in weights], -1)
            down = as_one(downs).to(plan.dtype) if downs else None
            few = None if down is None else linear(rows, down)
            for place, scale, up, each in plan.adapters(ups, few, downs):
                # Views, as the rows of what is side by side follow one another at one distance.
                part, made = (matrix.view(-1, matrix.shape[-1]) for matrix in (parts[place], each))
                # Not addmm_: before macOS 26 a product between other columns is mis-written (guard sliced-products).
                part.add_(made.mm(up.to(plan.dtype).t()), alpha=scale)
        ctx.save_for_backward(given, rows, weight, down, few, *learned)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        """Return its gradients; where they have to have gradients themselves, by operators that have."""
        given, rows, weight, down, few, *learned = ctx.saved_tensors
        plan: Plan = ctx.plan
        weights, biases, downs, ups = plan.split(learned)
        needs, frozen = ctx.needs_input_grad, 2 + len(weights)
        with torch.autocast(given.device.type, enabled=False):
            if torch.is_grad_enabled():
                return _differentiable(given, plan, learned, upstream)
            sizes = [len(each) for each in weights]
            arriving = together(upstream, sizes, rows)
            parts = torch.split(arriving, sizes, -1)
            of_few: list[Tensor] = []
            of_downs: list[Tensor] = []
            of_ups: list[Tensor] = []
            for place, scale, up, each in plan.adapters(ups, few, downs):
                back, of_up, _ = gradients(each, parts[place], up.to(plan.dtype), (True, True, False))
                of_few.append(back if scale == 1 else back.mul_(scale))
                of_ups.append((of_up if scale == 1 else of_up.mul_(scale)).to(up.dtype))
            below = None
            if downs:
                whole = of_few[0] if len(of_few) == 1 else torch.cat(of_few, -1)
                below, of_down, _ = gradients(rows, whole, down, (needs[0], True, False))
                of_downs = spans.pieces(of_down.to(downs[0].dtype), [len(each) for each in downs], 0)
            asked = needs[0], any(needs[2:frozen]), any(needs[frozen : frozen + len(biases)])
            found: Any = gradients(rows, arriving, weight, asked) if any(asked) else (None, None, None)
            of_rows, *of_layers = found
            if needs[0]:
                of_rows = (of_rows if below is None else of_rows.add_(below)).to(given.dtype)
            found = [of_rows, None]
            for kind, wanted, whole in zip((weights, biases), asked[1:], of_layers, strict=True):
                found += spans.pieces(whole.to(kind[0].dtype), sizes, 0) if wanted else [None] * len(kind)
        return tuple(each if need else None for each, need in zip((*found, *of_downs, *of_ups), needs, strict=True))


def gradients(rows: Tensor, arriving: Tensor, weight: Tensor, asked: tuple[bool, bool, bool]) -> Any:
    """Return the gradients of a linear layer's input, weight and bias, of those that are `asked` for.

    Metal has one operator for the three; elsewhere they are what autograd's own formula is, two products and a sum.
    """
    if rows.device.type == "mps":
        return torch.ops.aten.linear_backward(rows, arriving, weight, asked)
    places, came = rows.flatten(0, -2), arriving.flatten(0, -2)
    of_rows = arriving.matmul(weight) if asked[0] else None
    return of_rows, came.t().mm(places) if asked[1] else None, came.sum(0) if asked[2] else None


def as_one(parameters: Sequence[Tensor]) -> Tensor:
    """Return the rows of several parameters, as they lie."""
    found = spans.joined(parameters, 0)
    # They were brought together before; a hook of the program's may hand on copies.
    return torch.cat([each.detach() for each in parameters]) if found is None else found


def together(upstream: Sequence[Tensor | None], sizes: Sequence[int], rows: Tensor) -> Tensor:
    """Return the gradients of all results as one tensor."""
    there = [each for each in upstream if each is not None]
    if len(there) == len(sizes):
        found = spans.joined(there, -1)
        if found is not None and found.is_contiguous():
            return found
    pairs = zip(upstream, sizes, strict=True)
    shape = rows.shape[:-1]
    return torch.cat([rows.new_zeros((*shape, size)) if each is None else each for each, size in pairs], -1)


def _differentiable(
    given: Tensor, plan: Plan, learned: Sequence[Tensor], upstream: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return the gradients as functions of everything, by autograd, for gradients of gradients."""
    weights, biases, downs, ups = plan.split(learned)
    rows = given.to(plan.dtype)
    shifts: Sequence[Tensor | None] = [each.to(plan.dtype) for each in biases] or [None] * len(weights)
    outs = [linear(rows, each.to(plan.dtype), shift) for each, shift in zip(weights, shifts, strict=True)]
    for place, scale, down, up in zip(plan.adapted, plan.scales, downs, ups, strict=True):
        outs[place] = outs[place] + linear(linear(rows, down.to(plan.dtype)), up.to(plan.dtype)) * scale
    pairs = [(out, each) for out, each in zip(outs, upstream, strict=True) if each is not None]
    wanted = [each for each in (given, *learned) if each.requires_grad]
    ours, theirs = [out for out, _ in pairs], [each for _, each in pairs]
    grads = iter(torch.autograd.grad(ours, wanted, theirs, create_graph=True, allow_unused=True))
    of_given, *of_learned = [next(grads) if each.requires_grad else None for each in (given, *learned)]
    return of_given, None, *of_learned


def _simple(wrapped: Any) -> tuple[Tensor, Tensor, float] | None:
    """A, B and their factor of a layer of PEFT's that adds no more than their product to its own, or None."""
    kind = type(wrapped)
    if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear") or "forward" in vars(wrapped):
        return None
    names = [name for name in wrapped.active_adapters if name in wrapped.lora_A]
    if len(names) != 1 or wrapped.disable_adapters or wrapped.merged or names[0] in wrapped.lora_variant:
        return None
    down, up, drop = (each[names[0]] for each in (wrapped.lora_A, wrapped.lora_B, wrapped.lora_dropout))
    parts = (wrapped.base_layer, down, up, drop)
    # Nobody calls the parts then: what waits for their calls would wait in vain.
    watched = any(each._forward_hooks or each._forward_pre_hooks or each._backward_hooks for each in parts)
    plain = {type(down), type(up)} == {nn.Linear} and down.bias is up.bias is None
    drops = type(drop) is not nn.Identity and not (type(drop) is nn.Dropout and (drop.p == 0 or not drop.training))
    ordinary = plain and type(down.weight) is type(up.weight) is nn.Parameter
    return None if watched or drops or not ordinary else (down.weight, up.weight, float(wrapped.scaling[names[0]]))


JOINT_PROJECTIONS = JointProjections()
