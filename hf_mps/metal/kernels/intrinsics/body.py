"""What a definition of an intrinsic is, and straight-line LLVM IR, written as arithmetic on Python objects.

A `Body` collects the instructions of one function; its `Value`s carry Python's operators, so that a polynomial reads
as one. Everything works on scalars and on vectors; a Python number beside a Value becomes a constant of its type.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# Apple's suffixes: scalars, `v4f16` for vectors; integers carry a sign before the type, "u.v2i32"
_SCALARS = {"f16": "half", "f32": "float", "f64": "double", "bf16": "bfloat"} | {
    f"i{n}": f"i{n}" for n in (1, 8, 16, 32, 64)
}
TYPE = r"(?:v\d+)?(?:bf16|f16|f32|i64|i32|i16|i8|i1)"


@dataclass(frozen=True)
class Definition:
    """One function in LLVM 22's textual IR (opaque pointers), with what a module needs beside it.

    `declares` holds whole `declare` lines; `needs` names further definitions, each got through `define`.
    """

    text: str
    declares: frozenset[str] = field(default_factory=frozenset)
    needs: frozenset[str] = field(default_factory=frozenset)


def llvm_type(suffix: str) -> str:
    """LLVM's type for a suffix of Apple's: "f32" is float, "v4bf16" is <4 x bfloat>."""
    vector = re.fullmatch(r"v(\d+)(\w+)", suffix)
    return f"<{vector[1]} x {_SCALARS[vector[2]]}>" if vector else _SCALARS[suffix]


def suffix_of(kind: str) -> str:
    """The suffix that LLVM and Apple give to a type: float is "f32", <4 x bfloat> is "v4bf16"."""
    vector = re.fullmatch(r"<(\d+) x (\w+)>", kind)
    if vector:
        return f"v{vector[1]}{suffix_of(vector[2])}"
    return next(suffix for suffix, name in _SCALARS.items() if name == kind)


def scalar_of(kind: str) -> str:
    """The element type of a vector type; a scalar type is its own."""
    return kind.rstrip(">").rsplit(" ", 1)[-1]


def with_scalar(kind: str, scalar: str) -> str:
    """The type of `kind`'s shape with another element type: <2 x half> with float is <2 x float>."""
    return re.sub(r"\w+(?=>?$)", scalar, kind)


def bits_of(kind: str) -> int:
    """Width of a scalar type, in bits."""
    return {"half": 16, "bfloat": 16, "float": 32, "double": 64}.get(kind) or int(kind[1:])


