"""What an operator's call launches on a Mac, by release: kernels, MPSGraphs, copies, in their order.

`launch_classes.json` holds what scripts/tools/launch_classes.py read from the code of each release's macOS wheel
(launch_class_reader.py beside it). Where the host has several ways, RULES decides by dtype, shape and layout, as
PyTorch's sources do: each rule names its source, as of 2.13.0 and 2.14.1 (what 2.15.0 does otherwise was read from its
wheel's code). PARTS says what a call encodes where that is more than one launch; these rules were compared with the
calls that the functions of the three wheels make. An MPSGraph is one launch here: how many kernels Apple's framework
encodes for it is not known. `PYTORCH_MPS_PREFER_METAL`, which changes the products, is not set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, prod
from pathlib import Path
from typing import Literal

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, brief
from hf_mps.core.releases import numbers
from hf_mps.metal.operators.dispatcher import MADE_OF_OTHERS

LaunchClass = Literal["metal", "graph", "framework", "blit", "mixed", "cpu", "view", "unknown"]
CLASSES: dict[LaunchClass, str] = {
    "metal": "PyTorch's own Metal kernel",
    "graph": "an MPSGraph, compiled once for each shape",
    "framework": "a kernel of Apple's Metal Performance Shaders",
    "blit": "a copy, which no kernel makes",
    "mixed": "the host decides between several of these",
    "cpu": "no Metal kernel: the CPU runs it",
    "view": "nothing: a view, or memory alone",
    "unknown": "another library's operator, or none of that release",
}
LAUNCHED: tuple[LaunchClass, ...] = ("metal", "graph", "framework", "mixed")
"""The classes that compute on the GPU; a blit copies there."""
FACTS = Path(__file__).with_name("launch_classes.json")
ABSENT = "-"


@dataclass(frozen=True)
class Operand:
    """A tensor of a call: `dtype` as in "float32", `device` as in "mps"; `dense` is whether it is contiguous."""

    dtype: str
    shape: tuple[int, ...]
    dense: bool = True
    device: str = "mps"


@dataclass(frozen=True)
class Call:
    """One call of an operator ("aten::add.Tensor").

    `arguments` are its positional ones, as far as they were given: a whole number, a bool, a tuple of those, or None in
    place of anything else. `lists` are the lengths of the lists of tensors among them, whose tensors are in `inputs`.
    """

    operator: str
    inputs: tuple[Operand, ...] = ()
    results: tuple[Operand, ...] = ()
    arguments: tuple[int | tuple[int, ...] | None, ...] = ()
    lists: tuple[int, ...] = ()

    @property
    def base(self) -> str:
        """The operator's name without namespace and overload, and without an in-place form's underscore."""
        name = self.operator.partition("::")[2].partition(".")[0]
        return name.rstrip("_") or name

    @property
    def graph(self) -> tuple[object, ...]:
        """What one compiled graph serves: the operator with its inputs' dtypes and shapes."""
        return (self.operator, *((each.dtype, each.shape) for each in self.inputs))


COMPILED = "metal::"
"""What the name of a launch begins with whose kernel is no operator's: a function of a compiled Metal library."""


