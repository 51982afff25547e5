"""Which way the host takes where an operator has several, as PyTorch's sources decide it by dtype, shape and layout.

Each rule names its source, as of 2.13.0 and 2.14.1; what 2.15.0 does otherwise was read from its wheel's code.
`PYTORCH_MPS_PREFER_METAL`, which changes the products, is not set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from packaging.version import Version

from hf_mps.core.choice import Choice

if TYPE_CHECKING:
    from hf_mps.metal.operators.launch_class import Call, LaunchClass, Operand

OPERATIONS = "aten/src/ATen/native/mps/operations"
VECTORS = Version("2.14")
"""The release whose products with one row or column have a Metal kernel of their own, and whose cat has one way."""
LINES = Version("2.15")
"""The release that has Metal kernels for convolutions along one dimension (pytorch pull request 193021)."""
TILED = 2**32
COMPLEX_INNER = 2048
LARGE_FILTER = 256
SHORT_QUERY = 8
VECTOR_SIZES = (64, 96, 128, 256)
PREFILL_SIZES = (32, 64, 72, 80, 96, 128, 256)
"""The sizes of a head that attention has kernels for."""


@dataclass(frozen=True)
class Host:
    """What the host asks of its surroundings: its release, and the macOS below it."""

    release: Version
    macos: tuple[int, int]


Rule = Callable[["Call", Host], "Choice[LaunchClass] | None"]


def decided(call: Call, ways: tuple[str, ...], release: Version, macos: tuple[int, int]) -> Choice[LaunchClass] | None:
    """The class of a call that has a rule, or None: where there is one way alone, or none is known."""
    rule = RULES.get(call.base)
    if rule is None or len(ways) < 2:
        return None
    try:
        return rule(call, Host(release, macos))
    except IndexError:  # called with fewer tensors than the rule knows of
        return None


def _given(call: Call, place: int) -> int | tuple[int, ...] | None:
    """An argument of a call, or None where it was not given or is no number."""
    return call.arguments[place] if place < len(call.arguments) else None


def _whole(operand: Operand) -> bool:
    return operand.dtype.startswith(("int", "uint", "bool"))


def _product(call: Call, host: Host) -> Choice[LaunchClass] | None:
    """mm and addmm, after `use_metal_mm` in LinearAlgebra.mm; the operands are the last two."""
    left, right = call.inputs[-2:]
    if _whole(left):
        return Choice("metal", f"products of {left.dtype} are a Metal kernel ({OPERATIONS}/LinearAlgebra.mm)")
    if left.dtype.startswith("complex") and left.shape[-1] > COMPLEX_INNER:
        return Choice("metal", f"complex products over more than {COMPLEX_INNER} are a Metal kernel")
    if host.release >= VECTORS and (left.shape[0] == 1 or right.shape[-1] == 1):
        return Choice("metal", "products with one row or column are a Metal kernel from 2.14 on")
    return Choice("graph", f"products of {left.dtype} matrices are MPSGraph ({OPERATIONS}/LinearAlgebra.mm)")


def _batched(call: Call, host: Host) -> Choice[LaunchClass] | None:
    """bmm, baddbmm and addbmm: LinearAlgebra.mm, `bmm_out_mps_impl`."""
    left, right = call.inputs[-2:]
    if _whole(left):
        return Choice("metal", f"products of {left.dtype} are a Metal kernel ({OPERATIONS}/LinearAlgebra.mm)")
    if call.base == "bmm" and left.shape[0] * left.shape[1] * right.shape[-1] > TILED:
        return Choice("framework", "a result of more than 2^32 elements is made in tiles by MPSNDArray")
    return Choice("graph", f"batched products of {left.dtype} are MPSGraph ({OPERATIONS}/LinearAlgebra.mm)")


def _linear(call: Call, host: Host) -> Choice[LaunchClass] | None:
    """Linear.mm: without a graph where all operands are dense and real, from macOS 15 on."""
    if host.macos < (15, 0):
        return Choice("graph", f"before macOS 15 ({OPERATIONS}/Linear.mm)")
    if any(each.dtype.startswith("complex") for each in call.inputs):
        return Choice("graph", f"complex operands ({OPERATIONS}/Linear.mm)")
    if all(each.dense for each in call.inputs):
        return Choice("framework", f"MPSNDArrayMatrixMultiplication: its operands are dense ({OPERATIONS}/Linear.mm)")
    return Choice("graph", f"an operand is not contiguous ({OPERATIONS}/Linear.mm)")


def _linear_backward(call: Call, host: Host) -> Choice[LaunchClass] | None:
    """From 2.14 on it calls mm, and sum for the bias (Linear.mm)."""
    rows = prod(call.inputs[1].shape[:-1])
    if rows == 1:
        return Choice("metal", "products with one row are a Metal kernel from 2.14 on")
    return Choice("graph", f"made of mm, which is MPSGraph, and sum ({OPERATIONS}/Linear.mm)")


def _copy(call: Call, host: Host) -> Choice[LaunchClass] | None:
    """Copy.mm, `mps_copy_`. Of an in-place copy the first operand is the target, of the others the result."""
    source, target = (call.inputs[1], call.inputs[0]) if call.base == "copy" else (call.inputs[0], call.results[0])
    if source.device != target.device:
        return Choice("blit", f"a copy from {source.device} to {target.device} ({OPERATIONS}/Copy.mm)")
    if not (source.dense and target.dense):
        return Choice("metal", f"a copy of strided memory ({OPERATIONS}/Copy.mm)")
    if source.dtype == target.dtype:
        return Choice("blit", f"a copy of dense memory ({OPERATIONS}/Copy.mm)")
    return Choice("metal", f"a copy to another dtype ({OPERATIONS}/Copy.mm)")


def _to_host(call: Call, host: Host) -> Choice[LaunchClass] | None:
    return Choice("blit", f"one number comes to the host, which waits for it ({OPERATIONS}/Scalar.mm)")


def _joined(call: Call, host: Host) -> Choice[LaunchClass] | None:
    """cat and stack before 2.14: Shape.mm, `cat_out_mps`."""
    if (
        not _given(call, 1)
        and len({each.dtype for each in call.inputs}) == 1
        and all(each.dense for each in call.inputs)
    ):
        return Choice("blit", f"dense tensors one behind the other ({OPERATIONS}/Shape.mm)")
    return Choice("metal", f"along another dimension, of several dtypes or strided ({OPERATIONS}/Shape.mm)")


def _convolution(call: Call, host: Host) -> Choice[LaunchClass] | None:
    """Convolution.mm: MPSGraph, but for large filters and for volumes, which have several ways, from 2.14 on.

    From 2.15 on one dimension is Metal's: where image and filter have a height of one, or none, and it is not padded.
    """
    sides = call.inputs[1].shape[2:]
    if host.release >= LINES and _is_line(call):
        return Choice("metal", f"along one dimension ({OPERATIONS}/Convolution.mm)")
    if host.release >= VECTORS and len(sides) == 3:
        return None
    if host.release >= VECTORS and any(side >= LARGE_FILTER for side in sides):
        return Choice("metal", f"a filter of {LARGE_FILTER} or more ({OPERATIONS}/Convolution.mm)")
    return Choice("graph", f"convolutions are MPSGraph ({OPERATIONS}/Convolution.mm)")


def _is_line(call: Call) -> bool:
    sizes, sides = call.inputs[0].shape[2:], call.inputs[1].shape[2:]
    if call.base != "_mps_convolution" and _given(call, 6):  # transposed: the gradient's graph
        return False
    padding = _given(call, 3 if call.base == "_mps_convolution" else 4)
    flat = sizes[0] == 1 == sides[0] and (padding[0] if isinstance(padding, tuple) else padding or 0) == 0
    return len(sides) == 1 or (len(sides) == 2 and flat)


def _convolution_backward(call: Call, host: Host) -> Choice[LaunchClass] | None:
    return Choice("graph", f"gradients of convolutions are MPSGraph ({OPERATIONS}/Convolution.mm)")


def _attention(call: Call, host: Host) -> Choice[LaunchClass] | None:
    """Attention.mm, `_scaled_dot_product_attention_math_mps`: kernels for a few queries, and others for many."""
    query, key, value = call.inputs[:3]
    width, causal, masks = query.shape[-1], bool(_given(call, 5)), {mask.dtype for mask in call.inputs[3:]}
    if width != value.shape[-1]:
        return Choice("graph", f"values of another width than queries ({OPERATIONS}/Attention.mm)")
    short, few = query.shape[-2] <= SHORT_QUERY, query.shape[-2] <= min(SHORT_QUERY, key.shape[-2])
    if not masks <= {"bool", query.dtype}:
        kernel = False
    else:
        kernel = (few and width in VECTOR_SIZES and not (causal and masks)) or (not short and width in PREFILL_SIZES)
    if kernel:
        return Choice("metal", f"attention of {query.shape[-2]} queries of {width} ({OPERATIONS}/Attention.mm)")
    return Choice("graph", f"no kernel takes {query.shape[-2]} queries of {width} so ({OPERATIONS}/Attention.mm)")


def _max_pool(call: Call, host: Host) -> Choice[LaunchClass] | None:
    """max_pool2d: MPSGraph where the windows move by one, as the code of the wheels has it (Pooling.mm)."""
    stride = _given(call, 2) or _given(call, 1)
    steps = stride if isinstance(stride, tuple) else (stride,)
    if all(step == 1 for step in steps):
        return Choice("graph", f"windows that move by one are MPSGraph ({OPERATIONS}/Pooling.mm)")
    return Choice("metal", f"windows that move by more than one ({OPERATIONS}/Pooling.mm)")


def _average_pool(call: Call, host: Host) -> Choice[LaunchClass] | None:
    """avg_pool2d: a Metal kernel with ceil_mode alone, as the code of the wheels has it (Pooling.mm)."""
    if _given(call, 4):
        return Choice("metal", f"with ceil_mode ({OPERATIONS}/Pooling.mm)")
    return Choice("graph", f"without ceil_mode ({OPERATIONS}/Pooling.mm)")


def _filled_and_copied(call: Call, host: Host) -> Choice[LaunchClass] | None:
    """The gradients of views: zeros, and a copy into a part of them (aten/src/ATen/native/TensorShape.cpp)."""
    return Choice("metal", "zeros, and a copy into a part of them")


def _safe_softmax(call: Call, host: Host) -> Choice[LaunchClass] | None:
    return Choice(
        "graph", "before 2.15: made of _softmax, which is MPSGraph, and of kernels for rows masked as a whole"
    )


RULES: Mapping[str, Rule] = {
    "mm": _product,
    "addmm": _product,
    "bmm": _batched,
    "baddbmm": _batched,
    "addbmm": _batched,
    "linear": _linear,
    "linear_backward": _linear_backward,
    **dict.fromkeys(("copy", "clone", "_to_copy", "_copy_from", "_copy_from_and_resize"), _copy),
    "_local_scalar_dense": _to_host,
    "cat": _joined,
    "stack": _joined,
    **dict.fromkeys(("convolution", "_convolution", "_mps_convolution"), _convolution),
    **dict.fromkeys(("convolution_backward", "mps_convolution_transpose_backward"), _convolution_backward),
    "_scaled_dot_product_attention_math_for_mps": _attention,
    "max_pool2d": _max_pool,
    "max_pool2d_with_indices": _max_pool,
    **dict.fromkeys(("avg_pool2d", "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward"), _average_pool),
    "_safe_softmax": _safe_softmax,
    **dict.fromkeys(("select_backward", "slice_backward", "diagonal_backward"), _filled_and_copied),
}
