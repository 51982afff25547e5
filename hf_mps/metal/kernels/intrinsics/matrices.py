"""Matrices of 8 x 8 elements that a simdgroup holds together, two elements a lane.

A lane's value is declared as a vector of 64; kernels read and write its first two elements (Metal's thread_elements),
and those alone carry meaning here. With q = lane / 4, a lane holds row (q & 4) + (lane / 2) % 4, columns (q & 2) * 2
+ (lane % 2) * 2 and the next (the layout that MLX relies on, mlx/backend/metal/kernels/steel/gemm/mma.h). Load, store
and init are the lane's own work; the product crosses lanes: each element is C's plus the eight products in order,
fused, in float.
"""

import re

from hf_mps.metal.kernels.intrinsics.body import Body, Definition, Value, llvm_type, scalar_of
from hf_mps.metal.kernels.intrinsics.conversions import widened
from hf_mps.metal.kernels.intrinsics.simd import Lanes, alignment

_FLOAT = r"v(?:64|2)(?:bf16|f16|f32)"
_INIT = re.compile(rf"air\.simdgroup_matrix_8x8_init_(diag|filled)\.({_FLOAT})\.(bf16|f16|f32)")
_LOAD = re.compile(rf"air\.simdgroup_matrix_8x8_load\.({_FLOAT})\.p([13])(bf16|f16|f32)")
_STORE = re.compile(rf"air\.simdgroup_matrix_8x8_store\.({_FLOAT})\.p([13])(bf16|f16|f32)")
_PRODUCT = re.compile(rf"air\.simdgroup_matrix_8x8_multiply_accumulate\.({_FLOAT})\.({_FLOAT})\.({_FLOAT})\.({_FLOAT})")


def define(name: str) -> Definition | None:
    """The definition of a load, store or init."""
    if found := _INIT.fullmatch(name):
        kind = llvm_type(found[2])
        diagonal = found[1] == "diag"
        body = Body(name, kind, scalar_of(kind))
        x = body.arguments[0]
        if not diagonal:
            return body.finish(_pair(body, kind, x, x))
        row, column = _place(body.lane())
        first, second = (row.compare("eq", at).select(x, 0.0) for at in (column, column + 1))
        return body.finish(_pair(body, kind, first, second))
    if found := _LOAD.fullmatch(name):
        return _load(name, llvm_type(found[1]), f"ptr addrspace({found[2]})")
    found = _STORE.fullmatch(name)
    return _store(name, llvm_type(found[1]), f"ptr addrspace({found[2]})") if found else None


def lanes(name: str) -> Definition | None:
    """The definition of multiply_accumulate."""
    found = _PRODUCT.fullmatch(name)
    if not found or found[1] != found[4] or not found[1].endswith("f32"):
        return None
    return _product(name, *(llvm_type(found[i]) for i in (2, 3, 4)))


def narrowed(text: str) -> str:
    """A kernel's IR with two elements a lane instead of 64; unchanged where it does more with them than take those two.

    Sixty-two of 64 elements mean nothing, and a lane that waits would carry all of them through memory.
    """
    lines = [line if line.startswith("!") else _narrowed_line(line) for line in text.splitlines()]
    if any(line is None for line in lines) or (" = type { <64 x " in text and "@llvm.memcpy" in text):
        return text
    return "\n".join(line for line in lines if line is not None) + "\n"


_WIDE = re.compile(r"<64 x (float|half|bfloat)>")
_SHUFFLE = re.compile(r"shufflevector <(\d+) x \w+> [^<]*<\d+ x \w+> [^<]*(<(\d+) x i32> <i32 (\w+), i32 (\w+)[^>]*>)")
_KNOWN = re.compile(
    r"^  %\S+ = (?:phi|load|extractelement|insertelement|select|freeze) .*|^  store .*|^%\S+ = type \{ <64 x \w+> \}$"
    r"|^(?:  (?:%\S+ = )?(?:tail )?call|declare) .*@air\.simdgroup_matrix_8x8_\w+\.[^ ]*\(.*"
)
# An element beyond the second, or a constant with all of them written out.
_OTHERS = re.compile(r"(?:extract|insert)element .*, i\d+ (?:[2-9]|\d\d+)\b|<(?:float|half|bfloat) ")


def _narrowed_line(line: str) -> str | None:
    if not _WIDE.search(line) and "<64 x i32>" not in line:
        return line
    shuffle = _SHUFFLE.search(line)
    if shuffle:
        first = int(shuffle[1])
        places = [int(place) if place.isdigit() else -1 for place in shuffle.group(4, 5)]
        if not all(place in (0, 1, first, first + 1) for place in places):
            return None
        kept = [place if place < first else place - first + 2 for place in places]
        line = line.replace(shuffle[2], f"<2 x i32> <i32 {kept[0]}, i32 {kept[1]}>")
    elif not _KNOWN.match(line) or _OTHERS.search(line):
        return None
    line = re.sub(r"(?<=, align )(?:256|128)\b", "4", _WIDE.sub(r"<2 x \1>", line))
    return re.sub(r"\.v64(?=b?f)", ".v2", line)


