"""Pieces of transformers' models that a part has a shorter way for, in every model that has the same code.

transformers writes each model out: Llama's norm and rotation stand in more than a hundred files. A copy is one whose
compiled code is the original's, so that a model with a word more or less keeps its own way.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from hf_mps.core.original_call import OriginalCall
from hf_mps.core.patching import Patch, located
from hf_mps.layer.fused_step.base import Part

MODELS, MADE = "transformers.models.", "transformers.modeling_utils"


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

    def wrapped(self, where: str, stock: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
        """A model is looked through as it is made even while the part is off, which may be switched on for it later."""
        owner = SimpleNamespace(on=True, failed=self.failed) if wrapper == self._made else self
        return self.answered(owner, where, stock, wrapper)

    def _made(self, stock: OriginalCall, model: Any, *args: Any, **kwargs: Any) -> Any:
        self._look_through(sys.modules[type(model).__module__])
        return stock(model, *args, **kwargs)

    def _look_through(self, module: ModuleType) -> None:
        for piece, method in self.shorter.items():
            for place, name in _named_alike(module, piece.partition(":")[2]):
                if self.is_copy(vars(place)[name], piece):
                    self.around(place, name, self.attribute(method))

    def is_copy(self, function: Any, piece: str) -> bool:
        """Return whether a function does what a piece does, by the same code."""
        place, name = located(f"{MODELS}{piece}")
        return _code(function) == _code(getattr(place, name))


def _named_alike(module: ModuleType, path: str) -> Iterator[tuple[Any, str]]:
    """Functions of the path's name, or methods of classes whose name ends as its class's does, behind the model's."""
    owner, _, name = path.rpartition(".")
    if not owner:
        if inspect.isfunction(vars(module).get(name)):
            yield module, name
        return
    kind = re.sub("^(Llama|T5)", "", owner)
    for value in tuple(vars(module).values()):
        here = isinstance(value, type) and value.__module__ == module.__name__
        if here and value.__name__.endswith(kind) and inspect.isfunction(vars(value).get(name)):
            yield value, name


def _code(function: Any) -> tuple[Any, ...]:
    """Return what a function does: its compiled code and its constants, without its documentation."""
    function = inspect.unwrap(function)
    code = function.__code__
    # What it calls by name may be another function in another file; where it is one of that file, its code counts.
    near = (function.__globals__.get(name) for name in code.co_names)
    called = tuple(_code(each) for each in near if inspect.isfunction(each) and each.__module__ == function.__module__)
    constants = tuple(each for each in code.co_consts if each != function.__doc__)
    return code.co_code, code.co_names, constants, function.__defaults__, called
