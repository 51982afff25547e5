"""A compiled kernel as a thing to launch: its arguments bound, its grid spread over the cores, all in host memory."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from hf_mps.metal.kernels import bounds
from hf_mps.metal.kernels.lowering import entry
from hf_mps.metal.kernels.lowering.parameters import LOCATIONS
from hf_mps.metal.kernels.signature import THREADGROUP, Binding, Signature
from hf_mps.metal.kernels.values import NoRule, Pointers

Grid = tuple[int, int, int] | int

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


class Loaded:
    """An object file in memory; `entry` (see lowering/entry.py) can be called while this object lives."""

    def __init__(self, code: bytes) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        triple = llvm.get_process_triple()
        # An engine takes its machine over, so that each needs another.
        machine = llvm.Target.from_triple(triple).create_target_machine()
        self._engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(f'target triple = "{triple}"\n'), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self.entry = ENTRY(self._engine.get_function_address("entry"))


class Kernel:
    """One kernel of a release, compiled and loaded."""

    def __init__(
        self, release: str, signature: Signature, code: bytes, threadgroup_bytes: int, *, checked: bool = False
    ) -> None:
        self.release, self.signature, self.name, self.checked = release, signature, signature.name, checked
        self.threadgroup_bytes = threadgroup_bytes
        self._loaded = Loaded(code)
        self._by_name = {each.name: each for each in signature.bindings}
        found = [each for each in signature.bindings if each.space != THREADGROUP]
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

        `arguments` are a tensor, the bytes of a value (`values.u32(3)`), Pointers, or None for a buffer that is left
        unbound: by the name that the kernel gives each binding, or all of them in the order of their locations. The
        grid is `threads` (Metal's dispatchThreads: the last group may be smaller) or `groups` of whole groups
        (dispatchThreadgroups); a number is the x of a line. `threadgroup` is bytes of threadgroup memory by location.
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
        _kept = _placed(buffers, held)
        self._place_threadgroup(buffers, threadgroup or {})
        grid = _grid(threads, group, groups)
        watch = bounds.Watch(buffers, bound) if self.checked else None
        self._run(buffers, grid, max(work, grid[0] * grid[1] * grid[2]))
        if watch is not None:
            watch.report(self, grid)
        if recordings := getattr(_local, "recordings", None):
            recordings[-1].append(self.name)

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
        shape = tuple(len(value) if isinstance(value, bytes) else -1 for _, value in bound)
        if shape not in self._checked:
            for binding, value in bound:
                self._check(binding, value)
            self._checked.add(shape)
        return bound

    def _check(self, binding: Binding, value: Any) -> None:
        if isinstance(value, bytes) and binding.whole is not None and len(value) != binding.whole:
            self._refuse(f"{binding.name} takes {binding.whole} bytes ({binding.type}), and the rule has {len(value)}")
        if isinstance(value, bytes) and binding.writes and binding.whole is None:
            self._refuse(f"{binding.name} is written, and the rule has a value for it")

    def _refuse(self, why: str) -> None:
        raise NoRule(f"the kernel {self.name} of {self.release} differs from what its rule binds: {why}")

    def _place_threadgroup(self, buffers: Any, asked: Mapping[int, int]) -> None:
        at = -(-self.threadgroup_bytes // 16) * 16
        for location, size in asked.items():
            buffers[LOCATIONS + location] = at
            at += -(-size // 16) * 16
        if at > entry.SHARED_BYTES:
            raise NoRule(f"{self.name} asks for {at:,} bytes of threadgroup memory; {entry.SHARED_BYTES:,} are there")

    def _run(self, buffers: Any, grid: tuple[int, ...], work: int) -> None:
        sizes = (ctypes.c_uint32 * 9)(*grid)
        total = grid[6] * grid[7] * grid[8]
        if total == 0:
            return
        shares = min(_cores(), total) if work >= WORTH_A_THREAD and self._took(grid) >= WORTH_SECONDS else 1
        start = perf_counter()
        cuts = [total * share // shares for share in range(shares + 1)]
        others = [
            _handed_over(_some_groups, self._loaded.entry, buffers, sizes, cuts[share], cuts[share + 1])
            for share in range(1, shares)
        ]
        _some_groups(self._loaded.entry, buffers, sizes, 0, cuts[1])
        for other in others:
            other.result()
        self._seconds[grid] = shares * (perf_counter() - start)

    def _took(self, grid: tuple[int, ...]) -> float:
        """Return seconds of a grid's last run, as if by one core; WORTH_SECONDS where it is the first."""
        if len(self._seconds) > GRIDS:
            self._seconds.clear()
        return self._seconds.get(grid, WORTH_SECONDS)


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
    return (grid, 1, 1) if isinstance(grid, int) else grid


def _some_groups(function: Any, buffers: Any, sizes: Any, first: int, last: int) -> None:
    if function(ctypes.addressof(buffers), ctypes.addressof(sizes), first, last, _arena()):
        raise MemoryError("the variables of a threadgroup's threads do not fit an arena")


_local = threading.local()


@contextmanager
def recording() -> Iterator[list[str]]:
    """Note the names of the kernels that this thread launches, those of blocks inside this one left to them."""
    names: list[str] = []
    recordings = _local.__dict__.setdefault("recordings", [])
    recordings.append(names)
    try:
        yield names
    finally:
        recordings.pop()


def _arena() -> int:
    """This OS thread's memory for threadgroups: address space that the system fills in where it is touched."""
    if not hasattr(_local, "address"):
        _local.memory = mmap.mmap(-1, entry.ARENA_BYTES)
        _local.address = ctypes.addressof(ctypes.c_char.from_buffer(_local.memory))
    return int(_local.address)


_Job = tuple["Future[None]", Callable[..., None], tuple[Any, ...]]


def _handed_over(function: Callable[..., None], *arguments: Any) -> Future[None]:
    """Have another core run a function. Its threads end with the process, so that nobody has to wait for them."""
    future: Future[None] = Future()
    _jobs(_cores()).put((future, function, arguments))
    return future


@cache
def _jobs(cores: int) -> SimpleQueue[_Job]:
    jobs: SimpleQueue[_Job] = SimpleQueue()
    for number in range(1, cores):
        threading.Thread(target=_work, args=(jobs,), name=f"hf_mps-kernels-{number}", daemon=True).start()
    return jobs


def _work(jobs: SimpleQueue[_Job]) -> None:
    while True:
        future, function, arguments = jobs.get()
        try:
            function(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)


def _cores() -> int:
    import torch

    return torch.get_num_threads()