def bytes_of(kind: str, unknown: int = 1) -> int:
    """The bytes of a scalar, a vector or an array; `unknown` of any other type."""
    if many := re.fullmatch(r"[<\[](\d+) x (.*)[>\]]", kind):
        return int(many[1]) * bytes_of(many[2], unknown)
    if kind.startswith("ptr"):
        return 8
    known = re.fullmatch(r"half|bfloat|float|double|i\d+", kind)
    return max(1, bits_of(kind) // 8) if known else unknown


_FLOATS = {"half", "bfloat", "float", "double"}
_INTEGER_OPERATIONS = {"+": "add", "-": "sub", "*": "mul", "&": "and", "|": "or", "^": "xor", "<<": "shl", ">>": "lshr"}
_FLOAT_OPERATIONS = {"+": "fadd", "-": "fsub", "*": "fmul", "/": "fdiv"}


def _operator(sign: str, *, swapped: bool = False) -> Callable[[Value, Value | float], Value]:
    def operate(self: Value, other: Value | float) -> Value:
        right = self.body.value(other, self.kind)
        a, b = (right, self) if swapped else (self, right)
        table = _FLOAT_OPERATIONS if scalar_of(self.kind) in _FLOATS else _INTEGER_OPERATIONS
        return self.body.emit(self.kind, f"{table[sign]} {self.kind} {a.name}, {b.name}")

    return operate


@dataclass(frozen=True)
class Value:
    """An SSA value or a constant of a body; a shift to the right is a logical one: the bits that come in are zero."""

    body: Body
    kind: str
    name: str

    __add__, __sub__, __rsub__ = _operator("+"), _operator("-"), _operator("-", swapped=True)
    __mul__, __truediv__, __rtruediv__ = _operator("*"), _operator("/"), _operator("/", swapped=True)
    __and__, __or__, __xor__ = _operator("&"), _operator("|"), _operator("^")
    __lshift__, __rshift__ = _operator("<<"), _operator(">>")

    def __neg__(self) -> Value:
        return self.body.emit(self.kind, f"fneg {self.kind} {self.name}")

    def compare(self, how: str, other: Value | float) -> Value:
        """LLVM's fcmp or icmp: `how` is its predicate, "olt" or "ult", "eq" or "slt"."""
        verb = "fcmp" if scalar_of(self.kind) in _FLOATS else "icmp"
        right = self.body.value(other, self.kind)
        return self.body.emit(with_scalar(self.kind, "i1"), f"{verb} {how} {self.kind} {self.name}, {right.name}")

    def cast(self, how: str, scalar: str) -> Value:
        """LLVM's conversion `how` (fpext, fptrunc, bitcast, zext ...) to the element type `scalar`."""
        kind = with_scalar(self.kind, scalar)
        return self if kind == self.kind else self.body.emit(kind, f"{how} {self.kind} {self.name} to {kind}")

    def select(self, yes: Value | float, no: Value | float) -> Value:
        """`yes` where this condition holds, `no` elsewhere; one of them is a Value."""
        kind = next(v.kind for v in (yes, no) if isinstance(v, Value))
        a, b = self.body.value(yes, kind), self.body.value(no, kind)
        return self.body.emit(kind, f"select {self.kind} {self.name}, {kind} {a.name}, {kind} {b.name}")


def constant(number: float, scalar: str) -> str:
    """A constant as LLVM spells it: floating point in hexadecimal, so that nothing is rounded on reading."""
    if scalar not in _FLOATS:
        return str(int(number))
    if scalar == "half":
        return f"0xH{struct.unpack('<H', struct.pack('<e', number))[0]:04X}"
    single = (
        struct.unpack("<f", struct.pack("<f", number))[0] if scalar != "double" and math.isfinite(number) else number
    )
    if scalar == "bfloat":
        return f"0xR{struct.unpack('<I', struct.pack('<f', single))[0] >> 16:04X}"
    return f"0x{struct.unpack('<Q', struct.pack('<d', single))[0]:016X}"


class Body:
    """The body of one function under construction."""

    def __init__(self, name: str, returns: str, *parameters: str) -> None:
        self.name, self.returns, self.parameters = name, returns, parameters
        self.lines: list[str] = []
        self.declares: set[str] = set()
        self.needs: set[str] = set()
        self.arguments = [Value(self, kind, f"%a{i}") for i, kind in enumerate(parameters)]

    def value(self, number: Value | float, kind: str) -> Value:
        """A Value as it is; a number as a constant of `kind`."""
        if isinstance(number, Value):
            return number
        text = constant(number, scalar_of(kind))
        return Value(self, kind, f"splat ({scalar_of(kind)} {text})" if kind.startswith("<") else text)

    def emit(self, kind: str, instruction: str) -> Value:
        """The result of an instruction, of type `kind`."""
        name = f"%t{len(self.lines)}"
        self.lines.append(f"{name} = {instruction}")
        return Value(self, kind, name)

    def effect(self, instruction: str) -> None:
        """An instruction without a result."""
        self.lines.append(instruction)

    def llvm(self, operation: str, *arguments: Value, returns: str | None = None) -> Value:
        """A call of llvm.OPERATION, overloaded on the first argument's type (and on `returns` where it differs)."""
        kind = returns or arguments[0].kind
        overloads = [kind, arguments[0].kind] if returns else [kind]
        name = ".".join(["llvm", operation, *(suffix_of(k) for k in overloads)])
        self.declares.add(f"declare {kind} @{name}({', '.join(a.kind for a in arguments)})")
        return self._call(kind, name, arguments)

    def reduce(self, operation: str, vector: Value) -> Value:
        """llvm.OPERATION over the elements of a vector, "vector.reduce.and" for one."""
        name = f"llvm.{operation}.{suffix_of(vector.kind)}"
        scalar = scalar_of(vector.kind)
        self.declares.add(f"declare {scalar} @{name}({vector.kind})")
        return self._call(scalar, name, [vector])

    def flag(self, on: bool) -> Value:
        """An i1 constant, as LLVM's own options are given."""
        return Value(self, "i1", "true" if on else "false")

    def helper(self, name: str, returns: str, *arguments: Value) -> Value:
        """A call of another definition."""
        self.needs.add(name)
        return self._call(returns, name, arguments)

    def lane(self) -> Value:
        """The lane's index in its simdgroup, 0 to 31."""
        self.declares.add("declare i32 @hf.lane()")
        return self.emit("i32", "call i32 @hf.lane()")

    def fma(self, a: Value, b: Value | float, c: Value | float) -> Value:
        """a * b + c, rounded once."""
        return self.llvm("fma", a, self.value(b, a.kind), self.value(c, a.kind))

    def polynomial(self, x: Value, coefficients: Sequence[float]) -> Value:
        """The polynomial with these coefficients, lowest power first, by Horner's rule with fused steps."""
        total = self.value(coefficients[-1], x.kind)
        for coefficient in reversed(coefficients[:-1]):
            total = self.llvm("fmuladd", total, x, self.value(coefficient, x.kind))
        return total

    def bits(self, x: Value) -> Value:
        """The bits of a floating-point value as an integer."""
        return x.cast("bitcast", f"i{bits_of(scalar_of(x.kind))}")

    def finish(
        self, result: Value | None = None, attributes: str = "alwaysinline nounwind", linkage: str = "internal"
    ) -> Definition:
        """The definition, which returns `result`."""
        parameters = ", ".join(f"{kind} %a{i}" for i, kind in enumerate(self.parameters))
        last = f"ret {result.kind} {result.name}" if result else "ret void"
        lines = "".join(f"  {line}\n" for line in [*self.lines, last])
        text = f"define {linkage} {self.returns} @{self.name}({parameters}) {attributes} {{\n{lines}}}\n"
        return Definition(text, frozenset(self.declares), frozenset(self.needs))

    def _call(self, kind: str, name: str, arguments: Sequence[Value]) -> Value:
        inside = ", ".join(f"{a.kind} {a.name}" for a in arguments)
        return self.emit(kind, f"call {kind} @{name}({inside})")
