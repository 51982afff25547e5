"""An extension module's list of libraries is found without reading the module."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
import torch

from hf_mps.metal.fallback.registration import linked_to_torch

LISTED = b"@rpath/libc10.dylib\0"


def mach_o(commands: bytes, body: bytes) -> bytes:
    """A library for arm64 with its load commands behind a header of 32 bytes (mach-o/loader.h)."""
    return struct.pack("<8I", 0xFEEDFACF, 0x0100000C, 0, 6, 1, len(commands), 0, 0) + commands + body


def universal(*libraries: bytes) -> bytes:
    """Libraries for several machines in one file (mach-o/fat.h)."""
    at, table, body = 8 + 20 * len(libraries), b"", b""
    for each in libraries:
        table += struct.pack(">5I", 0, 0, at + len(body), len(each), 0)
        body += each
    return struct.pack(">2I", 0xCAFEBABE, len(libraries)) + table + body


@pytest.mark.parametrize(
    ("content", "linked"),
    [
        (mach_o(LISTED, b"\0" * 999), True),
        (mach_o(b"libSystem.B.dylib\0", LISTED), False),
        (universal(mach_o(b"other\0", b"\0" * 99), mach_o(LISTED, b"")), True),
        (universal(mach_o(b"other\0", LISTED), mach_o(b"other\0", LISTED)), False),
        (b"another format that names " + LISTED, True),
        (b"\x7fELF\x02\x01", False),
        (b"", False),
    ],
    ids=["mach-o", "not listed", "universal", "universal, not listed", "unknown format", "cut off", "empty"],
)
def test_a_library_of_a_mac_is_known_by_its_load_commands(content: bytes, linked: bool, tmp_path: Path) -> None:
    path = tmp_path / "module.so"
    path.write_bytes(content)
    assert linked_to_torch(str(path)) is linked


@pytest.mark.skipif(sys.platform != "linux", reason="ELF is Linux's format")
def test_a_library_of_linux_is_known_by_its_dynamic_section(tmp_path: Path) -> None:
    import numpy._core._multiarray_umath as numpys

    assert linked_to_torch(str(Path(torch.__file__).parent / "lib" / "libtorch_python.so"))
    assert not linked_to_torch(numpys.__file__)
    renamed = tmp_path / "named.so"
    renamed.write_bytes(Path(numpys.__file__).read_bytes() + b"libc10.so")
    assert not linked_to_torch(str(renamed)), "what stands elsewhere in the file is not read"


def test_no_file_is_no_library(tmp_path: Path) -> None:
    assert not linked_to_torch(str(tmp_path / "absent.zip" / "module.so"))
