"""torch.compile's default backend on the simulated device: one clear sentence instead of an internal error.

For mps tensors the backend "inductor" writes Metal source, and only Metal can execute that. The refusal sits where
torch hands a traced graph to the backend (`torch._TorchCompileInductorWrapper`, in torch/__init__.py), so switching
it on imports neither torch._dynamo nor torch._inductor, and graphs without an mps tensor pass through untouched.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import lru_cache, wraps
from types import FrameType
from typing import Any

SENTENCE = (
    "torch.compile's default backend writes Metal source, which the simulated device cannot execute; "
    'use torch.compile(..., backend="aot_eager") here, which runs the same graph with the device\'s own operators'
)
SHADER_SENTENCE = "Metal source cannot be compiled on the simulated device: there is no Metal under it"


def install() -> None:
    """Refuse graphs with mps tensors in torch.compile's default backend, and Metal source in torch.mps. Once."""
    import torch

    wrapper = torch._TorchCompileInductorWrapper
    if getattr(wrapper.__call__, "_hf_mps_refuses", False):
        return
    wrapper.__call__ = _refusing(wrapper.__call__)  # type: ignore[method-assign]
    # The backend's other ways in (torch._inductor.compile, AOTInductor) and people's own shaders end up in these.
    for name in ("compile_shader", "load_metallib"):
        if hasattr(torch.mps, name):
            setattr(torch.mps, name, _refuse_source)


def _refusing(compile_graph: Any) -> Any:
    @wraps(compile_graph)
    def call(self: Any, graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if _touches_mps(graph, inputs):
            raise _refusal()(SENTENCE, first_useful_frame=inspect.currentframe())
        return compile_graph(self, graph, inputs, *args, **kwargs)

    call._hf_mps_refuses = True  # type: ignore[attr-defined]
    return call


def _refuse_source(*_: Any, **__: Any) -> Any:
    raise RuntimeError(SHADER_SENTENCE)


def _touches_mps(graph: Any, inputs: Iterable[Any]) -> bool:
    """Whether an input of the traced graph or a value inside it lives on mps (a graph may make its own tensors)."""
    import torch
    from torch.utils._pytree import tree_leaves

    nodes = getattr(getattr(graph, "graph", None), "nodes", ())
    inside = (node.meta.get("example_value", node.meta.get("val")) for node in nodes)
    values = (leaf for value in (*inputs, *inside) for leaf in tree_leaves(value))
    return any(isinstance(value, torch.Tensor) and value.device.type == "mps" for value in values)


@lru_cache(maxsize=1)
def _refusal() -> Any:
    """The exception's class. It derives from one of dynamo's, which is why it is made on first use.

    ShortenTraceback is the one that dynamo passes on as it is and whose traceback it cuts to the user's frames;
    anything else comes out wrapped (torch/_dynamo/output_graph.py, _call_user_compiler). Being a UserError as well,
    it ends a command of ours in one line.
    """
    from torch._dynamo.exc import ShortenTraceback

    from hf_mps.errors import UserError

    class MetalSourceRefused(ShortenTraceback, UserError):
        def __init__(self, message: str, *, first_useful_frame: FrameType | None) -> None:
            super().__init__(message, first_useful_frame=first_useful_frame)
            self._message = message

        def __str__(self) -> str:
            # dynamo appends advice on how to see its internals to the arguments of whatever passes through it.
            return self._message

    MetalSourceRefused.__qualname__ = MetalSourceRefused.__name__
    return MetalSourceRefused
