"""Pieces of transformers' models that a part has a shorter way for, in every model that computes the same.

transformers writes each model out: Llama's rotation is in more than a hundred files. A copy is a function that computes
what the original does, to the last bit, from the part's samples; how it is written does not matter.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_mps.core.patching import OriginalCall, Patch, located
from hf_mps.layer.fused_step.autograd_kernels import runs
from hf_mps.layer.fused_step.switch import Part
from hf_mps.metal.device.no_modes import no_modes

MODELS, MADE = "transformers.models.", "transformers.modeling_utils"
CACHES = ("past_key_values", "cache")
"""The argument for keys and values of earlier tokens: its name up to transformers 5.23, and since then."""


class ModelCode(Part):
    """`shorter` says which method of the part is put around each piece: MODELS and "llama.modeling_llama:Class.method".

    The copies are looked for in the modules of models that were imported, when the part is armed, and in that of each
    model that is made later.
    """

    shorter: Mapping[str, str] = {}

    @property
    def patches(self) -> Mapping[str, str | Patch]:
        """Each piece where it was written first; and where models are made, to find the copies."""
        first = {f"{MODELS}{piece}": Patch(method, after=MADE, late=True) for piece, method in self.shorter.items()}
        return {f"{MADE}:PreTrainedModel.post_init": "_made", **first}

    def install(self, module: ModuleType) -> None:
        """Also look through the models that were imported before."""
        super().install(module)
        if module.__name__ == MADE:
            for name, model in tuple(sys.modules.items()):
                if name.startswith(MODELS) and ".modeling_" in name:
                    self._look_through(model)

    def wrapped(
        self, where: str, stock: Callable[..., Any], wrapper: Callable[..., Any], owner: Any = None
    ) -> Callable[..., Any]:
        """A model is looked through as it is made even while the part is off, which may be switched on for it later."""
        always = SimpleNamespace(on=True, failed=self.failed) if wrapper == self._made else None
        return super().wrapped(where, stock, wrapper, owner or always)

    def around(self, place: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Also within what transformers puts around the layers that it checkpoints, which asks if it is outermost."""
        outer = getattr(place, name)
        code, done = getattr(outer, "__code__", None), getattr(outer, "hf_mps_patches", ())
        inside = self.name not in done and getattr(code, "co_name", "") == "forward_with_checkpointing"
        if inside:
            setattr(place, name, outer.__wrapped__)
        super().around(place, name, wrapper)
        if inside:
            super(place, place).__init_subclass__()

    def _made(self, stock: OriginalCall, model: Any, *args: Any, **kwargs: Any) -> Any:
        # First, so that what was armed before is inside here too.
        result = stock(model, *args, **kwargs)
        self._look_through(sys.modules[type(model).__module__])
        return result

    def _look_through(self, module: ModuleType) -> None:
        for piece, method in self.shorter.items():
            for place, name in _named_alike(module, piece.partition(":")[2]):
                if self.is_copy(vars(place)[name], piece):
                    self.around(place, name, getattr(self, method))

    def trains(self, given: Any) -> bool:
        """Return whether a call computes with a tensor of a device that is ours, where gradients are wanted."""
        return runs(given) and given.device.type in self.devices and torch.is_grad_enabled()

    def is_copy(self, function: Any, piece: str) -> bool:
        """Return whether a function computes what a piece does."""
        return _computes(function, self.original(piece), self.sample)

    def has(self, kinds: Iterable[Any], *pieces: str) -> bool:
        """Return whether one of transformers' classes, named as the class of a piece is, computes what that does."""
        there = [kind for kind in kinds if kind.__module__.startswith(MODELS)]
        return any(
            self.is_copy(kind.forward, f"{piece}.forward")
            for piece in pieces
            for kind in there
            if kind.__name__.endswith(_kind(piece.partition(":")[2]))
        )

    def original(self, piece: str) -> Any:
        """Return the function that a piece is, or one that computes the same."""
        place, name = located(f"{MODELS}{piece}")
        return getattr(place, name)

    def sample(self, function: Callable[..., Any]) -> list[Any]:
        """Return what a function of a piece's kind makes of a few small tensors on the CPU, to be compared."""
        raise NotImplementedError


def watched(layer: Any) -> bool:
    """Return whether somebody waits for a layer's calls, or has put something in the place of its `forward`."""
    # The package kernels puts the class's own function there, where it has no other.
    own = vars(layer).get("forward")
    other = own is not None and getattr(own, "__func__", None) is not type(layer).forward
    return bool(other or layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


def parts_of(*names: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return a part of a layer for each name, of which each does something else."""
    return {name: functools.partial(_part, float(place + 2)) for place, name in enumerate(names)}


def _part(factor: float, given: Tensor) -> Tensor:
    return (given * factor).sin() + factor


def _kind(name: str) -> str:
    """Return what a class is called without its model's name: other classes are not called with samples."""
    return re.sub("^(Llama|T5|Bert|ViT|CLIP)", "", name)


def _named_alike(module: ModuleType, path: str) -> Iterator[tuple[Any, str]]:
    """Functions of the path's name, or methods of classes whose name ends as its class's does, behind the model's."""
    owner, _, name = path.rpartition(".")
    if not owner:
        # Not isfunction: the package kernels makes modules of such functions (`use_kernel_forward_from_hub`).
        if callable(vars(module).get(name)):
            yield module, name
        return
    kind = _kind(owner)
    for value in tuple(vars(module).values()):
        here = isinstance(value, type) and value.__module__ == module.__name__
        if here and value.__name__.endswith(kind) and inspect.isfunction(vars(value).get(name)):
            yield value, name


@functools.cache
def _computes(function: Any, original: Any, sample: Callable[[Callable[..., Any]], list[Any]]) -> bool:
    """Return whether both make the same tensors of a sample; a function that cannot take it is another one."""
    function, original = inspect.unwrap(function), inspect.unwrap(original)
    if function is original:
        return True
    try:
        with no_modes():
            return all(torch.equal(one, other) for one, other in zip(sample(function), sample(original), strict=True))
    except Exception:  # somebody else's function, called with what it may not expect
        return False
