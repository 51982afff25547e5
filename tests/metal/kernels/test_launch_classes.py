"""What each operator launches, read from a library's code: a small library for arm64 that is put together here."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import pytest

from hf_mps.core.errors import UserError
from hf_mps.metal.kernels import launch
from hf_mps.metal.kernels.rules import RULES
from hf_mps.metal.operators import launch_class
from scripts.tools import launch_classes
from scripts.tools.launch_class_reader import read
from tests.metal.kernels import wheels

FUNCTIONS = b"""
- {func: "dense(Tensor self) -> Tensor", dispatch: {CPU: dense_cpu, MPS: dense_mps}}
- {func: "compiled(Tensor self) -> Tensor", dispatch: {CPU: compiled_cpu, MPS: compiled_mps}}
- {func: "stubbed.out(Tensor self, *, Tensor(a!) out) -> Tensor(a!)", dispatch: {"CPU, MPS": stubbed_out}}
- {func: "either.Tensor(Tensor self) -> Tensor", dispatch: {CPU: either_cpu, MPS: either_mps}}
- {func: "passed_on(Tensor self) -> Tensor", dispatch: {"CPU, MPS": passed_on}}
- {func: "folded(Tensor self) -> Tensor", dispatch: {"CPU, MPS": folded}}
- {func: "moved(Tensor self) -> Tensor", dispatch: {CompositeExplicitAutograd: moved}}
- {func: "part(Tensor(a) self) -> Tensor(a)", dispatch: {"CPU, MPS": part}}
- {func: "absent(Tensor self) -> Tensor", dispatch: {CPU: absent_cpu}}
"""
LAYER = "__ZN2at12_GLOBAL__N_1"
STUB, GOT = "__ZN2at6native4stubE", 0x8000
TEXT, DATA = 0x1000, 0x9000
RETURN = 0xD65F03C0


def wrapper(name: str) -> str:
    return f"{LAYER}12_GLOBAL__N_1{len(name)}{name}ERKNS_6TensorE"


# Each function's names and what it refers to: a call of a name, ("names", NAME) an address, ("keeps", …) a store.
CODE: list[tuple[list[str], list[tuple[str, ...]]]] = [
    (["_objc_msgSend$dispatchThreads:threadsPerThreadgroup:"], []),
    (["__ZN2at3mps9MPSStream15executeMPSGraphEP8MPSGraph"], []),
    (["_objc_msgSend$copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:"], []),
    (["__ZN2at6native3mps11PlaceholderC1Ev"], [("calls", "_objc_msgSend$dispatchThreads:threadsPerThreadgroup:")]),
    (["__ZN2at4_ops5dense4callERKNS_6TensorE"], []),
    (["__ZN2at4_ops8compiled4callERKNS_6TensorE", "__ZN2at4_ops5dense10redispatchERKNS_6TensorE"], []),
    (["___dense_block_invoke"], [("calls", "_objc_msgSend$dispatchThreads:threadsPerThreadgroup:")]),
    (["__ZN2at6native9dense_mpsE"], [("names", "___dense_block_invoke")]),
    ([wrapper("wrapper_MPS__dense")], [("calls", "__ZN2at6native9dense_mpsE")]),
    (
        [wrapper("wrapper_MPS__compiled")],
        [
            ("calls", "__ZN2at6native3mps11PlaceholderC1Ev"),
            ("calls", "__ZN2at3mps9MPSStream15executeMPSGraphEP8MPSGraph"),
        ],
    ),
    ([wrapper("wrapper_MPS_out_stubbed_out")], [("names", STUB)]),
    (["__GLOBAL__sub_I_Stub.mm"], [("keeps", "__ZN2at6native9dense_mpsE", STUB)]),
    (
        [wrapper("wrapper_MPS_Tensor_either")],
        [
            ("calls", "__ZN2at6native9dense_mpsE"),
            ("calls", "__ZN2at3mps9MPSStream15executeMPSGraphEP8MPSGraph"),
            ("through", "_objc_msgSend$copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:"),
        ],
    ),
    ([wrapper("wrapper_MPS__passed_on")], [("calls", "__ZN2at4_ops5dense4callERKNS_6TensorE")]),
    ([wrapper("wrapper_MPS__folded")], [("calls", "__ZN2at4_ops8compiled4callERKNS_6TensorE")]),
    ([wrapper("wrapper_CompositeExplicitAutograd__moved")], [("calls", "__ZN2at4_ops5dense4callERKNS_6TensorE")]),
    ([wrapper("wrapper_MPS__part")], []),
]


def address_of(name: str) -> int:
    """Each function has 64 bytes; what is no function is data."""
    for number, (names, _) in enumerate(CODE):
        if name in names:
            return TEXT + 64 * number
    return DATA


def adrp(register: int, at: int, target: int) -> int:
    pages = ((target >> 12) - (at >> 12)) & 0x1FFFFF
    return 0x90000000 | (pages & 3) << 29 | (pages >> 2) << 5 | register


def page_address(register: int, at: int, target: int) -> list[int]:
    """The two instructions that put an address into a register: ADRP and ADD."""
    return [adrp(register, at, target), 0x91000000 | (target & 0xFFF) << 10 | register << 5 | register]


def instructions(at: int, references: list[tuple[str, ...]]) -> list[int]:
    words: list[int] = []
    for kind, name, *where in references:
        here, target = at + 4 * len(words), address_of(name)
        if kind == "calls":
            words.append(0x94000000 | ((target - here) >> 2) & 0x3FFFFFF)
        elif kind == "names":
            words += page_address(8, here, target)
        elif kind == "through":  # the address lies in the global offset table: ADRP, LDR
            words += [adrp(9, here, GOT), 0xF9400000 | 9 << 5 | 9]
        else:  # a dispatch stub keeps its kernel for MPS in its fourth word: STR [x8, #24]
            words += page_address(9, here, target)
            words += [*page_address(8, at + 4 * len(words), address_of(*where)), 0xF9000000 | 3 << 10 | 8 << 5 | 9]
    return [*words, RETURN]


def library(path: Path, functions: list[tuple[list[str], list[tuple[str, ...]]]] = CODE) -> Path:
    """Write a Mach-O library of the functions of `CODE`."""
    text = b""
    for number, (_, references) in enumerate(functions):
        words = instructions(TEXT + 64 * number, references)
        text += struct.pack(f"<{len(words)}I", *words).ljust(64, b"\0")
    got = struct.pack("<Q", address_of("_objc_msgSend$copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:"))
    symbols = [(name, TEXT + 64 * number) for number, (names, _) in enumerate(functions) for name in names]
    symbols.append((STUB, DATA))
    strings, table = b"\0", b""
    for name, address in symbols:
        table += struct.pack("<IBBHQ", len(strings), 0x0E, 1, 0, address)
        strings += name.encode() + b"\0"

    first = 32 + 2 * (72 + 80) + 24
    places = [first, first + len(text), first + len(text) + len(got)]

    def segment(name: bytes, section: bytes, address: int, size: int, offset: int) -> bytes:
        head = struct.pack("<2I16s4Q4I", 0x19, 72 + 80, name, address, size, offset, size, 0, 0, 1, 0)
        return head + struct.pack("<16s16s2Q8I", section, name, address, size, offset, *[0] * 7)

    commands = segment(b"__TEXT", b"__text", TEXT, len(text), places[0])
    commands += segment(b"__DATA_CONST", b"__got", GOT, len(got), places[1])
    commands += struct.pack("<6I", 0x2, 24, places[2], len(symbols), places[2] + len(table), len(strings))
    header = struct.pack("<8I", 0xFEEDFACF, 0x0100000C, 0, 6, 3, len(commands), 0, 0)
    path.write_bytes(header + commands + text + got + table + strings)
    return path


def test_each_operator_has_every_way_that_its_code_can_take(tmp_path: Path) -> None:
    found = read(library(tmp_path / "library"), FUNCTIONS)
    expected = {
        "dense": "metal",  # encoded in a block
        "compiled": "graph",  # though its operands may be copied by a kernel
        "stubbed.out": "metal",  # kept in a dispatch stub
        "either.Tensor": "blit+graph+metal",
        "passed_on": "metal",
        "moved": "metal",
        "folded": "view",  # two operators share the address that it calls
        "part": "view",
        "absent": "cpu",
    }
    assert {name: found[f"aten::{name}"] for name in expected} == expected


def test_a_wheel_gives_its_release_and_the_ways_of_its_operators(tmp_path: Path) -> None:
    made = wheels.wheel(tmp_path, dylib=library(tmp_path / "library").read_bytes())
    with zipfile.ZipFile(made, "a") as archive:
        archive.writestr(launch_classes.FUNCTIONS, FUNCTIONS)
    release, found = launch_classes.of_wheel(made)
    assert (release, found["dense"], found["compiled"]) == ("2.99.0", "metal", "graph")


def test_what_is_no_library_of_a_macos_wheel_is_refused_in_one_line(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"\x7fELF" + bytes(100))
    with pytest.raises(UserError, match="no Mach-O library for arm64; allowed: torch"):
        read(other, FUNCTIONS)
    with pytest.raises(UserError, match="No such file"):
        read(tmp_path / "nothing", FUNCTIONS)
    with pytest.raises(UserError, match="registers no operator for MPS"):
        read(library(tmp_path / "library", CODE[:4]), FUNCTIONS)


def test_every_operator_that_a_launch_rule_knows_can_be_a_kernel_on_the_newest_release() -> None:
    launch.load()
    newest = launch_class.table(launch_class.known()[-1])
    assert len(RULES) > 100
    assert [name for name in RULES if "metal" not in newest.ways(f"aten::{name}")] == []


def test_a_release_is_added_to_the_table_and_the_others_stay_as_they_were() -> None:
    fresh = {"mm": "metal", "mm.out": "graph", "nobodys": "metal"}
    releases, joined = launch_classes.merged({"2.99.0": fresh})
    assert releases == [*launch_class.known(), "2.99.0"]
    written = launch_classes.compact(joined)
    for place, release in enumerate(launch_class.known()):
        table = launch_class.of_release(release)
        column = {name: kinds.split()[place].replace("-", "") for name, kinds in written.items()}
        for name in table.names():
            base, _, overload = name.removeprefix("aten::").partition(".")
            assert column.get(f"{base}.{overload}", column[base]) == "+".join(table.ways(name)), name
    assert {joined[name].split()[-1] for name in fresh} == {"metal", "graph"}
    assert joined["nobodys"].split()[:-1] == ["-"] * len(launch_class.known())
