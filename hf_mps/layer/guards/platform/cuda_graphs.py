"""cuda-graphs: torch.compile's modes go without the CUDA graphs that Metal does not have."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.platform.compile import on_metal

SWITCH = "triton.cudagraphs"
"""The one option by which reduce-overhead differs from the default, and max-autotune from its no-cudagraphs form."""


class CudaGraphs(Guard):
    """Leaves that option out where a graph for Metal is compiled; what else a mode or a program sets stays."""

    name = "cuda-graphs"
    what = "torch.compile's modes reduce-overhead and max-autotune end the process (SIGSEGV) on deep float16 models"
    until = "the oldest supported torch leaves CUDA graphs out on mps by itself"
    patches = {"torch:_TorchCompileInductorWrapper.__call__": "_compiles"}

    def concerns(self, module: ModuleType) -> bool:
        """Always: it is reported of 2.13, and that the thread is closed names no release without it."""
        return True

    def applies(self) -> Choice[bool]:
        """Always: a trial would end the process, and the option that is left out is worth nothing on Metal."""
        return Choice(True, "Metal has no CUDA graphs, and asking for them has ended processes in torch 2.13")

    def _compiles(self, stock: Any, backend: Any, graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not on_metal(inputs) or not _asked_for(backend) or not self.needed:
            return stock(backend, graph, inputs, *args, **kwargs)
        self.acted("torch.compile leaves out the CUDA graphs of mode reduce-overhead or max-autotune; Metal has none")
        given = backend.config
        backend.config = {**given, SWITCH: False}
        try:
            return stock(backend, graph, inputs, *args, **kwargs)
        finally:
            backend.config = given


def _asked_for(backend: Any) -> bool:
    import torch._inductor.config

    return bool(backend.config.get(SWITCH, torch._inductor.config.triton.cudagraphs))


GUARD = CudaGraphs()
