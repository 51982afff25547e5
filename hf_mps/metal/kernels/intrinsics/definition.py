"""What a definition of an intrinsic is, and how the types in an intrinsic's name are read."""

import re
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
