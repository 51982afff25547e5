"""Operations across the lanes of a simdgroup (32 lanes) or a quad (4): one function runs for all lanes that wait there.

`define internal void @lanes.NAME(ptr %in, ptr %out, i32 %mask)`: `in` points to 32 structs of the arguments, `out` to
32 results; bit i of `mask` says that lane i is active. Only active lanes' arguments count and only their results are
written.

- Reductions join lanes i and i + 16, then i + 8, 4, 2, 1: a fixed order, whatever the mask; inactive lanes hold the
  neutral element.
- min and max of floats take the other value where one is NaN.
- Prefix sums run from lane 0 upward.
- A shuffle from an inactive lane, or from a lane outside of the simdgroup, is undefined in Metal and gives 0 here.
- shuffle_up and shuffle_down leave the lanes at the end as they are; rotate wraps around.
- shuffle_and_fill_up(data, filling, delta, modulo) shifts within vectors of `modulo` lanes and takes the upper
  `delta` lanes of the filling's vector for the lower ones; fill_down mirrors it (Metal Shading Language
  specification, SIMD-group functions).

Matrices of 8 x 8 elements that a simdgroup holds together, two elements a lane.

A lane's value is declared as a vector of 64; kernels read and write its first two elements (Metal's thread_elements),
and those alone carry meaning here. With q = lane / 4, a lane holds row (q & 4) + (lane / 2) % 4, columns (q & 2) * 2
+ (lane % 2) * 2 and the next (the layout that MLX relies on, mlx/backend/metal/kernels/steel/gemm/mma.h). Load, store
and init are the lane's own work; the product crosses lanes: each element is C's plus the eight products in order,
fused, in float.
"""

import math
import re
from collections.abc import Callable
from functools import cache

from hf_mps.metal.kernels.intrinsics.body import TYPE, Body, Definition, Value, bits_of, bytes_of, llvm_type, scalar_of
from hf_mps.metal.kernels.intrinsics.conversions import widened
from hf_mps.metal.kernels.intrinsics.integers import SIMDGROUP

_GROUP = r"air\.(simd|quad)_"
_REDUCTION = re.compile(
    rf"{_GROUP}(prefix_inclusive_|prefix_exclusive_)?(sum|product|min|max|and|or|xor)\.(?:([su])\.)?({TYPE})"
)
_SHUFFLE = re.compile(
    rf"{_GROUP}(shuffle|shuffle_xor|shuffle_up|shuffle_down|shuffle_rotate_up|shuffle_rotate_down|broadcast)\.(?:[su]\.)?({TYPE})"
)
_FILL = re.compile(rf"{_GROUP}shuffle_and_fill_(up|down)\.(?:[su]\.)?({TYPE})")
_VOTE = re.compile(rf"{_GROUP}(any|all|is_first)")


@cache
def lanes(name: str) -> Definition | None:
    """The definition of an intrinsic that crosses lanes, run once for a simdgroup; None for any other name.

    `void @lanes.NAME(ptr in, ptr out, i32 mask)`: `in` has a struct of the arguments for each of the 32 lanes, `out`
    a result for each.
    """
    if found := _REDUCTION.fullmatch(name):
        group, prefix, operation, sign, suffix = found.groups()
        kind = llvm_type(suffix)
        if kind.startswith("<") or (sign is None) == kind.startswith("i"):
            return None
        if prefix:
            return _prefix(name, kind, operation, inclusive="inclusive" in prefix) if group == "simd" else None
        return _reduction(name, kind, operation, sign == "u", width_of(group))
    if found := _SHUFFLE.fullmatch(name):
        return _shuffle(name, llvm_type(found[3]), found[2], width_of(found[1]))
    if found := _FILL.fullmatch(name):
        return _fill(name, llvm_type(found[3]), found[2])
    if found := _VOTE.fullmatch(name):
        return _vote(name, found[2], width_of(found[1]))
    found = _PRODUCT.fullmatch(name)
    if not found or found[1] != found[4] or not found[1].endswith("f32"):
        return None
    return _product(name, *(llvm_type(found[i]) for i in (2, 3, 4)))


def width_of(group: str) -> int:
    """Lanes of a group: 32 of a simdgroup, 4 of a quad."""
    return SIMDGROUP if group == "simd" else 4


