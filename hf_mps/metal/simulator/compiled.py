"""torch.compile and torch.mps.Stream on the simulated device."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from hf_mps.core import notices
from hf_mps.core.errors import Notice, UserError

SENTENCE = "simulated: compiled through aot_eager, Inductor's Metal code was not run"
CUDA_GRAPHS = "triton.cudagraphs"
"""The option of Inductor's that its modes reduce-overhead and max-autotune switch on (torch/_inductor/__init__.py)."""
refused = False
"""Whether every graph for Metal is one that Inductor cannot compile (tests.hazards)."""
DEEP = 39
"""Values in half precision; pytorch#188970 has models of 39 layers and more."""


class SimulatedNotice(Notice):
    """Something is other than on a Mac because the device is simulated."""


def install_compiler() -> None:
    """Send graphs with mps tensors to aot_eager. Once."""
    import torch

    wrapper = torch._TorchCompileInductorWrapper
    compile_graph: Any = wrapper.__call__
    if getattr(compile_graph, "_hf_mps_simulates", False):
        return

    @wraps(compile_graph)
    def call(self: Any, graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        values = list(_tensors(graph, inputs))
        if not any(value.device.type == "mps" for value in values):
            return compile_graph(self, graph, inputs, *args, **kwargs)
        if refused:
            raise RuntimeError("failed to compile the Metal source of this graph")
        _meet_faults({**self.config, **(kwargs.get("config_patches") or {})}, values)
        missing = _missing()
        if missing is None:
            return compile_graph(self, graph, inputs, *args, **kwargs)
        _say(f"{SENTENCE}; {missing}")
        from torch._dynamo.backends.registry import lookup_backend

        return lookup_backend("aot_eager")(graph, inputs)

    call._hf_mps_simulates = True  # type: ignore[attr-defined]
    wrapper.__call__ = call  # type: ignore[method-assign, assignment]


def install_shaders(device: Any) -> None:
    """Give torch._C what a wheel with Metal has: what compiles Metal source, and what loads a compiled library."""
    import torch

    def library() -> Any:
        from hf_mps.metal.source.library import Library  # here, as few programs compile Metal source

        return Library

    core: Any = torch._C
    core._mps_compileShader = lambda source: library().compiled(source, device)
    core._mps_loadMetalllib = lambda content: library().loaded(content, device)  # as PyTorch spells it
    core._mps_loadMetallibFromPath = lambda path: library().loaded(Path(path), device)


def _missing() -> str | None:
    """Say what Inductor's Metal source would need here and is not installed; None where it can be compiled."""
    from hf_mps.metal.kernels import metallib
    from hf_mps.metal.source import clang

    try:
        clang.command()
        metallib.require()
    except UserError as missing:
        return str(missing)
    return None


def _tensors(graph: Any, inputs: Iterable[Any]) -> Iterator[Any]:
    """Return the inputs of the traced graph and the values inside it (a graph may make its own tensors)."""
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
    try:
        notices.warn_user(line, SimulatedNotice)
    except Notice:  # warnings are errors here, and this one says nothing of the program
        print(f"hf_mps: {line}", file=sys.stderr)


POOL = 32
"""Streams beside the default one, which is number 0 (ATen/mps/MPSStream.h)."""


def install_streams() -> None:
    """Give torch._C what a wheel with Metal has for streams, and have torch.mps.streams define its class from that."""
    import torch

    streams: Any = getattr(torch.mps, "streams", None)
    if streams is None:
        return

    class _MPSStreamBase(torch.Stream):
        def __new__(cls, *, stream_id: int = -1) -> Any:
            if stream_id == -1:
                return super().__new__(cls, device="mps")
            if stream_id not in range(POOL + 1):
                raise RuntimeError(f"stream_id={stream_id}")  # as in MPSStream.mm, getStreamByID
            kind = torch.accelerator.current_stream().device_type
            return super().__new__(cls, stream_id=stream_id, device_index=0, device_type=kind)

        def synchronize(self) -> None:
            torch.mps.synchronize()

    def current() -> Any:
        return _MPSStreamBase(stream_id=torch.accelerator.current_stream().stream_id)

    core: Any = torch._C
    core._MPSStreamBase = _MPSStreamBase
    core._mps_getCurrentStream = current
    core._mps_setStream = torch.accelerator.set_stream
    # Without Metal it derives its class from a placeholder that cannot be instantiated.
    importlib.reload(streams)
    for name in streams.__all__:
        setattr(torch.mps, name, getattr(streams, name))