class LaunchTable:
    """The launch classes of one release: a column of `launch_classes.json`, whose names mean all unlisted overloads.

    `operators` maps "mm" or "add.Tensor" to "metal", or to several classes as "graph+metal"; `macos` is the system that
    the host asks for in places.
    """

    def __init__(self, release: str, operators: Mapping[str, str], *, macos: tuple[int, int] = (15, 0)) -> None:
        self.release, self._operators, self.macos = release, operators, macos
        self.version = numbers(release)

    def ways(self, operator: str) -> tuple[str, ...]:
        """Return every class that calls of "aten::mm" may have; empty where the release has no such operator."""
        namespace, _, name = operator.partition("::")
        base, _, overload = name.partition(".")
        for key in (f"{base}.{overload}", base) if namespace == "aten" else ():
            if key in self._operators:
                return tuple(filter(None, self._operators[key].replace(ABSENT, "").split("+")))
        return ()

    def names(self) -> set[str]:
        """The operators that the table lists, of some releases without those overloads that are as the others."""
        return {f"aten::{name.rstrip('.')}" for name in self._operators}

    def of(self, call: Call) -> Choice[LaunchClass]:
        """Return the class of a call, and why."""
        ways = self.ways(call.operator)
        if call.operator.startswith(COMPILED):
            return Choice("metal", "somebody's own kernel, by torch.mps.compile_shader")
        if call.operator in MADE_OF_OTHERS:
            return Choice("mixed", "made of other operators")
        if not ways:
            return Choice("unknown", CLASSES["unknown"])
        if len(ways) == 1:
            only: LaunchClass = ways[0]  # type: ignore[assignment]
            return Choice(only, CLASSES[only])
        rule = RULES.get(call.base)
        if isinstance(rule, Choice):
            return rule
        with suppress(IndexError, ValueError):  # called with fewer tensors than the rule knows of
            ruled = rule(call, self) if rule is not None else None
            if ruled is not None:
                return ruled
        return Choice("mixed", f"the host decides: {', '.join(ways)}")

    def encoded(self, call: Call) -> tuple[LaunchClass, ...]:
        """The class of each dispatch, graph and blit that the host encodes for a call, in order; empty for a view."""
        return _encoded(call, self)


def known() -> tuple[str, ...]:
    """Return the releases in the table, oldest first."""
    return tuple(_facts()["releases"])


def table(release: str, *, macos: tuple[int, int] = (15, 0)) -> LaunchTable | None:
    """Return the classes of a release in the table ("2.13.0", or "2.13.0+cpu"), None for another.

    `macos` is the system that its host asks for in places.
    """
    # Releases alone, a build's label aside: what a pre-release or a nightly launches is not in the table.
    if not re.fullmatch(r"\d+(\.\d+)*(\.post\d+)?(\+.*)?", release):
        return None
    name = ".".join(map(str, (*numbers(release), 0, 0)[:3]))
    if name not in known():
        return None
    return LaunchTable(name, _column(name), macos=macos)


def of_release(release: str, *, macos: tuple[int, int] = (15, 0)) -> LaunchTable:
    """Return the classes of a release in the table. Raises UserError, with the releases that are in it, for another."""
    if (found := table(release, macos=macos)) is None:
        raise UserError(
            f"what torch {brief(release)} launches on a Mac is not known; known: {', '.join(known())}; next: in a "
            "checkout of hf_mps, python scripts/tools/launch_classes.py WHEEL"
        )
    return found


def nearest(release: str, *, macos: tuple[int, int] = (15, 0)) -> LaunchTable:
    """Return the classes of the newest release in the table that is no newer than `release`, or of the oldest."""
    name = [known()[0], *(each for each in known() if numbers(each) <= numbers(release))][-1]
    return LaunchTable(name, _column(name), macos=macos)


@lru_cache(maxsize=1)
def _facts() -> dict[str, dict[str, str]]:
    content: dict[str, dict[str, str]] = json.loads(FACTS.read_text(encoding="utf-8"))
    return content


@lru_cache(maxsize=8)
def _column(release: str) -> dict[str, str]:
    place = known().index(release)
    return {name: classes.split()[place] for classes, names in _facts()["classes"].items() for name in names.split()}


OPERATIONS = "aten/src/ATen/native/mps/operations"
VECTORS = (2, 14)
"""The release whose products with one row or column have a Metal kernel of their own, and whose cat has one way."""
LINES = (2, 15)
"""The release that has Metal kernels for convolutions along one dimension (pytorch pull request 193021)."""
TILED = 2**32
BATCHED = ("bmm", "baddbmm", "addbmm")
COMPLEX_INNER = 2048
"""Inner size of complex matrices up to which MPSGraph's product is right (pytorch#167727)."""
LARGE_FILTER = 256
SHORT_QUERY = 8
VECTOR_SIZES = (64, 96, 128, 256)
TILES = dict.fromkeys((32, 64, 72, 80, 96), (32, 32, 4)) | {128: (32, 16, 4), 256: (16, 8, 2)}
"""The sizes of a head that attention has kernels for: those of few queries, and those of many with the queries and keys
of a tile, and the simdgroups of a threadgroup."""


Decision = Callable[["Call", LaunchTable], "Choice[LaunchClass] | None"]


