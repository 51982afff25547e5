"""The metallib inside PyTorch's macOS library: which kernels it holds, the LLVM bitcode of each, and its module."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hf_mps.core import extras
from hf_mps.core.errors import UserError, nearest

if TYPE_CHECKING:
    from llvmlite.binding import ModuleRef

MAGIC = b"MTLB"
_HEADER = 88
# The fourth and fifth byte: a library for macOS. Other platforms' libraries, and chance matches, differ.
_MACOS = b"\x01\x80"
_WRAPPER = 0x0B17C0DE
# A kernel's record has at least its size, one tag and the end of tags.
_RECORD = 14

Buffer = bytes | mmap.mmap | memoryview


class BrokenLibrary(ValueError):
    """The bytes are not a metallib, or end too early."""


class Library(Mapping[str, bytes]):
    """A metallib: names of kernels to the plain LLVM bitcode of each, read when it is asked for.

    Raises BrokenLibrary where the bytes are not a whole metallib, when it is made or when it is read.
    """

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data)
        if len(self._data) < _HEADER or bytes(self._data[:4]) != MAGIC:
            raise BrokenLibrary(f"not a metallib: it begins with {bytes(self._data[:4])!r}, not {MAGIC!r}")
        (size,) = self._numbers("<Q", 16)
        if size > len(self._data):
            raise BrokenLibrary(f"a metallib of {size:,} bytes that ends after {len(self._data):,}")
        self._sections = self._numbers("<8Q", 24)

    @classmethod
    def open(cls, path: Path) -> Library:
        """Return the library in a file, mapped and not read."""
        with path.open("rb") as file:
            return cls(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def __getitem__(self, name: str) -> bytes:
        """Return the plain bitcode of a kernel (KeyError when the library has none of that name)."""
        at, size = self._places[name]
        # LLVM's wrapper: its magic and version, where the bitcode begins, its bytes, and the CPU's type.
        fields = self._numbers("<5I", at)
        if fields[0] != _WRAPPER or fields[2] + fields[3] > size:
            raise BrokenLibrary(f"{name}: its bitcode has no wrapper")
        start = at + fields[2]
        if start + fields[3] > len(self._data):
            raise BrokenLibrary(f"{name}: its bitcode ends beyond the library")
        return bytes(self._data[start : start + fields[3]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def macos(self) -> int:
        """The release of macOS that it was built for: 14 and 26 in torch 2.13.0."""
        return self._numbers("<H", 12)[0]

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """Where each kernel's bitcode begins, and its bytes."""
        try:
            return dict(self._records())
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise BrokenLibrary(f"the list of kernels cannot be read: {error!r}") from None

    def _records(self) -> Iterator[tuple[str, tuple[int, int]]]:
        # Each section has a place and a size: the list of functions, public and private metadata, bitcode.
        at, bitcode = self._sections[0], self._sections[6]
        (count,) = self._numbers("<I", at)
        at += 4
        for _ in range(count):
            (size,) = self._numbers("<I", at)
            if size < _RECORD:  # a count that somebody made up would have no end
                raise BrokenLibrary(f"a kernel's record of {size} bytes")
            tags = dict(self._tags(at + 4, at + size))
            name = tags[b"NAME"].rstrip(b"\0").decode()
            (length,) = struct.unpack("<Q", tags[b"MDSZ"])
            yield name, (bitcode + struct.unpack("<3Q", tags[b"OFFT"])[2], length)
            at += size

    def _tags(self, at: int, end: int) -> Iterator[tuple[bytes, bytes]]:
        while at < end and (tag := bytes(self._data[at : at + 4])) != b"ENDT":
            (length,) = self._numbers("<H", at + 4)
            yield tag, bytes(self._data[at + 6 : at + 6 + length])
            at += 6 + length

    def _numbers(self, layout: str, at: int) -> tuple[int, ...]:
        if at + struct.calcsize(layout) > len(self._data):
            raise BrokenLibrary(f"a metallib that names byte {at:,} and has {len(self._data):,}")
        return struct.unpack_from(layout, self._data, at)


def libraries(data: Buffer) -> list[memoryview]:
    """Return the metallibs for macOS anywhere in `data` (a Mach-O library), in their order there."""
    whole, found, at = memoryview(data), [], 0
    search = data if isinstance(data, bytes | mmap.mmap) else bytes(data)
    while (at := search.find(MAGIC, at)) >= 0:
        if len(whole) - at >= _HEADER and bytes(whole[at + 4 : at + 6]) == _MACOS:
            size, first = struct.unpack_from("<2Q", whole, at + 16)
            if first == _HEADER and at + size <= len(whole):
                found.append(whole[at : at + size])
        at += len(MAGIC)
    return found


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
    """Return the threadgroup memory that a module's globals take: one instance for each threadgroup."""
    from llvmlite.binding import create_target_data

    layout, found = create_target_data(module.data_layout), []
    for each in module.global_variables:
        if str(each.type).endswith(THREADGROUP):
            # The mangled name of a function's static variable ends with its length and it (Itanium ABI).
            last, kind = _LAST_NAME.fullmatch(each.name), each.global_value_type
            name = last[2][: int(last[1])] if last else each.name
            found.append(Shared(name, str(kind), layout.get_abi_size(kind)))
    return found


def compiled_with(text: str) -> list[str]:
    """The options that a module's metadata says it was compiled with: `denorms_disable`, `fast_math_disable`, …"""
    return sorted(set(_OPTION.findall(text)))