class Lanes(Body):
    """The body of a cross-lane definition, with a loop over the active lanes at its end."""

    def __init__(self, name: str, *arguments: str, returns: str) -> None:
        super().__init__(f"lanes.{name}", "void", "ptr", "ptr", "i32")
        self.slot, self.result = f"{{ {', '.join(arguments)} }}", returns
        self.kinds = arguments

    def argument(self, lane: Value, field: int = 0) -> Value:
        """Argument `field` of a lane."""
        place = self.emit("ptr", f"getelementptr {self.slot}, ptr %a0, i32 {lane.name}, i32 {field}")
        kind = self.kinds[field]
        return self.emit(kind, f"load {kind}, ptr {place.name}, align {alignment(kind)}")

    def active(self, lane: Value) -> Value:
        """Whether a lane, 0 to 31, is active."""
        return ((self.arguments[2] >> lane) & 1).compare("ne", 0)

    def each(self, write: Callable[[Value], Value]) -> Definition:
        """Ends the function with a loop that writes `write(lane)` for each active lane."""
        self.effect("br label %head\nhead:")
        self.effect("%lane = phi i32 [ 0, %0 ], [ %next, %tail ]")
        lane = Value(self, "i32", "%lane")
        active = self.active(lane)
        self.effect(f"br i1 {active.name}, label %work, label %tail\nwork:")
        result = write(lane)
        place = self.emit("ptr", f"getelementptr {self.result}, ptr %a1, i32 %lane")
        self.effect(f"store {result.kind} {result.name}, ptr {place.name}, align {alignment(result.kind)}")
        self.effect("br label %tail\ntail:")
        self.effect(f"%next = add i32 %lane, 1\n  %done = icmp eq i32 %next, {SIMDGROUP}")
        self.effect("br i1 %done, label %exit, label %head\nexit:")
        return self.finish(attributes="nounwind")


def alignment(kind: str) -> int:
    """What may be relied on at a slot's member: the element's own alignment."""
    return bytes_of(scalar_of(kind))


def _neutral(kind: str, operation: str, unsigned: bool) -> float:
    """What changes nothing: for min and max of floats it is NaN, which they pass over."""
    if not kind.startswith("i"):
        # 0.0 would make 0.0 of a sum of -0.0.
        return {"sum": -0.0, "product": 1.0}.get(operation, math.nan)
    width = bits_of(kind)
    lowest, highest = (0, (1 << width) - 1) if unsigned else (-1 << (width - 1), (1 << (width - 1)) - 1)
    return {"sum": 0, "product": 1, "min": highest, "max": lowest, "and": -1, "or": 0, "xor": 0}[operation]


def _join(a: Value, b: Value, operation: str, unsigned: bool) -> Value:
    if operation in ("min", "max"):
        if not scalar_of(a.kind).startswith("i"):
            return a.body.llvm(f"{operation}num", a, b)
        return a.body.llvm(("u" if unsigned else "s") + operation, a, b)
    return {"sum": a.__add__, "product": a.__mul__, "and": a.__and__, "or": a.__or__, "xor": a.__xor__}[operation](b)


def _reduction(name: str, kind: str, operation: str, unsigned: bool, width: int) -> Definition:
    body = Lanes(name, kind, returns=kind)
    everything = f"<{SIMDGROUP} x {kind}>"
    values = body.emit(everything, f"load {everything}, ptr %a0, align {alignment(kind)}")
    active = body.emit(f"<{SIMDGROUP} x i1>", f"bitcast i32 %a2 to <{SIMDGROUP} x i1>")
    values = active.select(values, _neutral(kind, operation, unsigned))
    stride = width // 2
    while stride:
        # lane i meets lane i ^ stride, so that each lane ends with its own group's result
        order = ", ".join(f"i32 {i ^ stride}" for i in range(SIMDGROUP))
        other = body.emit(
            everything, f"shufflevector {everything} {values.name}, {everything} poison, <{SIMDGROUP} x i32> <{order}>"
        )
        values = _join(values, other, operation, unsigned)
        stride //= 2
    before = body.emit(everything, f"load {everything}, ptr %a1, align {alignment(kind)}")
    after = active.select(values, before)
    body.effect(f"store {everything} {after.name}, ptr %a1, align {alignment(kind)}")
    return body.finish(attributes="nounwind")


def _prefix(name: str, kind: str, operation: str, inclusive: bool) -> Definition | None:
    if operation not in ("sum", "product"):
        return None
    body = Lanes(name, kind, returns=kind)
    total = body.emit("ptr", f"alloca {kind}")
    first = body.value(_neutral(kind, operation, False) + 0.0, kind)
    body.effect(f"store {kind} {first.name}, ptr {total.name}")

    def write(lane: Value) -> Value:
        before = body.emit(kind, f"load {kind}, ptr {total.name}")
        after = _join(before, body.argument(lane), operation, False)
        body.effect(f"store {kind} {after.name}, ptr {total.name}")
        return after if inclusive else before

    return body.each(write)


def _shuffle(name: str, kind: str, how: str, width: int) -> Definition:
    body = Lanes(name, kind, "i16", returns=kind)

    def write(lane: Value) -> Value:
        distance = body.argument(lane, 1).cast("zext", "i32")
        base, inside = lane & (SIMDGROUP - width), lane & (width - 1)
        target = {
            "shuffle": distance,
            "broadcast": distance,
            "shuffle_xor": inside ^ distance,
            "shuffle_up": inside - distance,
            "shuffle_down": inside + distance,
            "shuffle_rotate_up": (inside - distance) & (width - 1),
            "shuffle_rotate_down": (inside + distance) & (width - 1),
        }[how]
        within = target.compare("ult", width)
        if how in ("shuffle_up", "shuffle_down"):
            return _taken(body, within.select(base + target, lane), body.flag(True))
        return _taken(body, base + (target & (width - 1)), within)

    return body.each(write)


