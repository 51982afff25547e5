"""Linear layers that a module gives the same input, as queries, keys and values are made, computed as one."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hf_mps.core.original_call import OriginalCall
from hf_mps.layer.fused_step import joint_linear, spans
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
        if device_type == "cuda":
            return self.on_cuda
        return super().pays(device_type)

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
            return  # it imports what this part is armed after, and its classes are still to come
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
        if adapters:
            downs, ups = [each[0] for each in adapters.values()], [each[1] for each in adapters.values()]
            scales = tuple(each[2] for each in adapters.values())
            plan = joint_linear.Plan(tuple(adapters), scales, dtype, len(layers))
            learned = (*weights, *biases, *downs, *ups)
            outs = stock.foreign(joint_linear.JointAdapters.apply, given, plan, *learned)
            layers = [asked[place] if place in adapters else layer for place, layer in enumerate(layers)]
        else:
            outs = stock.foreign(joint_linear.JointLinear.apply, given, dtype, len(layers), *weights, *biases)
        for layer, out in zip(layers, outs, strict=True):
            layer.forward = functools.partial(_handed, layer, given, out)
        return layers

    def _fits(self, given: Tensor, layers: list[Any]) -> bool:
        """Return whether stock would compute the same with each layer, on a device that is ours."""
        weights = [each.weight for each in layers]
        alike = {(each.dtype, each.device, each.shape[1]) for each in weights} == {
            (weights[0].dtype, given.device, given.shape[-1])
        }
        biases = {None if each.bias is None else each.bias.dtype for each in layers}
        cast = torch.is_autocast_enabled(given.device.type)
        return (
            given.device.type in self.devices
            and alike
            and biases <= {None} | {weights[0].dtype}
            and len(biases) == 1
            and given.is_floating_point()
            and (cast or given.dtype == weights[0].dtype)
            and given.numel() > 0
        )


def _handed(layer: Any, given: Tensor, out: Tensor, asked: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a layer returns whose result is ready: that, where it is asked for the same."""
    vars(layer).pop("forward", None)
    return out if asked is given and not args and not kwargs else layer.forward(asked, *args, **kwargs)


def _layers(asked: list[Any]) -> list[Any]:
    """Return the linear layers among a module's, or none: PEFT's have the model's own layer inside."""
    peft = (type(each).__module__.startswith("peft.") for each in asked)
    found: list[Any] = [
        getattr(each, "base_layer", each) if its else each for each, its in zip(asked, peft, strict=True)
    ]
    plain = all(type(each) is nn.Linear and "forward" not in vars(each) for each in found)
    ordinary = plain and all(type(each) is nn.Parameter for layer in found for each in layer.parameters())
    return found if ordinary and len(set(map(id, found))) == len(found) else []


def _adapters(asked: list[Any], frozen: list[Tensor], given: Tensor) -> dict[int, tuple[Tensor, Tensor, float]]:
    """Return which of the layers have adapters that can be computed with them, by their places."""
    if any(each.requires_grad for each in frozen):
        return {}
    simple = {place: joint_linear.simple(each) for place, each in enumerate(asked)}
    found = {place: each for place, each in simple.items() if each is not None}
    kinds = {(each.dtype, each.device) for down, up, _ in found.values() for each in (down, up)}
    downs = [down for down, _, _ in found.values()]
    if kinds != {(given.dtype, given.device)} or spans.brought_together(downs) is None:
        return {}
    return found


def _of_file(module: ModuleType) -> Iterator[tuple[str, Groups]]:
    """Yield the classes of a module whose `forward` calls several of its layers with one argument."""
    tree = ast.parse(Path(inspect.getsourcefile(module) or "").read_text(encoding="utf-8"))
    for node in tree.body:
        kind = getattr(module, node.name, None) if isinstance(node, ast.ClassDef) else None
        if not isinstance(node, ast.ClassDef) or not isinstance(kind, type):
            continue
        for function in node.body:
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
        name = _own_layer(call)
        if name and len(call.args) == 1 and not call.keywords and isinstance(call.args[0], ast.Name):
            called.setdefault(call.args[0].id, []).append(name)
    return {
        name: tuple(layers)
        for name, layers in called.items()
        if name in arguments and name not in given and len(set(layers)) == len(layers) > 1
    }


def _always(nodes: list[Any]) -> Iterator[ast.Call]:
    """Yield the calls that no condition, loop or handler of errors stands around."""
    sometimes = ast.If | ast.For | ast.While | ast.Try | ast.IfExp | ast.BoolOp | ast.Lambda | ast.comprehension
    for node in nodes:
        if not isinstance(node, sometimes | ast.FunctionDef):
            if isinstance(node, ast.Call):
                yield node
            yield from _always(list(ast.iter_child_nodes(node)))


def _own_layer(call: ast.Call) -> str:
    """ "query" for self.query(…), else nothing."""
    function = call.func
    own = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self"
    return function.attr if own and isinstance(function, ast.Attribute) else ""


JOINT_PROJECTIONS = JointProjections()