def _given(call: Call, place: int) -> int | tuple[int, ...] | None:
    """Return an argument of a call, or None where it was not given or is no number."""
    return call.arguments[place] if place < len(call.arguments) else None


def _tuple(given: int | tuple[int, ...] | None) -> tuple[int | None, ...]:
    return given if isinstance(given, tuple) else (given,)


def _whole(operand: Operand) -> bool:
    return operand.dtype.startswith(("int", "uint", "bool"))


def _product(call: Call, host: LaunchTable) -> Choice[LaunchClass] | None:
    """mm and addmm, after `use_metal_mm` in LinearAlgebra.mm; the operands are the last two.

    bmm, baddbmm and addbmm: `bmm_out_mps_impl`.
    """
    left, right = call.inputs[-2:]
    if _whole(left):
        return Choice("metal", f"products of {left.dtype} are a Metal kernel ({OPERATIONS}/LinearAlgebra.mm)")
    if call.base in BATCHED:
        if call.base == "bmm" and left.shape[0] * left.shape[1] * right.shape[-1] > TILED:
            return Choice("framework", "a result of more than 2^32 elements is made in tiles by MPSNDArray")
        return Choice("graph", f"batched products of {left.dtype} are MPSGraph ({OPERATIONS}/LinearAlgebra.mm)")
    if left.dtype.startswith("complex") and left.shape[-1] > COMPLEX_INNER:
        return Choice("metal", f"complex products over more than {COMPLEX_INNER} are a Metal kernel")
    if host.version >= VECTORS and (left.shape[0] == 1 or right.shape[-1] == 1):
        return Choice("metal", "products with one row or column are a Metal kernel from 2.14 on")
    return Choice("graph", f"products of {left.dtype} matrices are MPSGraph ({OPERATIONS}/LinearAlgebra.mm)")


def _linear(call: Call, host: LaunchTable) -> Choice[LaunchClass] | None:
    """Linear.mm: without a graph where all operands are dense and real, from macOS 15 on."""
    if host.macos < (15, 0):
        return Choice("graph", f"before macOS 15 ({OPERATIONS}/Linear.mm)")
    if any(each.dtype.startswith("complex") for each in call.inputs):
        return Choice("graph", f"complex operands ({OPERATIONS}/Linear.mm)")
    if all(each.dense for each in call.inputs):
        return Choice("framework", f"MPSNDArrayMatrixMultiplication: its operands are dense ({OPERATIONS}/Linear.mm)")
    return Choice("graph", f"an operand is not contiguous ({OPERATIONS}/Linear.mm)")


def _linear_backward(call: Call, host: LaunchTable) -> Choice[LaunchClass] | None:
    """From 2.14 on it calls mm, and sum for the bias (Linear.mm)."""
    if prod(call.inputs[1].shape[:-1]) == 1:
        return Choice("metal", "products with one row are a Metal kernel from 2.14 on")
    return Choice("graph", f"made of mm, which is MPSGraph, and sum ({OPERATIONS}/Linear.mm)")


def _copy(call: Call, host: LaunchTable) -> Choice[LaunchClass] | None:
    """Copy.mm, `mps_copy_`. Of an in-place copy the first operand is the target, of the others the result."""
    source, target = (call.inputs[1], call.inputs[0]) if call.base == "copy" else (call.inputs[0], call.results[0])
    if source.device != target.device:
        return Choice("blit", f"a copy from {source.device} to {target.device} ({OPERATIONS}/Copy.mm)")
    if not (source.dense and target.dense):
        return Choice("metal", f"a copy of strided memory ({OPERATIONS}/Copy.mm)")
    if source.dtype == target.dtype:
        return Choice("blit", f"a copy of dense memory ({OPERATIONS}/Copy.mm)")
    return Choice("metal", f"a copy to another dtype ({OPERATIONS}/Copy.mm)")


def _cat(call: Call, host: LaunchTable) -> Choice[LaunchClass] | None:
    """cat and stack before 2.14: Shape.mm, `cat_out_mps`."""
    alike = len({each.dtype for each in call.inputs}) == 1 and all(each.dense for each in call.inputs)
    if alike and not _given(call, 1):
        return Choice("blit", f"dense tensors one behind the other ({OPERATIONS}/Shape.mm)")
    return Choice("metal", f"along another dimension, of several dtypes or strided ({OPERATIONS}/Shape.mm)")


