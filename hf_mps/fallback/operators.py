"""Which operators of the running torch have no Metal kernel, and which of them the CPU can stand in for.

The dispatcher is asked, never a list: an operator that a newer torch gives a Metal kernel drops out by itself, and one
that a library registers later comes in (`missing` may be called again).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

# A kernel under any of these serves Metal tensors too, the last three by calling other operators.
SERVES_METAL = (
    "MPS",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)

# Whole namespaces whose operators take no ordinary tensor: weights packed for the CPU, process groups, quantized data.
OTHER_NAMESPACES = {
    "c10d": "a process group decides where it runs",
    "_c10d_functional": "a process group decides where it runs",
    "mkl": "its weights are packed for the CPU",
    "mkldnn": "its weights are packed for the CPU",
    "mkldnn_prepacked": "its weights are packed for the CPU",
    "onednn": "its weights are packed for the CPU",
    "quantized": "quantized tensors exist on the CPU only",
    "_quantized": "quantized tensors exist on the CPU only",
    "quantization": "quantized tensors exist on the CPU only",
    "sparse": "its weights are packed for the CPU",
    "prim": "it is part of the interpreter, not an operator on tensors",
}

# What makes a result that has no form on Metal, by words of the operator's name.
OTHER_RESULTS = (
    (re.compile(r"quantize_per_|quantized_|affine_quantized|_quantized_tensor|^dequantize"), "quantized tensors exist on the CPU only"),
    (re.compile(r"_to_sparse|spdiags|sspaddmm"), "its result or an argument is sparse"),
    (re.compile(r"_nested_"), "its result is a nested tensor"),
    (re.compile(r"mkldnn"), "its result has the CPU's own layout"),
    (re.compile(r"_for_cpu|_dyn_quant_"), "its weights are packed for the CPU"),
    (re.compile(r"^_test_|^_foobar$"), "it exists for PyTorch's own tests"),
)


@dataclass(frozen=True)
class Missing:
    """An operator without a Metal kernel ("aten::mode"), and why it keeps Metal's error, or None where it need not."""

    name: str
    refused: str | None


def missing() -> list[Missing]:
    """Every operator that has a CPU kernel and none that serves Metal, in the dispatcher's order.

    One pass over about 3600 names; cheap enough to be done again when a library has registered more.
    """
    import torch

    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [
        Missing(name, _refusal(name))
        for name in torch._C._dispatch_get_all_op_names()
        if has(name, "CPU") and not any(has(name, key) for key in SERVES_METAL)
    ]


@lru_cache(maxsize=4096)
def overload(name: str) -> Any:
    """The torch.ops object of "namespace::operator.overload". Raises AttributeError where torch.ops has none."""
    import torch

    namespace, _, rest = name.partition("::")
    packet, _, which = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), which or "default")


def _refusal(name: str) -> str | None:
    namespace, _, rest = name.partition("::")
    if namespace in OTHER_NAMESPACES:
        return OTHER_NAMESPACES[namespace]
    for pattern, reason in OTHER_RESULTS if namespace == "aten" else ():
        if pattern.search(rest.partition(".")[0]):
            return reason
    try:
        schema = overload(name)._schema
    except (AttributeError, RuntimeError):
        return "torch.ops does not know it"
    return _schema_refusal(schema)


def _schema_refusal(schema: Any) -> str | None:
    for argument in schema.arguments:
        kind = str(argument.type)
        if "__torch__" in kind or "Storage" in kind or "Stream" in kind:
            return f"its argument {argument.name} is a {kind}, which has no counterpart on the other device"
    if any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns):
        return "its result is a view, which must lie in the argument's own memory"
    return None
