"""Readers of binary and cached files meet any bytes with a sentence: no crash, no raw exception, no endless loop.

Each run tries a few hundred mutations; `HF_MPS_FUZZ=20000 pytest tests/test_broken_files.py` tries so many in all.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_mps.core.checkpoint_files import torn
from hf_mps.core.errors import UserError
from hf_mps.metal.kernels.metallib import BrokenLibrary, libraries
from hf_mps.metal.kernels.metallib import Library as Metallib
from hf_mps.metal.kernels.release import Objects
from hf_mps.metal.kernels.signature import Compiled, Signature
from hf_mps.metal.operators import table
from hf_mps.tools.saved.run import ADAPTER, read_adapter
from scripts.tools.macho import Library as MachO
from scripts.tools.macho import code_names
from tests.metal.kernels import test_launch_classes, wheels

CASES = int(os.environ.get("HF_MPS_FUZZ", "300"))
NUMBERS = [0, 1, 7, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF]
Mutation = tuple[str, int, int]


def metallib(data: bytes, _: Path) -> None:
    for part in libraries(data):
        dict(Metallib(part))
    dict(Metallib(data))


def macho(data: bytes, folder: Path) -> None:
    (folder / "library").write_bytes(data)
    library = MachO(folder / "library")
    for address, _ in code_names(library):
        library.references(address)
        library.at(address)


def checkpoint(data: bytes, folder: Path) -> None:
    (folder / "trainer_state.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(data)
    torn(folder, "trainer_state.json")


def adapter_settings(data: bytes, folder: Path) -> None:
    (folder / ADAPTER).write_bytes(data)
    read_adapter("somewhere", folder)


def compiled_kernel(data: bytes, folder: Path) -> None:
    folder.chmod(0o700)
    (folder / "name.kernel").write_bytes(data)
    Objects(folder).read("name")


def _compiled_kernel(folder: Path) -> bytes:
    folder.chmod(0o700)
    Objects(folder).write("name", Compiled(Signature("name", (), (), frozenset(), 64), 0, b"code"))
    assert Objects(folder).read("name") is not None
    return (folder / "name.kernel").read_bytes()


def operator_table(data: bytes, folder: Path) -> None:
    (folder / "operators.json").write_bytes(data)
    assert table._stored(folder / "operators.json") is None or json.loads(data)


def _safetensors() -> bytes:
    head = json.dumps({"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(head)) + head + bytes(8)


def _macho(folder: Path) -> bytes:
    return test_launch_classes.library(folder / "whole").read_bytes()


READERS: dict[str, tuple[Callable[[bytes, Path], None], Callable[[Path], bytes], tuple[type[Exception], ...]]] = {
    "metallib": (metallib, lambda _: wheels.metallib(*wheels.KERNELS), (BrokenLibrary,)),
    "mach-o": (macho, _macho, (UserError,)),
    "safetensors": (checkpoint, lambda _: _safetensors(), ()),
    "adapter": (
        adapter_settings,
        lambda _: json.dumps({"base_model_name_or_path": "nowhere", "r": 8}).encode(),
        (UserError,),
    ),
    "compiled kernel": (compiled_kernel, _compiled_kernel, ()),
    "operator table": (operator_table, lambda _: b'{"native": ["aten::mm"]}', ()),
}


def mutations() -> st.SearchStrategy[list[Mutation]]:
    """Bytes that are flipped, cut off, repeated, or replaced by numbers that a count or an offset should not be."""
    kinds = st.sampled_from(["byte", "u32", "u64", "cut", "repeat"])
    return st.lists(
        st.tuples(kinds, st.integers(0, 1 << 16), st.sampled_from([*NUMBERS, 3, 90])), min_size=1, max_size=4
    )


def mutated(data: bytes, changes: list[Mutation]) -> bytes:
    for kind, place, number in changes:
        at = place % max(1, len(data))
        if kind == "cut":
            data = data[:at]
        elif kind == "repeat":
            data = data[:at] + data[at // 2 : at] + data[at:]
        else:
            size = {"byte": 1, "u32": 4, "u64": 8}[kind]
            value = (number & (1 << 8 * size) - 1).to_bytes(size, "little")
            data = data[:at] + value + data[at + size :]
    return data


@pytest.mark.parametrize("name", READERS)
def test_any_bytes_are_met_with_a_sentence(name: str, tmp_path: Path) -> None:
    read, make, allowed = READERS[name]
    whole = make(tmp_path)

    @settings(
        max_examples=max(20, CASES // len(READERS)),
        deadline=2000,
        database=None,
        derandomize=CASES <= 300,
        suppress_health_check=list(HealthCheck),
    )
    @given(mutations())
    def tried(changes: list[Mutation]) -> None:
        with contextlib.suppress(*allowed):
            read(mutated(whole, changes), tmp_path)

    tried()


@pytest.mark.parametrize("count", [b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f"])
def test_a_made_up_count_of_kernels_or_commands_ends_at_once(count: bytes, tmp_path: Path) -> None:
    kernels = wheels.metallib(*wheels.KERNELS)
    at = struct.unpack_from("<Q", kernels, 24)[0]
    endless: Any = kernels[:at] + count + bytes(4) + kernels[at + 8 :]
    with pytest.raises(BrokenLibrary, match="a kernel's record of 0 bytes"):
        list(Metallib(endless))
    library = _macho(tmp_path)
    (tmp_path / "endless").write_bytes(library[:16] + count + library[20:36] + bytes(4) + library[40:])
    with pytest.raises(UserError, match="a command of 0 bytes"):
        MachO(tmp_path / "endless")
