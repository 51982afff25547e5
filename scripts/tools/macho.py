"""A Mach-O library for arm64, read without a Mac: its symbols, and which function refers to which address.

Sources: Apple's mach-o/loader.h and nlist.h for the tables, the Arm Architecture Reference Manual (C4.1) for the six
instructions that are decoded. A third of a gigabyte is mapped, not loaded.
"""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hf_mps.core.errors import UserError

MAGIC, ARM64 = 0xFEEDFACF, 0x0100000C
LC_SYMTAB, LC_SEGMENT_64 = 0x2, 0x19
N_STAB, N_TYPE, N_SECT = 0xE0, 0x0E, 0x0E
HEADER, COMMAND, SEGMENT, SECTION = 32, 8, 72, 80
"""Sizes in bytes: of the file's header, of the least command, of a segment's without and for each of its sections."""
LONGEST_NAME = 1 << 16
LONGEST = 1 << 20
"""The most bytes that are decoded of one function."""


@dataclass(frozen=True)
class Section:
    """Where a section lies in memory and in the file, in bytes."""

    name: str
    address: int
    size: int
    offset: int


@dataclass(frozen=True)
class References:
    """What a function refers to, by address: `calls` and jumps out of it, `data` it names, `stored` {place: what}."""

    calls: frozenset[int]
    data: frozenset[int]
    stored: dict[int, int]


