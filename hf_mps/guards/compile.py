"""compile: torch.compile on Metal leaves layouts as they are, and runs as it is what it cannot compile."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from hf_mps.choice import Choice
from hf_mps.guards.guard import Guard, around

LAYOUT = "TORCHINDUCTOR_LAYOUT_OPTIMIZATION"
ERRORS = "TORCHDYNAMO_SUPPRESS_ERRORS"


class Compile(Guard):
    """Sets two switches of torch's own when Accelerate, and so Trainer's torch_compile, is about to compile a model."""

    name = "compile"
    what = "a model compiled for Metal can train four times slower than before, or end where a graph cannot be compiled"
    issue = "https://github.com/pytorch/pytorch/issues/192551"
    until = "pytorch#150121 is closed and the oldest supported torch leaves layouts as they are on mps"

    def applies(self) -> Choice[bool]:
        """Whether torch's compiler changes layouts, as it does by default up to 2.13."""
        import torch._inductor.config

        if torch._inductor.config.layout_optimization:
            return Choice(True, "torch's compiler forces channels_last on convolutions by default")
        return Choice(True, "layouts stay as they are already; a graph that cannot be compiled still ends the run")

    def install(self, module: ModuleType) -> None:
        """Put it around the preparing of a model."""
        around(self, module.Accelerator, "prepare_model", self._prepare)

    def _prepare(self, stock: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        backend = getattr(accelerator.state.dynamo_plugin.backend, "value", "NO")
        if backend.upper() == "INDUCTOR" and accelerator.device.type == "mps":
            self._switch()
        return stock(accelerator, *args, **kwargs)

    def _switch(self) -> None:
        import torch._dynamo.config
        import torch._inductor.config

        done = []
        if LAYOUT not in os.environ:
            torch._inductor.config.layout_optimization = False
            done.append("leaves layouts as they are")
        if ERRORS not in os.environ:
            torch._dynamo.config.suppress_errors = True
            done.append("runs as it is what it cannot compile")
        if done:
            self.acted(f"torch.compile {' and '.join(done)}; on Metal it is young: compare a few steps without")


GUARD = Compile()
