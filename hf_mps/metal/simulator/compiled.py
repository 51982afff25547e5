"""torch.compile's default backend on the simulated device: what Inductor would compile runs through aot_eager.

For mps tensors Inductor writes Metal source, and only Metal can execute that. A graph with an mps tensor goes to the
backend "aot_eager" instead, which runs the same traced forward and backward pass with the device's own operators; all
others go their way untouched. The switch sits where torch hands a traced graph to Inductor
(`torch._TorchCompileInductorWrapper`, in torch/__init__.py), so that putting it there imports no compiler, and all that
torch.compile does before (graph breaks, guards, `fullgraph`, `dynamic`) is torch's.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

from hf_mps.core.errors import Notice

SENTENCE = "simulated: compiled through aot_eager, Inductor's Metal code was not run"
SHADER_SENTENCE = (
    "Metal source cannot be compiled on the simulated device, as there is no Metal under it; "
    "torch.compile(...) itself runs here, through aot_eager"
)
CUDA_GRAPHS = "triton.cudagraphs"
"""The option of Inductor's that its modes reduce-overhead and max-autotune switch on (torch/_inductor/__init__.py)."""
refused = False
"""Whether every graph for Metal is one that Inductor cannot compile (tests.hazards)."""
DEEP = 39
"""Values in half precision; pytorch#188970 has models of 39 layers and more."""


class SimulatedNotice(Notice):
    """Something is other than on a Mac because the device is simulated."""


def install() -> None:
    """Send graphs with mps tensors to aot_eager, and refuse Metal source in torch.mps. Once."""
    import torch

    wrapper = torch._TorchCompileInductorWrapper
    if getattr(wrapper.__call__, "_hf_mps_simulates", False):
        return
    wrapper.__call__ = _through_aot_eager(wrapper.__call__)  # type: ignore[method-assign]
    # The backend's other ways in (torch._inductor.compile, AOTInductor) and people's own shaders end up in these.
    for name in ("compile_shader", "load_metallib"):
        setattr(torch.mps, name, _refuse_source)


def _through_aot_eager(compile_graph: Any) -> Any:
    @wraps(compile_graph)
    def call(self: Any, graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        values = list(_tensors(graph, inputs))
        if not any(value.device.type == "mps" for value in values):
            return compile_graph(self, graph, inputs, *args, **kwargs)
        if refused:
            raise RuntimeError("failed to compile the Metal source of this graph")
        _meet_faults({**self.config, **(kwargs.get("config_patches") or {})}, values)
        _say(SENTENCE)
        from torch._dynamo.backends.registry import lookup_backend

        return lookup_backend("aot_eager")(graph, inputs)

    call._hf_mps_simulates = True  # type: ignore[attr-defined]
    return call


def _refuse_source(*_: Any, **__: Any) -> Any:
    raise RuntimeError(SHADER_SENTENCE)


def _tensors(graph: Any, inputs: Iterable[Any]) -> Iterator[Any]:
    """The inputs of the traced graph and the values inside it (a graph may make its own tensors)."""
    import torch
    from torch.utils._pytree import tree_leaves

    nodes = getattr(getattr(graph, "graph", None), "nodes", ())
    inside = (node.meta.get("example_value", node.meta.get("val")) for node in nodes)
    leaves = (leaf for value in (*inputs, *inside) for leaf in tree_leaves(value))
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _meet_faults(options: Mapping[str, Any], values: Iterable[Any]) -> None:
    """End the process where the fault `cuda-graphs` is on and would; `options` are those of Inductor."""
    import torch
    import torch._inductor.config

    from hf_mps.metal.device import faults
    from hf_mps.metal.simulator import strictness

    if not options.get(CUDA_GRAPHS, torch._inductor.config.triton.cudagraphs):
        return
    deep = sum(value.dtype == torch.float16 for value in values) >= DEEP
    if deep and "cuda-graphs" in strictness.active():
        end(faults.FAULTS["cuda-graphs"].issue)


def end(issue: str) -> None:
    """End the process as Metal does, with a line that a Mac does not print."""
    print(f"hf_mps: simulated: the process ends here as on a Mac ({issue})", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def _say(line: str) -> None:
    from hf_mps.core import notices

    try:
        notices.warn_user(line, SimulatedNotice)
    except Notice:  # warnings are errors here, and this one says nothing of the program
        print(f"hf_mps: {line}", file=sys.stderr)
