"""Function constants: what a Metal kernel leaves open until the host states it, before the kernel is compiled.

In the bitcode each is a global of the section `air.fc_initializer`, which a static constructor of the module reads
(LLVM folds it into the kernel); `!air.function_constants` has its type and name, and whether it must be stated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from hf_mps.core.errors import UserError
from hf_mps.metal.kernels.intrinsics.body import constant as literal

_CONSTANT = re.compile(r'^!\d+ = !\{ptr addrspace\(2\) @(\S+), !"(\w+)", !"(\w+)", i32 \d+, i1 \w+\}$', re.MULTILINE)
_GLOBAL = r'^(@{} = .*?)externally_initialized constant (\S+) undef, section "air.fc_initializer"'
_OPTIONAL = re.compile(r'^(!\d+ = !\{i32 \d+, )!"air\.function_constant", !(\d+), (.*)\}$', re.MULTILINE)


class Constant(NamedTuple):
    """A function constant: its global in the module, its Metal type (`bool`, `int`, …) and its name."""

    variable: str
    type: str
    name: str


def declared(text: str) -> list[Constant]:
    """Return the function constants of a module's LLVM assembly, in its order."""
    return [Constant(*found) for found in _CONSTANT.findall(text)]


def stated(text: str, kernel: str, values: Mapping[str, bool | int | float]) -> str:
    """Return a kernel's assembly with its function constants stated; buffers that they leave out are marked so.

    Raises UserError for a constant without a value, for a value that its type cannot hold, and for a vector.
    """
    known = {each.name: each for each in declared(text)}
    if missing := [f"{each.name} ({each.type})" for each in known.values() if each.name not in values]:
        raise UserError(f"{kernel} has function constants without a value: {', '.join(missing)}; next: "
                        f"library.with_constants({missing[0].split()[0]}=…)")  # fmt: skip
    for name, each in known.items():
        found = re.search(_GLOBAL.format(re.escape(each.variable)), text, re.MULTILINE)
        assert found is not None, name
        literal = _literal(each, found[2], values[name])
        text = f"{text[: found.start()]}{found[1]}constant {found[2]} {literal}{text[found.end() :]}"
    false = [name for name in known if not values[name]]
    named = dict(re.findall(r'^!(\d+) = !\{ptr .*, !"bool", !"(\w+)"\}$', text, re.M))

    def bound(found: re.Match[str]) -> str:
        absent = ', !"air.absent"' if named.get(found[2]) in false else ""
        return f"{found[1]}{found[3]}{absent}}}"

    return _OPTIONAL.sub(bound, text)


def _literal(constant: Constant, kind: str, value: bool | int | float) -> str:
    if kind in ("half", "float") and isinstance(value, int | float):
        return literal(value, kind)
    bits = int(kind[1:]) if re.fullmatch(r"i\d+", kind) else 0
    # Signed or not: LLVM takes -1 and 255 for the same byte.
    fits = range(2) if constant.type == "bool" else range(-(1 << bits) // 2, 1 << bits)
    if not bits or not isinstance(value, int) or value not in fits:
        raise UserError(f"the function constant {constant.name} is a {constant.type}, and {value!r} is none")
    return str(int(value))
