"""Tells where in a training step an operator is called: in which pass and module, in the backward pass too."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
from torch.nn.modules import module as nn_module

PHASES = ("generation", "forward", "loss", "backward", "clipping", "optimizer", "between")
GENERATION, FORWARD, LOSS, BACKWARD, CLIPPING, OPTIMIZER, BETWEEN = PHASES
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class ModuleTracker:
    """As a context manager it follows the modules of whatever model runs; the caller sets `phase` outside of them.

    The forward pass has a stack of modules. In the backward pass autograd says which of its nodes it computes, and a
    node's sequence number is that of the forward call which made it; those are noted on the way.
    """

    def __init__(self) -> None:
        self.phase = BETWEEN
        self._names: dict[torch.nn.Module, str] = {}
        self._roots: set[torch.nn.Module] = set()
        self._stack: list[torch.nn.Module] = []
        self._made: dict[int, str] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> ModuleTracker:
        self._hooks = [
            nn_module.register_module_forward_pre_hook(self._enter),
            nn_module.register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._stack.clear()

    def here(self) -> tuple[str, str]:
        """The phase and the module's name ("bert.encoder.layer.3"; the class's name for the whole model, or "")."""
        node: Any = torch._C._current_autograd_node()
        name = self._names[self._stack[-1]] if self._stack else ""
        if node is not None:  # a module that runs now is a checkpointed one, run again
            return BACKWARD, name or self._made.get(node._sequence_nr(), "")
        if self.phase == GENERATION or (self.phase not in (FORWARD, BETWEEN) and not self._stack):
            return self.phase, name
        # Autograd makes a call's node, and counts it, before the call comes down here. The first call seen with a
        # number is the node's own; others, which need no gradient, come later.
        self._made.setdefault(torch._C._autograd._get_sequence_nr() - 1, name)
        if not self._stack:
            return (LOSS if self.phase == FORWARD else self.phase), ""
        return (LOSS if self._stack[-1] in self._roots else FORWARD), name

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if not self._stack and module not in self._names:
            self._roots.add(module)
            for name, part in module.named_modules():
                self._names[part] = name or type(module).__name__
        if module in self._names:
            self._stack.append(module)

    def _leave(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if module in self._stack:
            while self._stack.pop() is not module:
                pass


@cache
def family(name: str) -> str:
    """Return a module's name without the number of its layer: `bert.encoder.layer.*.output`."""
    return _NUMBER.sub("*", name)