class Library:
    """The symbols and the code of one library. Raises UserError where the file is no Mach-O library for arm64."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path}: {getattr(error, 'strerror', None) or error}; allowed: a Mach-O library"
            ) from error
        if len(self._map) < HEADER or struct.unpack_from("<2I", self._map) != (MAGIC, ARM64):
            raise UserError(
                f"{path}: no Mach-O library for arm64; allowed: torch/lib/libtorch_cpu.dylib of a macOS wheel"
            )
        self._path = path
        self.sections: dict[str, Section] = {}
        self._symtab = (0, 0, 0, 0)
        self._commands()

    def _commands(self) -> None:
        count, at = self._numbers("<I", 16)[0], HEADER
        for _ in range(count):
            command, size = self._numbers("<2I", at)
            if size < COMMAND:  # a count that somebody made up would have no end
                raise self._broken(f"a command of {size} bytes")
            if command == LC_SYMTAB:
                self._symtab = self._numbers("<4I", at + 8)  # type: ignore[assignment]
            if command == LC_SEGMENT_64:
                for place in range(at + SEGMENT, at + size - SECTION + 1, SECTION):
                    name, segment = (self._map[p : p + 16].rstrip(b"\0").decode("latin-1") for p in (place, place + 16))
                    address, length, offset = self._numbers("<2QI", place + 32)
                    self.sections[f"{segment},{name}"] = Section(name, address, length, offset)
            at += size

    def _numbers(self, layout: str, at: int) -> tuple[int, ...]:
        if not 0 <= at <= len(self._map) - struct.calcsize(layout):
            raise self._broken(f"it names byte {at:,} of {len(self._map):,}")
        return struct.unpack_from(layout, self._map, at)

    def _section(self, name: str) -> Section:
        if name not in self.sections:
            raise self._broken(f"no section {name}")
        return self.sections[name]

    def _broken(self, problem: str) -> UserError:
        return UserError(f"{self._path}: a broken Mach-O library: {problem}; next: hf-mps kernels fetch RELEASE")

    @cached_property
    def symbols(self) -> dict[int, list[str]]:
        """The names of each address that has any, without the underscore that Mach-O puts before them."""
        at, count, strings, size = self._symtab
        names, found = self._map[strings : strings + size], defaultdict(list)
        table = self._map[at : at + 16 * count]
        for index, kind, _, _, address in struct.iter_unpack("<IBBHQ", table[: len(table) // 16 * 16]):
            if kind & N_STAB or kind & N_TYPE != N_SECT:
                continue
            end = names.find(b"\0", index, index + LONGEST_NAME)
            if end < 0:
                raise self._broken("a name without an end")
            found[address].append(names[index:end].decode("latin-1").removeprefix("_"))
        return dict(found)

    @cached_property
    def _starts(self) -> list[int]:
        return sorted(self.symbols)

    def at(self, address: int) -> int | None:
        """The start of what `address` lies in, as the symbols have it; None before the first."""
        number = bisect_right(self._starts, address)
        return self._starts[number - 1] if number else None

    def is_code(self, address: int) -> bool:
        """Whether an address lies in the library's own instructions."""
        text = self._section("__TEXT,__text")
        return text.address <= address < text.address + text.size

    def references(self, start: int) -> References:
        """What the function at `start`, an address of `symbols`, refers to in its instructions up to the next name."""
        number = bisect_right(self._starts, start)
        text = self._section("__TEXT,__text")
        end = min([text.address + text.size, start + LONGEST, *self._starts[number : number + 1]])
        first = start - text.address + text.offset
        self._numbers("<I", first)
        words = memoryview(self._map)[first : first + (end - start) // 4 * 4]
        words = words[: len(words) // 4 * 4]
        return _decoded(start, end, words.cast("I"), self._pointer)

    def _pointer(self, address: int) -> int | None:
        """The address that a pointer of the global offset table holds, None for one to another library."""
        table = self._section("__DATA_CONST,__got")
        if not table.address <= address < table.address + table.size:
            return None
        value = self._numbers("<Q", address - table.address + table.offset)[0]
        # A chained fixup (mach-o/fixup-chains.h): bit 63 for what is bound at loading, else 36 bits of offset.
        return None if value >> 63 else value & 0xFFFFFFFFF


class _Registers:
    """The addresses that registers hold, followed in the order of the instructions.

    It knows no branches: a compiler makes an address in a few instructions next to each other. What an instruction
    writes that is not followed is forgotten.
    """

    def __init__(self, pointer: Callable[[int], int | None]) -> None:
        self._pointer = pointer
        self._held: dict[int, int] = {}
        self.data: set[int] = set()
        self.stored: dict[int, int] = {}

    def step(self, at: int, word: int) -> None:
        """One instruction that is no branch, at address `at`."""
        to, base = word & 31, self._held.get(word >> 5 & 31)
        offset = word >> 10 & 0xFFF
        if word & 0x1F000000 == 0x10000000:  # ADR, ADRP
            near = ((word >> 5 & 0x7FFFF) << 2 | word >> 29 & 3) ^ 0x100000
            away = near - 0x100000
            self._held[to] = (at & ~0xFFF) + (away << 12) if word >> 31 else at + away
            if not word >> 31:
                self.data.add(self._held[to])
        elif word & 0xFF800000 == 0x91000000:  # ADD (immediate)
            self._hold(to, None if base is None else base + (offset << (12 if word >> 22 & 1 else 0)))
        elif word & 0xFFC00000 == 0xF9400000:  # LDR (64 bit, unsigned offset)
            place = None if base is None else base + offset * 8
            self._held.pop(to, None)
            if place is not None:
                self.data.add(place)
                self._hold(to, self._pointer(place))
        elif word & 0xFFC00000 == 0xF9000000:  # STR (64 bit, unsigned offset)
            if base is not None:
                self.data.add(base + offset * 8)
                if to in self._held:
                    self.stored[base + offset * 8] = self._held[to]
        elif word & 0x0A000000 != 0x08000000:  # no load and no store: data processing, which writes Rd
            self._held.pop(to, None)
        elif word & 0x04400000 == 0x00400000:  # any other load of general registers: Rt, and Rt2 of a pair
            self._held.pop(to, None)
            if word & 0x38000000 == 0x28000000:
                self._held.pop(word >> 10 & 31, None)

    def called(self) -> None:
        """After a call a function's own registers alone are as they were (x19 and up)."""
        self._held = {register: value for register, value in self._held.items() if 19 <= register <= 29}

    def _hold(self, register: int, value: int | None) -> None:
        if value is None:
            self._held.pop(register, None)
        else:
            self._held[register] = value
            self.data.add(value)


def _decoded(start: int, end: int, words: memoryview, pointer: Callable[[int], int | None]) -> References:
    calls, registers = set(), _Registers(pointer)
    for at, word in zip(range(start, end, 4), words, strict=False):
        if word & 0x7C000000 == 0x14000000:  # B, BL
            target = at + 4 * (((word & 0x3FFFFFF) ^ 0x2000000) - 0x2000000)
            if not start <= target < end:
                calls.add(target)
            if word >> 31:
                registers.called()
        elif word & 0x1C000000 == 0x14000000:  # other branches: BLR and BR among them
            if word & 0xFFFFFC1F == 0xD63F0000:
                registers.called()
        else:
            registers.step(at, word)
    return References(frozenset(calls), frozenset(registers.data), registers.stored)


def code_names(library: Library) -> Iterator[tuple[int, str]]:
    """Every name of the library's own functions with its address."""
    for address, names in library.symbols.items():
        if library.is_code(address):
            yield from ((address, name) for name in names)
