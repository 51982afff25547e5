"""A fetched release's kernels, by name, compiled for this CPU once.

Compiled code lies beside the metallib, below a key of everything that it depends on: LLVM, the CPU and its features,
the code here that lowers a kernel, and whether accesses are checked. A second process reads object files alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from hf_mps.kernels import modules, store
from hf_mps.kernels.metallib import Library
from hf_mps.kernels.runtime import Kernel, NoRule
from hf_mps.kernels.signature import Attribute, Binding, Member, Signature, read

_HEAD = struct.Struct("<8sI")
_MAGIC = b"hfmpsk1\n"


class Release:
    """The kernels of a fetched release, to be launched.

    `checked` bounds each access of a kernel to the buffers that were bound. Raises UserError, with the next command,
    where the release was not fetched or llvmlite is not installed.
    """

    def __init__(self, version: str, *, checked: bool = False) -> None:
        modules.require()
        self.version, self.checked = store.canonical(version), checked
        self._kernels: dict[str, Kernel] = {}
        store.verify(self.version)

    @cached_property
    def library(self) -> Library:
        """The metallib: names of kernels to bitcode."""
        return Library.open(store.path(self.version))

    def __contains__(self, name: object) -> bool:
        return name in self.library

    def kernel(self, name: str) -> Kernel:
        """The kernel of a name, compiled if this CPU has not had it yet.

        Raises:
            NoRule: the release has no such kernel, or it calls what is not known here.
        """
        found = self._kernels.get(name)
        if found is None:
            found = self._kernels[name] = self._load(name)
        return found

    def signature(self, name: str) -> Signature:
        """What the kernel says of its bindings. Raises NoRule where the release has no such kernel."""
        return self._described(name)[0]

    def _load(self, name: str) -> Kernel:
        file = self._folder / f"{name}.kernel"
        with contextlib.suppress(OSError, ValueError, KeyError, struct.error):
            return self._made(*_unpacked(file.read_bytes()))
        with _survived(file.with_suffix(".compiling"), name):
            facts, code = self._compiled(name)
        with contextlib.suppress(OSError):  # a cache that cannot be written: compiled anew by the next process
            _write(file, _packed(facts, code))
        return self._made(facts, code)

    def _made(self, facts: dict[str, Any], code: bytes) -> Kernel:
        return Kernel(
            self.version, _signature(facts["signature"]), code, facts["threadgroup_bytes"], checked=self.checked
        )

    def _compiled(self, name: str) -> tuple[dict[str, Any], bytes]:
        from hf_mps.kernels.lowering.compiler import compile_kernel

        signature, bitcode = self._described(name)
        compiled = compile_kernel(signature, bitcode, checked=self.checked)
        plain = {**asdict(signature), "intrinsics": sorted(signature.intrinsics)}
        return {"signature": plain, "threadgroup_bytes": compiled.threadgroup_bytes}, compiled.code

    def _described(self, name: str) -> tuple[Signature, bytes]:
        import llvmlite.binding as llvm

        if name not in self.library:
            raise NoRule(f"torch {self.version} has no kernel {name}")
        bitcode = self.library[name]
        return read(str(llvm.parse_bitcode(bitcode)), name), bitcode

    @cached_property
    def _folder(self) -> Path:
        return store.folder(self.version) / "code" / (_key() + ("-checked" if self.checked else ""))


@cache
def _key() -> str:
    import hashlib

    import llvmlite.binding as llvm

    here = Path(__file__).parent
    parts = [*map(str, llvm.llvm_version_info), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()]
    sources = sorted([*(here / "lowering").glob("*.py"), *(here / "intrinsics").glob("*.py"), here / "signature.py"])
    parts += [source.read_text(encoding="utf-8") for source in sources]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _packed(facts: dict[str, Any], code: bytes) -> bytes:
    head = json.dumps(facts).encode()
    return _HEAD.pack(_MAGIC, len(head)) + head + code


def _unpacked(data: bytes) -> tuple[dict[str, Any], bytes]:
    magic, length = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("no compiled kernel")
    end = _HEAD.size + length
    return json.loads(data[_HEAD.size : end]), data[end:]


def _signature(facts: dict[str, Any]) -> Signature:
    bindings = tuple(
        Binding(**{**each, "members": tuple(Member(**member) for member in each["members"])})
        for each in facts["bindings"]
    )
    attributes = tuple(Attribute(**each) for each in facts["attributes"])
    return Signature(facts["name"], bindings, attributes, frozenset(facts["intrinsics"]), facts["largest_group"])


@contextlib.contextmanager
def _survived(marker: Path, name: str) -> Iterator[None]:
    """Leave a marker while LLVM compiles: it ends the whole process where it meets a fault of its own.

    Raises NoRule where two processes that are gone left it: one may have been killed for another reason.
    """
    gone = 0
    with contextlib.suppress(OSError, ValueError):
        process, gone = map(int, marker.read_text(encoding="ascii").split())
        gone += process != os.getpid() and not _alive(process)
    if gone >= 2:
        raise NoRule(f"LLVM ended the processes that compiled {name}")
    with contextlib.suppress(OSError):
        _write(marker, f"{os.getpid()} {gone}".encode())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            marker.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _write(file: Path, data: bytes) -> None:
    """Whole or not at all: two processes may compile the same kernel at once."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".new-")
    with os.fdopen(handle, "wb") as out:
        out.write(data)
    Path(name).replace(file)