def _taken(body: Lanes, source: Value, within: Value, field: int = 0) -> Value:
    """What lane `source` (0 to 31) holds in argument `field`; 0 where that is no active lane."""
    kind = body.kinds[field]
    usable = within & body.active(source)
    value = body.argument(source, field)
    return body.emit(kind, f"select i1 {usable.name}, {kind} {value.name}, {kind} zeroinitializer")


def _fill(name: str, kind: str, how: str) -> Definition:
    body = Lanes(name, kind, kind, "i16", "i16", returns=kind)

    def write(lane: Value) -> Value:
        delta, modulo = (body.argument(lane, field).cast("zext", "i32") for field in (2, 3))
        last = modulo - 1
        inside = lane & last
        target = inside - delta if how == "up" else inside + delta
        base = lane - inside
        within = target.compare("ult", modulo)
        source = (base + (target & last)) & (SIMDGROUP - 1)
        data, filling = (_taken(body, source, body.flag(True), field) for field in (0, 1))
        return body.emit(kind, f"select i1 {within.name}, {kind} {data.name}, {kind} {filling.name}")

    return body.each(write)


def _vote(name: str, operation: str, width: int) -> Definition:
    if operation == "is_first":
        body = Lanes(name, returns="i1")
        first = body.llvm("cttz", body.arguments[2], body.flag(False))
        return body.each(lambda lane: lane.compare("eq", first))
    body = Lanes(name, "i1", returns="i1")
    everything = f"<{SIMDGROUP} x i8>"
    values = body.emit(everything, f"load {everything}, ptr %a0, align 1")
    votes = body.emit("i32", f"bitcast <{SIMDGROUP} x i1> {(values & 1).compare('ne', 0).name} to i32")
    votes = votes & body.arguments[2] if operation == "any" else (votes ^ -1) & body.arguments[2]

    def write(lane: Value) -> Value:
        group = body.value(2**width - 1, "i32") << (lane & (SIMDGROUP - width))
        return (votes & group).compare("ne" if operation == "any" else "eq", 0)

    return body.each(write)


_FLOAT = r"v(?:64|2)(?:bf16|f16|f32)"
_INIT = re.compile(rf"air\.simdgroup_matrix_8x8_init_(diag|filled)\.({_FLOAT})\.(bf16|f16|f32)")
_MEMORY = re.compile(rf"air\.simdgroup_matrix_8x8_(load|store)\.({_FLOAT})\.p([13])(bf16|f16|f32)")
_PRODUCT = re.compile(rf"air\.simdgroup_matrix_8x8_multiply_accumulate\.({_FLOAT})\.({_FLOAT})\.({_FLOAT})\.({_FLOAT})")


def define_matrix(name: str) -> Definition | None:
    """The definition of a load, store or init."""
    if found := _INIT.fullmatch(name):
        kind = llvm_type(found[2])
        body = Body(name, kind, scalar_of(kind))
        x = body.arguments[0]
        if found[1] == "filled":
            return body.finish(_pair(body, kind, x, x))
        row, column = _place(body.lane())
        first, second = (row.compare("eq", at).select(x, 0.0) for at in (column, column + 1))
        return body.finish(_pair(body, kind, first, second))
    if not (found := _MEMORY.fullmatch(name)):
        return None
    return (_load if found[1] == "load" else _store)(name, llvm_type(found[2]), f"ptr addrspace({found[3]})")


def narrowed(text: str) -> str:
    """A kernel's IR with two elements a lane instead of 64; unchanged where it does more with them than take those two.

    Sixty-two of 64 elements mean nothing, and a lane that waits would carry all of them through memory.
    """
    lines = [line if line.startswith("!") else _narrowed_line(line) for line in text.splitlines()]
    if any(line is None for line in lines) or (" = type { <64 x " in text and "@llvm.memcpy" in text):
        return text
    return "\n".join(line for line in lines if line is not None) + "\n"


_WIDE = re.compile(r"<64 x (float|half|bfloat)>")
_SHUFFLED = re.compile(r"shufflevector <(\d+) x \w+> [^<]*<\d+ x \w+> [^<]*(<(\d+) x i32> <i32 (\w+), i32 (\w+)[^>]*>)")
_KNOWN = re.compile(
    r"^  %\S+ = (?:phi|load|extractelement|insertelement|select|freeze) .*|^  store .*|^%\S+ = type \{ <64 x \w+> \}$"
    r"|^(?:  (?:%\S+ = )?(?:tail )?call|declare) .*@air\.simdgroup_matrix_8x8_\w+\.[^ ]*\(.*"
)
# An element beyond the second, or a constant with all of them written out.
_OTHERS = re.compile(r"(?:extract|insert)element .*, i\d+ (?:[2-9]|\d\d+)\b|<(?:float|half|bfloat) ")


def _narrowed_line(line: str) -> str | None:
    if not _WIDE.search(line) and "<64 x i32>" not in line:
        return line
    shuffle = _SHUFFLED.search(line)
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
