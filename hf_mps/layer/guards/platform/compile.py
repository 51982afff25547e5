"""compile: torch.compile on Metal leaves layouts as they are, and runs as it is what it cannot compile."""

from __future__ import annotations

import os
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.layer.guards.base import Guard

LAYOUT = "TORCHINDUCTOR_LAYOUT_OPTIMIZATION"
ERRORS = "TORCHDYNAMO_SUPPRESS_ERRORS"


class Compile(Guard):
    """Sets two switches of torch's own when Accelerate, and so Trainer's torch_compile, is about to compile a model.

    Where a program calls torch.compile itself it is the one for layouts alone: what cannot be compiled stays its error.
    """

    name = "compile"
    what = "a model compiled for Metal can train four times slower than before, or end where a graph cannot be compiled"
    until = "pytorch#150121 is closed and the oldest supported torch leaves layouts as they are on mps"
    patches = {
        # What hands a graph to torch's compiler, and the preparing of a model.
        "torch:_TorchCompileInductorWrapper.__call__": "_compiles",
        "accelerate.accelerator:Accelerator.prepare_model": "_prepare",
    }

    def applies(self) -> Choice[bool]:
        """Whether torch's compiler changes layouts, as it does by default up to 2.13."""
        import torch._inductor.config

        if torch._inductor.config.layout_optimization:
            return Choice(True, "torch's compiler forces channels_last on convolutions by default")
        return Choice(True, "layouts stay as they are already; a graph that cannot be compiled still ends the run")

    def _compiles(self, stock: Any, backend: Any, graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if on_metal(inputs):
            self._switch((LAYOUT,))
        return stock(backend, graph, inputs, *args, **kwargs)

    def _prepare(self, stock: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        backend = getattr(accelerator.state.dynamo_plugin.backend, "value", "NO")
        if backend.upper() == "INDUCTOR" and accelerator.device.type == "mps":
            self._switch((LAYOUT, ERRORS))
        return stock(accelerator, *args, **kwargs)

    def _switch(self, variables: tuple[str, ...]) -> None:
        """Set the switches behind those variables that the user has not, and say so where that changes something."""
        import torch._dynamo.config
        import torch._inductor.config

        done = []
        for variable, owner, name, value, words in (
            (LAYOUT, torch._inductor.config, "layout_optimization", False, "leaves layouts as they are"),
            (ERRORS, torch._dynamo.config, "suppress_errors", True, "runs as it is what it cannot compile"),
        ):
            if variable in variables and variable not in os.environ and getattr(owner, name) is not value:
                setattr(owner, name, value)  # to stay: torch reads it at the first call of each graph, whenever that is
                done.append(words)
        if done:
            self.acted(f"torch.compile {' and '.join(done)}; on Metal it is young: compare a few steps without")


def on_metal(inputs: Any) -> bool:
    """Whether a graph is for Metal: its parameters are inputs too, one that makes all tensors itself holds no model."""
    return any(getattr(getattr(each, "device", None), "type", "") == "mps" for each in inputs)


GUARD = Compile()