def _convolution(call: Call, host: LaunchTable) -> Choice[LaunchClass] | None:
    """Convolution.mm: MPSGraph, but for large filters and for volumes, which have several ways, from 2.14 on.

    From 2.15 on one dimension is Metal's: where image and filter have a height of one, or none, and it is not padded.
    """
    sides = call.inputs[1].shape[2:]
    if host.version >= LINES and _is_line(call):
        return Choice("metal", f"along one dimension ({OPERATIONS}/Convolution.mm)")
    if host.version >= VECTORS and len(sides) == 3:
        return None
    if host.version >= VECTORS and any(side >= LARGE_FILTER for side in sides):
        return Choice("metal", f"a filter of {LARGE_FILTER} or more ({OPERATIONS}/Convolution.mm)")
    return Choice("graph", f"convolutions are MPSGraph ({OPERATIONS}/Convolution.mm)")


def _is_line(call: Call) -> bool:
    sizes, sides = call.inputs[0].shape[2:], call.inputs[1].shape[2:]
    if call.base != "_mps_convolution" and _given(call, 6):  # transposed: the gradient's graph
        return False
    padding = _tuple(_given(call, 3 if call.base == "_mps_convolution" else 4) or 0)
    flat = sizes[0] == 1 == sides[0] and padding[0] == 0
    return len(sides) == 1 or (len(sides) == 2 and flat)


def _attention(call: Call, host: LaunchTable) -> Choice[LaunchClass] | None:
    """Attention.mm, `_scaled_dot_product_attention_math_mps`: kernels for a few queries, and others for many."""
    query, key, value = call.inputs[:3]
    width, causal, masks = query.shape[-1], bool(_given(call, 5)), {mask.dtype for mask in call.inputs[3:]}
    if width != value.shape[-1]:
        return Choice("graph", f"values of another width than queries ({OPERATIONS}/Attention.mm)")
    short, few = query.shape[-2] <= SHORT_QUERY, query.shape[-2] <= min(SHORT_QUERY, key.shape[-2])
    fits = (few and width in VECTOR_SIZES and not (causal and masks)) or (not short and width in TILES)
    if fits and masks <= {"bool", query.dtype}:
        return Choice("metal", f"attention of {query.shape[-2]} queries of {width} ({OPERATIONS}/Attention.mm)")
    return Choice("graph", f"no kernel takes {query.shape[-2]} queries of {width} so ({OPERATIONS}/Attention.mm)")


def _max_pool(call: Call, host: LaunchTable) -> Choice[LaunchClass] | None:
    """max_pool2d: MPSGraph where the windows move by one, as the code of the wheels has it (Pooling.mm)."""
    if {*_tuple(_given(call, 2) or _given(call, 1))} == {1}:
        return Choice("graph", f"windows that move by one are MPSGraph ({OPERATIONS}/Pooling.mm)")
    return Choice("metal", f"windows that move by more than one ({OPERATIONS}/Pooling.mm)")


def _average_pool(call: Call, host: LaunchTable) -> Choice[LaunchClass] | None:
    """avg_pool2d: a Metal kernel with ceil_mode alone, as the code of the wheels has it (Pooling.mm)."""
    if _given(call, 4):
        return Choice("metal", f"with ceil_mode ({OPERATIONS}/Pooling.mm)")
    return Choice("graph", f"without ceil_mode ({OPERATIONS}/Pooling.mm)")


