"""A fetched release's kernels, by name, compiled for this CPU once and kept for the processes after this one."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import psutil

from hf_mps.core import cache
from hf_mps.core.errors import RunError
from hf_mps.metal.kernels import metallib, store
from hf_mps.metal.kernels.metallib import Library
from hf_mps.metal.kernels.runtime import Kernel
from hf_mps.metal.kernels.signature import Compiled, Signature, read
from hf_mps.metal.kernels.values import NoRule

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FORGOTTEN = 30 * 24 * 3600
"""Seconds after which the folder of another key, in which nothing was written, is removed: its code is of the past."""


Described = Callable[[], tuple[Signature, bytes]]
"""Reads a kernel's signature and bitcode."""


class Objects:
    """The compiled kernels in a folder, whose name has what their code depends on (`compiler_key`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def kernel(self, name: str, described: Described, release: str, checked: bool) -> Kernel:
        """Return the kernel kept as `name`, or compile and keep the one whose signature and bitcode `described` gives.

        Raises RunError for a kernel that calls what is not known here, NoRule as `survived`.
        """
        found = self.read(name)
        if found is None:
            from hf_mps.metal.kernels.lowering.compiler import compile_kernel

            with self.survived(name):
                found = compile_kernel(*described(), checked=checked)
            self.write(name, found)
        return Kernel(release, found, checked=checked)

    def read(self, name: str) -> Compiled | None:
        """Return what is kept of a kernel, or None where nothing is."""
        try:
            if cache.open_to_others(self._file(name)) is not None:
                return None
            facts, _, code = self._file(name).read_bytes().partition(b"\n")
            signature, threadgroup_bytes, crc32 = _facts().validate_json(facts)
            return Compiled(signature, threadgroup_bytes, code) if zlib.crc32(code) == crc32 else None
        except (OSError, ValueError):
            return None

    def write(self, name: str, compiled: Compiled) -> None:
        """Keep a kernel; where the folder cannot be written, the next process compiles it anew."""
        facts = compiled.signature, compiled.threadgroup_bytes, zlib.crc32(compiled.code)
        with contextlib.suppress(OSError):
            _write(self._file(name), _facts().dump_json(facts) + b"\n" + compiled.code)

    def kept(self) -> tuple[int, int]:
        """Return how many kernels there are, and their bytes."""
        sizes = [file.stat().st_size for file in self.folder.glob("*.kernel")]
        return len(sizes), sum(sizes)

    @contextlib.contextmanager
    def survived(self, name: str) -> Iterator[None]:
        """Leave a marker while LLVM compiles: it ends the whole process where it meets a fault in itself.

        Raises NoRule where two processes that are gone left it: one may have been killed for another reason.
        """
        marker, gone = self._file(name).with_suffix(".compiling"), 0
        with contextlib.suppress(OSError, ValueError):
            process, gone = map(int, marker.read_text(encoding="ascii").split())
            gone += process != os.getpid() and not psutil.pid_exists(process)
        if gone >= 2:
            raise NoRule(f"LLVM ended the processes that compiled {name}")
        with contextlib.suppress(OSError):
            if not self.folder.is_dir():
                # Remove what other keys' processes wrote long ago.
                codes = self.folder.parent
                for each in codes.iterdir() if codes.is_dir() else ():
                    if time.time() - each.stat().st_mtime > FORGOTTEN:
                        shutil.rmtree(each, ignore_errors=True)
            _write(marker, f"{os.getpid()} {gone}".encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                marker.unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.kernel"


@functools.cache
def compiler_key(source: str) -> str:
    """Return a name for what decides a kernel's code: its source's fingerprint, LLVM, this CPU, and the lowering."""
    import llvmlite.binding as llvm

    here = Path(__file__).parent
    parts = [source, *map(str, llvm.llvm_version_info)]
    parts += [llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()]
    sources = sorted([*here.glob("lowering/*.*"), *here.glob("intrinsics/*.py"), here / "signature.py"])
    parts += [source.read_text(encoding="utf-8") for source in sources]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@functools.cache
def _facts() -> TypeAdapter[tuple[Signature, int, int]]:
    """What reads and writes the first line of a kernel's file: signature, threadgroup_bytes, and the code's crc32."""
    from pydantic import TypeAdapter

    return TypeAdapter(tuple[Signature, int, int])


def _write(file: Path, data: bytes) -> None:
    """Whole or not at all: two processes may compile the same kernel at once."""
    # Closed to others, as what is in it is run: `read` takes nothing that somebody else could have put there.
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".new-")
    with os.fdopen(handle, "wb") as out:
        out.write(data)
    Path(name).replace(file)


class Release:
    """The kernels of a fetched release, to be launched.

    `checked` bounds each access of a kernel to the buffers that were bound. Raises UserError, with the next command,
    where the release was not fetched or llvmlite is not installed.
    """

    def __init__(self, version: str, *, checked: bool = False) -> None:
        metallib.require()
        self.version, self.checked = store.canonical(version), checked
        self._kernels: dict[str, Kernel] = {}
        self.seconds = 0.0
        """Time that this process has spent in loading kernels, compiling those that no process had compiled."""
        store.verify(self.version)
        key = compiler_key(store.facts(self.version).sha256) + ("-checked" if checked else "")
        self.objects = Objects(store.folder(self.version) / "code" / key)

    @cached_property
    def library(self) -> Library:
        """The metallib: names of kernels to bitcode."""
        return Library.open(store.path(self.version))

    def __contains__(self, name: object) -> bool:
        return name in self.library

    def kernel(self, name: str) -> Kernel:
        """Return the kernel of a name, compiled if this CPU has not had it yet.

        Raises:
            NoRule: the release has no such kernel, or it calls what is not known here.
        """
        found = self._kernels.get(name)
        if found is None:
            start = perf_counter()
            try:
                found = self.objects.kernel(
                    name, lambda: self._described(name), f"torch {self.version}", checked=self.checked
                )
            except RunError as unknown:
                raise NoRule(str(unknown)) from None
            self._kernels[name] = found
            self.seconds += perf_counter() - start
        return found

    def signature(self, name: str) -> Signature:
        """Return what the kernel says of its bindings. Raises NoRule where the release has no such kernel."""
        return self._described(name)[0]

    def _described(self, name: str) -> tuple[Signature, bytes]:
        import llvmlite.binding as llvm

        if name not in self.library:
            raise NoRule(f"torch {self.version} has no kernel {name}")
        bitcode = self.library[name]
        return read(str(llvm.parse_bitcode(bitcode)), name), bitcode
