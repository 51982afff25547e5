"""Whether a library on disk is linked to torch's core, from the list of libraries that it needs.

A search through the whole file would read hundreds of megabytes in a program that imports scipy and pyarrow. The list
stands in a few pages: Mach-O has it in its first ones, ELF where its dynamic section says (elf.h, mach-o/loader.h).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

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
        for number in range(struct.unpack_from(">I", content, 4)[0]):
            yield _mach_o(content, struct.unpack_from(">5I", content, 8 + 20 * number)[2])
    else:
        yield 0, len(content)


def _mach_o(content: mmap.mmap, start: int) -> tuple[int, int]:
    size = struct.unpack_from("<I", content, start + 20)[0]  # of the load commands, behind a header of 32 bytes
    return start, start + 32 + size


def _elf(content: mmap.mmap) -> tuple[int, int]:
    """Where the strings of the dynamic section lie; the whole file where it has none."""
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
