"""Gives each missing operator its kernel with the dispatcher, those included that libraries register later.

The dispatcher tells nobody in Python about a new operator, so the three ways in are watched: `torch.library`,
`torch.ops.load_library`, and extension modules linked to torch. What is missing for sparse COO tensors runs on the CPU
with copies: PYTORCH_ENABLE_MPS_FALLBACK concerns the dispatch key MPS alone, and a sparse tensor has SparseMPS.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hf_mps.core.notices import overriding
from hf_mps.core.patching import ModulePatcher, Patch
from hf_mps.metal.fallback.accounting import ledger
from hf_mps.metal.fallback.host_view import SMALL
from hf_mps.metal.fallback.kernel import make, make_for_refused, make_sparse
from hf_mps.metal.operators import dispatcher

NEEDED = b"libc10."
"""What every library that calls the dispatcher is linked to: libc10.so, libc10.dylib."""

_ELF, _FAT = b"\x7fELF\x02\x01", b"\xca\xfe\xba\xbe"
_MACH_O = b"\xcf\xfa\xed\xfe"
_LOAD, _DYNAMIC = 1, 2  # program headers
_STRINGS, _SIZE = 5, 10  # entries of the dynamic section


def linked_to_torch(path: str) -> bool:
    """Whether the file names torch's core among the libraries it needs; a file of another format is searched whole."""
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return any(content.find(NEEDED, *part) >= 0 for part in _parts(content))
    except (OSError, ValueError, struct.error):  # inside an archive, empty, or cut off
        return False


def _parts(content: mmap.mmap) -> Iterator[tuple[int, int]]:
    """From where to where the file has the names of libraries."""
    if content[:6] == _ELF:
        yield _elf(content)
    elif content[:4] == _MACH_O:
        yield _mach_o(content, 0)
    elif content[:4] == _FAT:
        # A header of 8 bytes, then 20 for each architecture, whose third number is where its part begins.
        for number in range(struct.unpack_from(">I", content, 4)[0]):
            yield _mach_o(content, struct.unpack_from(">5I", content, 8 + 20 * number)[2])
    else:
        yield 0, len(content)


def _mach_o(content: mmap.mmap, start: int) -> tuple[int, int]:
    size = struct.unpack_from("<I", content, start + 20)[0]  # of the load commands, behind a header of 32 bytes
    return start, start + 32 + size