RULES: Mapping[str, Decision | Choice[LaunchClass]] = {
    **dict.fromkeys(("mm", "addmm", *BATCHED), _product),
    "linear": _linear,
    "linear_backward": _linear_backward,
    **dict.fromkeys(("copy", "clone", "_to_copy", "_copy_from", "_copy_from_and_resize"), _copy),
    "_local_scalar_dense": Choice("blit", f"one number comes to the host, which waits for it ({OPERATIONS}/Scalar.mm)"),
    **dict.fromkeys(("cat", "stack"), _cat),
    **dict.fromkeys(("convolution", "_convolution", "_mps_convolution"), _convolution),
    **dict.fromkeys(
        ("convolution_backward", "mps_convolution_transpose_backward"),
        Choice("graph", f"gradients of convolutions are MPSGraph ({OPERATIONS}/Convolution.mm)"),
    ),
    "_scaled_dot_product_attention_math_for_mps": _attention,
    **dict.fromkeys(("max_pool2d", "max_pool2d_with_indices"), _max_pool),
    **dict.fromkeys(("avg_pool2d", "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward"), _average_pool),
    "_safe_softmax": Choice(
        "graph", "before 2.15: made of _softmax, which is MPSGraph, and of kernels for rows masked as a whole"
    ),
    # aten/src/ATen/native/TensorShape.cpp
    **dict.fromkeys(
        ("select_backward", "slice_backward", "diagonal_backward"),
        Choice("metal", "zeros, and a copy into a part of them"),
    ),
}


CHUNK, GROUPS, TENSORS = 65536, 32, 32
"""Elements that a threadgroup does, and the threadgroups and tensors of a dispatch at most (MultiTensorApply.h)."""

Parts = tuple["LaunchClass", ...]


@lru_cache(maxsize=65536)
def _encoded(call: Call, table: LaunchTable) -> Parts:
    """Return the classes of all that a call encodes, in order; nothing of a view or a call of the CPU."""
    kind, rule = table.of(call).value, PARTS.get(call.base)
    if kind in ("view", "cpu"):
        return ()
    if call.base.startswith("_foreach") and call.lists:
        return (kind,) * call.lists[0]  # native/ForeachOpsKernels.cpp loops: Metal has no kernels for lists, as of 2.15
    try:
        return (kind,) if rule is None else rule(call, kind, table)
    except (IndexError, TypeError, ValueError):  # called with fewer arguments than the rule knows of
        return (kind,)


def encoders(sequence: Iterable[Parts]) -> int:
    """Return how many command encoders some calls need, one after the other (aten/src/ATen/mps/MPSStream.mm).

    Kernels share one until something else ends it: a graph, which makes its own, or a blit; the blits of one call share
    theirs. MPSNDArrayMatrixMultiplication begins one, which the kernels after it use (Linear.mm).
    """
    count, computing = 0, False
    for parts in sequence:
        before: LaunchClass | None = None
        for kind in parts:
            shared = computing if kind == "metal" else kind == before == "blit"
            count += not shared
            computing, before = kind in ("metal", "framework"), kind
    return count


@dataclass
class Batch:
    """One dispatch: the numbers of its tensors in their list, and each threadgroup's (tensor of these, chunk of it)."""

    tensors: list[int] = field(default_factory=list)
    chunks: list[tuple[int, int]] = field(default_factory=list)


def batches(sizes: Iterable[int], *, alone: bool = False) -> Iterator[Batch]:
    """The dispatches for tensors of so many elements (MultiTensorApply.h); with `alone` none serves two of them.

    A tensor that does not fit its dispatch goes on in the next one, as that one's first. Empty ones are left out.
    """
    batch = Batch()
    for number, size in enumerate(sizes):
        last = ceil(size / CHUNK) - 1
        for chunk in range(last + 1):
            if number not in batch.tensors[-1:]:  # its first chunk, or the first of a new dispatch
                batch.tensors.append(number)
            batch.chunks.append((len(batch.tensors) - 1, chunk))
            if len(batch.chunks) == GROUPS or (chunk == last and (alone or len(batch.tensors) == TENSORS)):
                yield batch
                batch = Batch()
    if batch.chunks:
        yield batch


def multi_tensor(sizes: Iterable[int], *, alone: bool = False) -> int:
    """Return the number of `batches`, without going through their chunks: an optimizer of billions has millions."""
    found = chunks = tensors = 0
    for size in filter(None, sizes):
        full, chunks = divmod(chunks + ceil(size / CHUNK), GROUPS)
        tensors = tensors + 1 if not full else min(1, chunks)
        found += full
        if chunks and (alone or tensors == TENSORS):
            found, chunks, tensors = found + 1, 0, 0
    return found + bool(chunks)


def _class(table: LaunchTable, operator: str, call: Call) -> LaunchClass:
    return table.of(replace(call, operator=f"aten::{operator}")).value


def _first_list(call: Call) -> Sequence[Operand]:
    return call.inputs[: call.lists[0]]


