"""A compiled kernel as a thing to launch: its arguments bound, its grid spread over the cores, all in host memory.

Of a checked kernel also what it may touch, and what it touched beyond that (lowering/checks.py).
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from hf_mps.metal.kernels.lowering import entry
from hf_mps.metal.kernels.lowering.checks import FAULT, NOTE_BYTES, NOTE_WORDS, RANGES
from hf_mps.metal.kernels.signature import LOCATIONS, THREADGROUP, Binding, Compiled
from hf_mps.metal.kernels.values import NoRule, Pointers, span

if TYPE_CHECKING:
    from torch import Tensor

Grid = tuple[int, ...] | int
"""One to three numbers."""

WORTH_A_THREAD = 1 << 15
"""Threads of a grid below which one core does them all: handing a share to another costs about 20 µs."""
WORTH_SECONDS = 1e-4
"""Seconds that a grid's last run took of all cores together, below which the next one is no other core's business."""
GRIDS = 1 << 10
"""Grids of a kernel whose seconds are known; all are forgotten when there are more."""
ALIGNMENT = 32
"""Addresses of bound values are multiples of it, in bytes, as kernels that read a `long4` take for granted."""


ENTRY = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
)


class Kernel:
    """One kernel of a release, compiled and loaded."""

    def __init__(self, release: str, compiled: Compiled, *, checked: bool = False) -> None:
        self.release, self.signature, self.checked = release, compiled.signature, checked
        self.name, self.threadgroup_bytes = self.signature.name, compiled.threadgroup_bytes
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        triple = llvm.get_process_triple()
        # An engine takes its machine over, so that each needs another.
        machine = llvm.Target.from_triple(triple).create_target_machine()
        self._engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(f'target triple = "{triple}"\n'), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(compiled.code))
        self._engine.finalize_object()
        # The entry (lowering/entry.py) can be called while the engine lives.
        self._entry = ENTRY(self._engine.get_function_address("entry"))
        self._by_name = {each.name: each for each in self.signature.bindings}
        found = [each for each in self.signature.bindings if each.space != THREADGROUP]
        self._buffers = sorted(found, key=lambda each: each.location)
        self._checked: set[tuple[Any, ...]] = set()
        self._seconds: dict[tuple[int, ...], float] = {}

    def launch(
        self,
        arguments: Mapping[str, Any] | Sequence[Any],
        threads: Grid | None = None,
        group: Grid = 1024,
        *,
        groups: Grid | None = None,
        threadgroup: Mapping[int, int] | None = None,
        work: int = 0,
    ) -> None:
        """Run the kernel over a grid, and return when it is done.

        `arguments` are a tensor, the bytes of a value (`values.u32(3)`), those of a struct's members by their names,
        Pointers, or None for a buffer that is left unbound: by the name that the kernel gives each binding, or all of
        them in the order of their locations. The
        grid is `threads` (Metal's dispatchThreads: the last group may be smaller) or `groups` of whole groups
        (dispatchThreadgroups); a number is the x of a line, and an empty grid launches nothing. `threadgroup` is bytes
        of threadgroup memory by location.
        `work` is the elements that are computed, where a thread computes many: whether it pays to use every core.

        Raises:
            NoRule: the kernel's bindings are not those that the arguments are for.
        """
        bound = self._bound(arguments)
        buffers = (ctypes.c_int64 * (2 * LOCATIONS))()
        held: list[tuple[int, bytes]] = []
        for binding, value in bound:
            if value is None:
                continue
            if isinstance(value, bytes | Pointers):
                held.append((binding.location, value if isinstance(value, bytes) else value.data))
            else:
                buffers[binding.location] = value.data_ptr()
        _kept = _placed(buffers, held)  # the name keeps the memory until the kernel has run
        at = -(-self.threadgroup_bytes // 16) * 16
        for location, size in (threadgroup or {}).items():
            buffers[LOCATIONS + location] = at
            at += -(-size // 16) * 16
        if at > entry.SHARED_BYTES:
            raise NoRule(f"{self.name} asks for {at:,} bytes of threadgroup memory; {entry.SHARED_BYTES:,} are there")
        grid = _grid(threads, group, groups)
        if 0 in grid[6:]:
            return
        watch = Watch(buffers, bound) if self.checked else None
        self._run(buffers, grid, max(work, grid[0] * grid[1] * grid[2]))
        if watch is not None:
            watch.report(self, grid)
        if _local.recordings:
            _local.recordings[-1].append(self.name)

    def _bound(self, arguments: Mapping[str, Any] | Sequence[Any]) -> list[tuple[Binding, Any]]:
        if isinstance(arguments, Mapping):
            names = arguments.keys() ^ {each.name for each in self._buffers}
            if names:
                self._refuse(f"a binding {min(names)!r} is its or the rule's alone")
            bound = [(self._by_name[name], value) for name, value in arguments.items()]
        else:
            if len(arguments) != len(self._buffers):
                self._refuse(f"the rule has {len(arguments)} arguments for {len(self._buffers)} bindings")
            bound = list(zip(self._buffers, arguments, strict=True))
        bound = [(each, self._struct(each, value) if isinstance(value, dict) else value) for each, value in bound]
        # What is checked depends on the bytes' lengths alone, and these are few for a kernel.
        shape = tuple(len(value) if isinstance(value, bytes) else -1 for _, value in bound)
        if shape not in self._checked:
            for binding, value in bound:
                name, whole = binding.name, binding.whole
                if isinstance(value, bytes) and whole is not None and len(value) != whole:
                    self._refuse(f"{name} takes {whole} bytes ({binding.type}), and the rule has {len(value)}")
                if isinstance(value, bytes) and binding.writes and whole is None:
                    self._refuse(f"{name} is written, and the rule has a value for it")
            self._checked.add(shape)
        return bound

    def _struct(self, binding: Binding, values: dict[str, bytes]) -> bytes:
        """Return a struct's bytes, each member where this release has it."""
        members = {each.name: each for each in binding.members}
        if names := members.keys() ^ values.keys():
            self._refuse(f"{binding.type}.{min(names)} is its or the rule's alone")
        data = bytearray(binding.whole or 0)
        for name, value in values.items():
            member = members[name]
            if len(value) != (size := member.size * max(1, member.count)):
                self._refuse(f"{binding.type}.{name} takes {size} bytes, and the rule has {len(value)}")
            data[member.offset : member.offset + size] = value
        return bytes(data)

    def _refuse(self, why: str) -> None:
        raise NoRule(f"the kernel {self.name} of {self.release} differs from what its rule binds: {why}")

    def _run(self, buffers: Any, grid: tuple[int, ...], work: int) -> None:
        sizes = (ctypes.c_uint32 * 9)(*grid)
        total = grid[6] * grid[7] * grid[8]
        if len(self._seconds) > GRIDS:
            self._seconds.clear()
        # The first run of a grid counts as worth sharing. A pool takes no work any more when the interpreter ends.
        worth = work >= WORTH_A_THREAD and self._seconds.get(grid, WORTH_SECONDS) >= WORTH_SECONDS
        shares = min(_cores(), total) if worth and threading.main_thread().is_alive() else 1
        start = perf_counter()
        cuts = [total * share // shares for share in range(shares + 1)]
        others = [
            _others(_cores()).submit(_some_groups, self._entry, buffers, sizes, cuts[share], cuts[share + 1])
            for share in range(1, shares)
        ]
        _some_groups(self._entry, buffers, sizes, 0, cuts[1])
        for other in others:
            other.result()
        self._seconds[grid] = shares * (perf_counter() - start)


def _placed(buffers: Any, held: list[tuple[int, bytes]]) -> Any:
    """Put values in memory that lasts while a kernel runs, aligned for the widest vector (`long4`)."""
    memory = ctypes.create_string_buffer(sum(len(data) + ALIGNMENT for _, data in held) + ALIGNMENT)
    at = -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT
    for location, data in held:
        ctypes.memmove(at, data, len(data))
        buffers[location] = at
        at += -(-len(data) // ALIGNMENT) * ALIGNMENT
    return memory


def _grid(threads: Grid | None, group: Grid, groups: Grid | None) -> tuple[int, ...]:
    """Threads, threads of a group and groups, three of each. A group is no larger than the grid."""
    if isinstance(threads, int) and isinstance(group, int):
        across = max(1, min(group, threads))
        return threads, 1, 1, across, 1, 1, -(-threads // across), 1, 1
    size = _three(group)
    if groups is not None:
        count = _three(groups)
        whole = tuple(number * each for number, each in zip(count, size, strict=True))
    else:
        assert threads is not None, "a grid is threads or groups"
        whole = _three(threads)
        size = tuple(max(1, min(each, limit)) for each, limit in zip(size, whole, strict=True))
        count = tuple(-(-number // each) for number, each in zip(whole, size, strict=True))
    return (*whole, *size, *count)


def _three(grid: Grid) -> tuple[int, ...]:
    return (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]


def _some_groups(function: Any, buffers: Any, sizes: Any, first: int, last: int) -> None:
    if function(ctypes.addressof(buffers), ctypes.addressof(sizes), first, last, _local.arena):
        raise MemoryError("the variables of a threadgroup's threads do not fit an arena")


class _Local(threading.local):
    """What belongs to an OS thread: the lists that note its launches, and its memory for threadgroups.

    The memory is address space that the system fills in where it is touched.
    """

    def __init__(self) -> None:
        self.recordings: list[list[str]] = []
        self._memory = mmap.mmap(-1, entry.ARENA_BYTES)
        self.arena = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


_local = _Local()


@contextmanager
def recording() -> Iterator[list[str]]:
    """Note the names of the kernels that this thread launches, those of blocks inside this one left to them."""
    names: list[str] = []
    _local.recordings.append(names)
    try:
        yield names
    finally:
        _local.recordings.pop()


@cache
def _others(cores: int) -> ThreadPoolExecutor:
    """The threads that take a share of a grid from the one that launches it."""
    return ThreadPoolExecutor(max(1, cores - 1), "hf_mps-kernels")


def _cores() -> int:
    return torch.get_num_threads()


WORD = 4
"""Bytes."""


class OutOfBounds(RuntimeError):
    """A kernel touched memory outside the buffers that were bound: the line names kernel, thread and buffer."""


class Watch:
    """The ranges of one launch's buffers in memory, and the note of accesses outside them.

    A tensor's range reaches from its first element to its last, gaps of its strides included; a tensor that is part of
    a larger storage is bounded to itself, as no binding of Metal is.
    """

    def __init__(self, buffers: Any, bound: list[tuple[Binding, Any]]) -> None:
        self.ranges = [each for binding, value in bound for each in _ranges(binding, value, buffers)]
        words = [len(self.ranges), *(word for each in self.ranges for word in each)]
        self._table = (ctypes.c_int64 * len(words))(*words)
        self._note = ctypes.create_string_buffer(NOTE_BYTES)
        buffers[RANGES], buffers[FAULT] = ctypes.addressof(self._table), ctypes.addressof(self._note)

    def report(self, kernel: Kernel, grid: tuple[int, ...]) -> None:
        """Raise OutOfBounds, with the first access, where the launch touched what was not bound."""
        count, group, thread, address, size, mask = (ctypes.c_int64 * NOTE_WORDS).from_buffer(self._note)
        if not count:
            return
        where = ", ".join(map(str, _position(grid, group, thread)))
        bound = (each for each in kernel.signature.bindings if each.location < LOCATIONS)
        buffers = [each for each in bound if mask >> each.location & 1]
        names = " or ".join(each.name for each in buffers[:3]) if len(buffers) <= 3 else "an argument buffer"
        raise OutOfBounds(
            f"{kernel.name} of {kernel.release}: the thread ({where}) of the grid touches {size} bytes "
            f"{self._place(address, mask)} of {names}; {count:,} accesses of this launch are out of bounds"
        )

    def _place(self, address: int, mask: int) -> str:
        meant = [each for each in self.ranges if mask >> each[2] & 1]
        if not meant:
            return "where nothing is bound instead"
        start, end, _ = min(meant, key=lambda each: min(abs(address - each[0]), abs(address - each[1])))
        if address < start:
            return f"{start - address:,} bytes before the start"
        return f"{address - start:,} bytes after the start of the {end - start:,} bytes"


def _ranges(binding: Binding, value: Any, buffers: Any) -> list[tuple[int, int, int]]:
    place = binding.location
    if value is None:
        return []
    if isinstance(value, bytes | Pointers):
        start = buffers[place]
        own = (start, start + len(value if isinstance(value, bytes) else value.data), place)
        return [own, *(_extent(each, place) for each in getattr(value, "tensors", ()))]
    return [_extent(value, place)]


def _extent(tensor: Tensor, place: int) -> tuple[int, int, int]:
    start = tensor.data_ptr()
    end = start + (span(tensor) * tensor.element_size() if tensor.numel() else 0)
    if tensor.element_size() < WORD:
        # Metal's atomics have 32 bits: the kernels change a half or a bool within its word, which no buffer ends in.
        start, end = start // WORD * WORD, -(-end // WORD) * WORD
    return start, end, place


def _position(grid: tuple[int, ...], group: int, thread: int) -> tuple[int, int, int]:
    """Return the thread's position in the grid: x, y, z."""
    threads, full, groups = grid[:3], grid[3:6], grid[6:]
    at = (group % groups[0], group // groups[0] % groups[1], group // (groups[0] * groups[1]))
    size = [min(whole - each * most, most) for whole, each, most in zip(threads, at, full, strict=True)]
    inside = (thread % size[0], thread // size[0] % size[1], thread // (size[0] * size[1]))
    x, y, z = (each * most + one for each, most, one in zip(at, full, inside, strict=True))
    return x, y, z
