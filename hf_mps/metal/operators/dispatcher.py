"""Which operators of the running torch have no Metal kernel, and which of them the CPU can stand in for.

The dispatcher answers, never a list: an operator that a newer torch gives a Metal kernel drops out by itself, and one
that a library registers later comes in (`missing` may be called again).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

# A kernel under any of these serves Metal tensors too, the last three by calling other operators.
COMPOSITE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
SERVES_METAL = ("MPS", *COMPOSITE)

# PyTorch sends some operators to the CPU whatever PYTORCH_ENABLE_MPS_FALLBACK says (aten/src/ATen/mps/MPSFallback.mm,
# TORCH_LIBRARY_IMPL(aten, MPS, m)); the dispatcher remembers where a kernel comes from. Boxed: computed elsewhere.
SENT_TO_CPU = re.compile(r"^MPS: registered at \S*MPSFallback\.mm:\d+ :: \(none\) \[ boxed \]", re.MULTILINE)
# Asking for each of Metal's 900 kernels where it comes from would take 20 ms of every `import torch`: these are asked,
# all that the file names, and each composite operator that has a Metal kernel.
_ALWAYS = ("col2im", "embedding_renorm_", "linalg_svd", "linalg_svd.U", "upsample_nearest3d.vec")
ALWAYS_ON_CPU = frozenset(f"aten::{name}" for name in _ALWAYS)

# Whole namespaces whose operators take no ordinary tensor: weights packed for the CPU, process groups, quantized data.
PACKED = "its weights are packed for the CPU"
QUANTIZED = "quantized tensors exist on the CPU only"
OTHER_NAMESPACES = {
    **dict.fromkeys(("c10d", "_c10d_functional", "fsdp"), "a process group decides where it runs"),
    **dict.fromkeys(("mkl", "mkldnn", "mkldnn_prepacked", "onednn", "sparse"), PACKED),
    **dict.fromkeys(("quantized", "_quantized", "quantization"), QUANTIZED),
    "prim": "it is part of the interpreter, not an operator on tensors",
}

# What has no form on Metal, by words of the operator's name.
OTHER_NAMES = (
    (re.compile(r"^quantize_per_|^quantized_|_affine_quantized|_quantized_tensor|^dequantize"), QUANTIZED),
    (re.compile(r"_to_sparse|spdiags|sspaddmm|_compressed_sparse_"), "its result or an argument is sparse"),
    (re.compile(r"_nested_"), "its result or an argument is a nested tensor"),
    (re.compile(r"mkldnn"), "its result has the CPU's own layout"),
    (re.compile(r"_dyn_quant_|int4pack"), PACKED),
    (re.compile(r"_flash_attention_for_cpu"), "it is the CPU's own form of an operator that Metal has another form of"),
    (re.compile(r"^_fused_sdp_choice$"), "it would answer which kernel the CPU takes, not Metal"),
    (re.compile(r"^from_file$"), "its result is a file mapped into the CPU's memory"),
    (re.compile(r"^_test_|^_foobar$"), "it exists for PyTorch's own tests"),
)


# Composite out= forms of a missing operator that turn Metal away by name, and the operator. For mode.values
# aten/src/ATen/native/TensorCompare.cpp has it: "mode only supports CPU, CUDA and XPU device type, got: mps".
REFUSE_METAL = {"aten::mode.values": "aten::mode"}

# Composite kernels under these serve sparse COO tensors too.
SERVES_SPARSE = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
NO_COMPRESSED = re.compile(r"^aten::_to_sparse_(csr|csc|bsr|bsc)$")
NO_FACTORY = re.compile(r"^aten::(_?copy_|empty|zeros|sparse_resize|resize_as_sparse_|_sparse_coo_tensor_|_coalesced_)")

# Their Metal kernels refuse sizes that do not divide, before they compute (AdaptivePooling.mm; pytorch#96056).
REFUSE_SIZES = ("aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool2d_backward")

# Metal has F.rms_norm as one kernel, and no kernel for its gradient; nor has the CPU, which never calls that one.
MADE_OF_OTHERS = ("aten::_fused_rms_norm_backward",)


@dataclass(frozen=True)
class Missing:
    """An operator without a Metal kernel ("aten::mode"), and why it keeps what PyTorch does, or None where it need not.

    `composite` ones are made of other operators, most of which Metal has; PyTorch sends them to the CPU as a whole.
    """

    name: str
    refused: str | None
    composite: bool = False


def missing() -> list[Missing]:
    """Return every operator that has a CPU kernel and none that serves Metal, and those that PyTorch sends to the CPU.

    Sorted by name; about 5 ms for the 3600 names of torch 2.13.
    """
    import torch

    names = torch._C._dispatch_get_registrations_for_dispatch_key
    absent = set(names("CPU")).difference(*map(names, SERVES_METAL))
    composite = set(names("CompositeImplicitAutograd"))
    maybe = (composite | ALWAYS_ON_CPU).intersection(names("MPS"))
    # What a kernel is, a plain function or the fallback to the CPU, is told in the dump alone.
    sent = {name for name in maybe if SENT_TO_CPU.search(torch._C._dispatch_dump(name))}
    return [Missing(name, refusal(name), name in composite) for name in sorted(absent | sent)]


def missing_for_sparse() -> list[Missing]:
    """Return every operator that the CPU has a kernel of for sparse COO tensors, and Metal none, sorted by name."""
    import torch

    names = torch._C._dispatch_get_registrations_for_dispatch_key
    absent = sorted(set(names("SparseCPU")).difference(names("SparseMPS")))
    names_of_aten = (name for name in absent if name.startswith("aten::") and not _has(name, *SERVES_SPARSE))
    return [Missing(name, _sparse_refusal(name)) for name in names_of_aten]


def _sparse_refusal(name: str) -> str | None:
    if NO_COMPRESSED.search(name):
        return "its result has a compressed sparse layout, which Metal does not have"
    if NO_FACTORY.search(name):
        return "it makes or changes memory of the device"
    return _schema_refusal(overload(name)._schema)


stand_ins: set[str] = set()
"""Missing operators whose kernel under MPS is the layer's: who registers one, or drops it, says so here."""