def _place(lane: Value) -> tuple[Value, Value]:
    """Row and first column of a lane's two elements."""
    quarter = lane >> 2
    return (quarter & 4) + ((lane >> 1) & 3), ((quarter & 2) << 1) + ((lane & 1) << 1)


def _pair(body: Body, kind: str, first: Value, second: Value) -> Value:
    value = body.emit(kind, f"insertelement {kind} poison, {first.kind} {first.name}, i32 0")
    return body.emit(kind, f"insertelement {kind} {value.name}, {second.kind} {second.name}, i32 1")


def _places(body: Body, pointer: str, scalar: str, first: int) -> list[Value]:
    """Where a lane's two elements lie; from `first` on: pointer, elements a row, origin (x, y), whether transposed."""
    base, stride, origin, transposed = body.arguments[first : first + 4]
    x, y = (body.emit("i64", f"extractelement <2 x i64> {origin.name}, i32 {i}") for i in (0, 1))
    row, column = (v.cast("zext", "i64") for v in _place(body.lane()))
    places = []
    for offset in (0, 1):
        at = column + offset
        down, across = transposed.select(at, row), transposed.select(row, at)
        index = (y + down) * stride + x + across
        places.append(body.emit(pointer, f"getelementptr {scalar}, {pointer} {base.name}, i64 {index.name}"))
    return places


def _load(name: str, kind: str, pointer: str) -> Definition:
    scalar = scalar_of(kind)
    body = Body(name, kind, pointer, "i64", "<2 x i64>", "i1")
    places = _places(body, pointer, scalar, 0)
    first, second = (body.emit(scalar, f"load {scalar}, {pointer} {place.name}") for place in places)
    return body.finish(_pair(body, kind, first, second))


def _store(name: str, kind: str, pointer: str) -> Definition:
    scalar = scalar_of(kind)
    body = Body(name, "void", kind, pointer, "i64", "<2 x i64>", "i1")
    for i, place in enumerate(_places(body, pointer, scalar, 1)):
        element = body.emit(scalar, f"extractelement {kind} %a0, i32 {i}")
        body.effect(f"store {scalar} {element.name}, {pointer} {place.name}")
    return body.finish()


def _product(name: str, left: str, right: str, total: str) -> Definition:
    body = Lanes(name, left, right, total, returns=total)
    matrices = [body.emit("ptr", "alloca [64 x float], align 32") for _ in range(4)]
    for i in range(32):
        for field, kind in enumerate(body.kinds):
            scalar = scalar_of(kind)
            pair = f"<2 x {scalar}>"
            source = body.emit("ptr", f"getelementptr {body.slot}, ptr %a0, i32 {i}, i32 {field}")
            loaded = widened(body.emit(pair, f"load {pair}, ptr {source.name}, align {alignment(scalar)}"))
            row, column = (i // 4 & 4) + i // 2 % 4, (i // 4 & 2) * 2 + i % 2 * 2
            target = body.emit("ptr", f"getelementptr float, ptr {matrices[field].name}, i32 {row * 8 + column}")
            body.effect(f"store <2 x float> {loaded.name}, ptr {target.name}, align 8")
    _multiply(body, matrices)

    def write(lane: Value) -> Value:
        row, column = _place(lane)
        source = body.emit("ptr", f"getelementptr float, ptr {matrices[3].name}, i32 {((row << 3) + column).name}")
        return body.emit("<2 x float>", f"load <2 x float>, ptr {source.name}, align 8")

    return body.each(write)


def _multiply(body: Lanes, matrices: list[Value]) -> None:
    """Row by row: matrix 3 becomes matrix 0 times matrix 1 plus matrix 2."""
    a, b, c, d = matrices

    def row_of(matrix: Value, row: int) -> Value:
        place = body.emit("ptr", f"getelementptr float, ptr {matrix.name}, i32 {row * 8}")
        return body.emit("<8 x float>", f"load <8 x float>, ptr {place.name}, align 32")

    right = [row_of(b, k) for k in range(8)]
    for i in range(8):
        left, total = row_of(a, i), row_of(c, i)
        for k in range(8):
            mask = ", ".join([f"i32 {k}"] * 8)
            spread = body.emit(
                "<8 x float>", f"shufflevector <8 x float> {left.name}, <8 x float> poison, <8 x i32> <{mask}>"
            )
            total = body.fma(spread, right[k], total)
        place = body.emit("ptr", f"getelementptr float, ptr {d.name}, i32 {i * 8}")
        body.effect(f"store <8 x float> {total.name}, ptr {place.name}, align 32")
