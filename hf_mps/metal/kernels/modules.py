"""A kernel's LLVM module, read by llvmlite, which the extra `kernels` brings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from hf_mps.core import extras
from hf_mps.core.errors import UserError, nearest
from hf_mps.metal.kernels.metallib import Library

if TYPE_CHECKING:
    from llvmlite.binding import ModuleRef

_LAST_NAME = re.compile(r".*E(\d+)(\w+?)(?:\.\d+)?")
_OPTION = re.compile(r'!"air\.compile\.(\w+)"')
THREADGROUP = "addrspace(3)"


class Shared(NamedTuple):
    """Threadgroup memory that a kernel declares itself: its name in the source, its LLVM type and its bytes."""

    name: str
    type: str
    size: int


def require() -> None:
    """Raise UserError, with the next command, where llvmlite is not installed."""
    try:
        import llvmlite  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"llvmlite, which reads Metal kernels, is not installed; next: {extras.install('kernels')}"
        ) from error


def parse(library: Library, name: str) -> ModuleRef:
    """The module of a kernel, its typed pointers upgraded. Raises UserError without llvmlite or for a wrong name."""
    require()
    from llvmlite.binding import parse_bitcode

    if name not in library:
        raise UserError(f"there is no kernel {name}{nearest(name, library) or '; next: hf-mps kernels list'}")
    return parse_bitcode(library[name])


def shared(module: ModuleRef) -> list[Shared]:
    """The threadgroup memory that a module's globals take: one instance for each threadgroup."""
    from llvmlite.binding import create_target_data

    layout = create_target_data(module.data_layout)
    return [
        Shared(_plain(each.name), str(each.global_value_type), layout.get_abi_size(each.global_value_type))
        for each in module.global_variables
        if str(each.type).endswith(THREADGROUP)
    ]


def compiled_with(text: str) -> list[str]:
    """The options that a module's metadata says it was compiled with: `denorms_disable`, `fast_math_disable`, …"""
    return sorted(set(_OPTION.findall(text)))


def _plain(mangled: str) -> str:
    """The name of a function's static variable without the function: the Itanium ABI ends with its length and it."""
    found = _LAST_NAME.fullmatch(mangled)
    return found[2][: int(found[1])] if found else mangled