def _elf(content: mmap.mmap) -> tuple[int, int]:
    """Return the range of the dynamic section's strings, or of the whole file where it has none."""
    # The header's e_phoff, e_phentsize and e_phnum, then one Elf64_Phdr after the other (elf(5)).
    table, entry_size, count = *struct.unpack_from("<Q", content, 32), *struct.unpack_from("<2H", content, 54)
    loads, entries = [], {}
    for at in range(table, table + entry_size * count, entry_size):
        kind, _, offset, address, _, size = struct.unpack_from("<2I4Q", content, at)
        if kind == _LOAD:
            loads.append((address, offset, size))
        elif kind == _DYNAMIC:
            entries = dict(struct.iter_unpack("<2Q", content[offset : offset + size // 16 * 16]))
    strings = entries.get(_STRINGS, -1)
    for address, offset, size in loads:
        if address <= strings < address + size:
            start = strings - address + offset
            return start, start + entries.get(_SIZE, 0)
    return 0, len(content)


SPARSE_KEY = "SparseMPS"


# Kernels live as long as the library object that they were registered with, one for each operator: a later kernel of
# somebody else's takes the place of a single one.
_libraries: dict[str, list[Any]] = {}
_refused: dict[str, str] = {}
_share = True
_small: float = SMALL


def start(*, share: bool = True, small: float = SMALL) -> None:
    """Register a kernel for every operator that is missing now.

    `share=False` takes the copying way throughout; tensors of at most `small` bytes are copied in any case.
    """
    global _share, _small
    _small = small
    _share = share
    sweep()


def stop() -> None:
    """Take all kernels back: each missing operator has Metal's error again."""
    for name in list(_libraries):
        drop(name)
    _refused.clear()


@contextmanager
def suspended() -> Iterator[None]:
    """Metal's own errors for a while: all kernels are taken back, and registered again at the end."""
    had = bool(_libraries)
    stop()
    try:
        yield
    finally:
        if had:
            sweep()


def registered() -> list[str]:
    """Return the operators that run on the CPU, sorted."""
    return sorted(_libraries)


def refused() -> dict[str, str]:
    """Return the missing operators that keep Metal's error, each with the reason."""
    return dict(sorted(_refused.items()))


def sweep() -> None:
    """Register what is missing and was not before; a few milliseconds."""
    for operator in dispatcher.missing():
        if operator.name in _libraries or operator.name in _refused:
            continue
        if operator.refused is not None:
            _refused[operator.name] = operator.refused
        elif operator.composite:
            _decompose(operator.name)
        else:
            _give(operator.name)
    for operator in dispatcher.missing_for_sparse():
        label = f"{operator.name} (sparse)"
        if operator.refused is not None:
            _refused[label] = operator.refused
        elif label not in _libraries:
            kernel = make_sparse(dispatcher.overload(operator.name), ledger.stats(label))
            put(operator.name, SPARSE_KEY, kernel, held_as=label)
    for name, needed_for in dispatcher.REFUSE_METAL.items():
        if needed_for in _libraries and name not in _libraries:
            _give(name)
    for name in dispatcher.REFUSE_SIZES:
        label = f"{name} (refused sizes)"
        if label not in _libraries:
            metal = dispatcher.registered_kernel(name)
            kernel = make_for_refused(dispatcher.overload(name), metal, ledger.stats(name), share=_share)
            put(name, "MPS", kernel, held_as=label)
    for name in dispatcher.MADE_OF_OTHERS:
        if name not in _libraries and dispatcher.has_no_kernel(name):
            _compose(name)


def consider(name: str) -> None:
    """Register one operator if it is missing; replaces our own kernel for an operator that was defined anew."""
    drop(name)
    if dispatcher.is_missing(name):
        reason = dispatcher.refusal(name)
        if reason is not None:
            _refused[name] = reason
        else:
            _give(name)


def drop(name: str) -> None:
    """Take our kernel of one operator back, where there is one."""
    for library in _libraries.pop(name, ()):
        library.reset()
    dispatcher.stand_ins.discard(name)
    _refused.pop(name, None)


def put(name: str, key: str, function: Callable[..., Any], held_as: str | None = None) -> None:
    """Register `function` for operator `name` under a dispatch key, to be dropped with the operator's others.

    `held_as` is the name that it is listed under and dropped by, where that is another.
    """
    # Not torch.library.Library: it would remember the name, and refuse a library that registers its own kernel later.
    library: Any = torch._C._dispatch_library("IMPL", name.partition("::")[0], key, __file__)
    # PyTorch has registered some as CPU fallbacks itself, and warns once in a process that one takes another's place.
    with overriding():
        library.impl(name, key, function, False)
    _libraries.setdefault(held_as or name, []).append(library)
    dispatcher.stand_ins.add(held_as or name)


def _give(name: str) -> None:
    put(name, "MPS", make(dispatcher.overload(name), ledger.stats(name), share=_share, small=_small))


def _compose(name: str) -> None:
    """Make an operator that not even the CPU has of others, as torch.compile does; they run on the device."""
    from torch._decomp import decomposition_table

    function = decomposition_table.get(dispatcher.overload(name))
    if function is not None:
        put(name, "MPS", function)


def _decompose(name: str) -> None:
    """Let a composite operator that PyTorch sends to the CPU as a whole be what it is elsewhere: other operators.

    Metal has most of those, and each that is missing is named and counted. And only so has it a gradient: with a kernel
    under MPS the dispatcher gives it none under AutogradMPS, and autograd warns of wrong results.
    """
    for key in ("AutogradMPS", "MPS"):
        put(name, key, dispatcher.overload(name).decompose)


def watch() -> None:
    """Stand around the three ways in which a library registers operators later; a second call does nothing."""
    PATCHER.install(torch)


def _load_library(stock: Callable[..., None], self: Any, path: Any) -> None:
    stock(self, path)
    sweep()


def _impl(
    stock: Callable[..., None], self: Any, op_name: Any, fn: Any, dispatch_key: str = "", *args: Any, **kwargs: Any
) -> None:
    key = dispatch_key or self.dispatch_key or "CompositeImplicitAutograd"
    name = op_name if isinstance(op_name, str) else op_name.name()
    name = name if "::" in name else f"{self.ns}::{name}"
    if key in dispatcher.SERVES_METAL:
        drop(name)  # the library brings its own, which ours would otherwise have to be overridden by
    stock(self, op_name, fn, dispatch_key, *args, **kwargs)
    if key == "CPU":
        consider(name)


def _exec_module(stock: Callable[..., None], self: ExtensionFileLoader, module: ModuleType) -> None:
    stock(self, module)
    if linked_to_torch(self.path):
        sweep()


patches = {
    "torch._ops:_Ops.load_library": _load_library,
    "torch.library:Library.impl": _impl,
    "importlib.machinery:ExtensionFileLoader.exec_module": Patch(_exec_module, after="torch"),
}
PATCHER = ModulePatcher("fallback", sys.modules[__name__], safe=False)