def _sizes(operands: Iterable[Operand]) -> list[int]:
    return [prod(each.shape) for each in operands]


def _unscaled(call: Call, kind: LaunchClass, table: LaunchTable) -> Parts:
    """Amp.mm: dense gradients chunk by chunk, others by a kernel for each."""
    grads = _first_list(call)
    dense = multi_tensor(_sizes(each for each in grads if each.dense), alone=True)
    return (kind,) * (dense + sum(not each.dense for each in grads))


def _gradients(call: Call, kind: LaunchClass, table: LaunchTable) -> Parts:
    """Linear.mm, Convolution.mm: one for the input, one for the weight; the bias's is a sum.

    Before 2.14 that sum is in the graph of a linear layer's weight, which is run for either of the two.
    """
    mask = call.arguments[-1]
    of_input, of_weight, *of_bias = mask if isinstance(mask, tuple) else (1, 1, 1)
    linear, bias = call.base == "linear_backward", any(of_bias)
    products = (kind,) * (of_input + (of_weight or (linear and bias)))
    apart = bias and not (linear and table.version < VECTORS)
    return (*products, _class(table, "sum.dim_IntList", call)) if apart else products


def _copied(call: Call, kind: LaunchClass, table: LaunchTable) -> Parts:
    """Copy.mm: between host and device a blit; a strided or other dtype's is brought into shape on the device."""
    source, target = (call.inputs[1], call.inputs[0]) if call.base == "copy" else (call.inputs[0], call.results[0])
    if source.device == target.device:
        return (kind,)
    if target.device == "mps":
        return (kind,) if target.dense else (kind, "metal")
    return (kind,) if source.dtype == target.dtype and source.dense else ("metal", kind)


def _zeros_and_copy(call: Call, kind: LaunchClass, table: LaunchTable) -> Parts:
    """aten/src/ATen/native/TensorShape.cpp: zeros, and a copy into a part of them, which is dense in the first rows."""
    dim, *step = (each for each in call.arguments[2:6:3] if isinstance(each, int))
    result = call.results[0].shape
    ahead = prod(result[: dim % len(result)])
    dense = ahead == 1 and call.inputs[0].dense and call.base != "diagonal_backward" and step in ([], [1])
    return ("metal", "blit" if dense else "metal")


def _made_safe(call: Call, kind: LaunchClass, table: LaunchTable) -> Parts:
    """aten/src/ATen/native/transformers/attention.cpp, `_safe_softmax`."""
    made_of = ("_softmax", "isneginf", "all.dim", "scalar_tensor", "where.self")
    return tuple(_class(table, operator, call) for operator in made_of)


PARTS: Mapping[str, Callable[[Call, LaunchClass, LaunchTable], Parts]] = {
    # Shape.mm, `cat_out_mps`: a dispatch, or a blit, for each input that is not empty (pytorch#188198).
    **dict.fromkeys(("cat", "stack"), lambda call, kind, _: (kind,) * sum(map(bool, _sizes(_first_list(call))))),
    **dict.fromkeys(
        ("_fused_adam", "_fused_adamw", "_fused_sgd"),
        lambda call, kind, _: (kind,) * multi_tensor(_sizes(_first_list(call))),
    ),
    "_amp_foreach_non_finite_check_and_unscale": _unscaled,
    **dict.fromkeys(("linear_backward", "convolution_backward"), _gradients),
    **dict.fromkeys(("mps_convolution_backward", "mps_convolution_transpose_backward"), _gradients),
    # native/Embedding.cpp: numbers that are not dense, as expanded positions, are laid out first.
    "embedding": lambda call, kind, _: (kind,) if call.inputs[1].dense else ("metal", kind),
    # Embedding.mm: zeros, and a kernel that adds to them.
    "embedding_dense_backward": lambda call, kind, _: ("metal", kind) if kind == "metal" else (kind,),
    **dict.fromkeys(("copy", "clone", "_to_copy", "_copy_from", "_copy_from_and_resize"), _copied),
    **dict.fromkeys(("select_backward", "slice_backward", "diagonal_backward"), _zeros_and_copy),
    "_safe_softmax": _made_safe,
}
"""Operators whose calls may encode more than one of their class, or several classes."""