def is_missing(name: str) -> bool:
    """Return whether one operator has a CPU kernel and none that serves Metal but the layer's."""
    return name in stand_ins or (_has(name, "CPU") and not _has(name, *SERVES_METAL))


def has_no_kernel(name: str) -> bool:
    """Return whether torch has an operator that neither the CPU nor anything that serves Metal has a kernel for."""
    import torch

    return bool(torch._C._dispatch_has_kernel(name)) and not _has(name, "CPU", *SERVES_METAL)


def _has(name: str, *keys: str) -> bool:
    """Return whether an operator has a kernel under one of these dispatch keys."""
    import torch

    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


def overload(name: str) -> Any:
    """Return the torch.ops object of "namespace::operator.overload". Raises AttributeError where torch.ops has none."""
    import torch

    namespace, _, rest = name.partition("::")
    packet, _, which = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), which or "default")


def registered_kernel(name: str) -> Callable[..., Any]:
    """Return the kernel that Metal tensors get now for "aten::add.Tensor", to be called with its arguments.

    Raises RuntimeError where torch has no such operator or kernel.
    """
    import torch

    there = torch.library.get_kernel(name, "MPS")
    return partial(there.call_boxed, torch._C.DispatchKeySet(torch._C.DispatchKey.MPS))


def refusal(name: str) -> str | None:
    """Return why the CPU cannot stand in for an operator, or None where it can."""
    namespace, _, rest = name.partition("::")
    if namespace in OTHER_NAMESPACES:
        return OTHER_NAMESPACES[namespace]
    for pattern, reason in OTHER_NAMES if namespace == "aten" else ():
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
