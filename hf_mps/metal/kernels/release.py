"""A fetched release's kernels, by name, compiled for this CPU once.

Compiled code is kept (`objects`), so that a second process reads object files and opens neither metallib nor optimiser.
"""

from __future__ import annotations

from functools import cached_property
from time import perf_counter

from hf_mps.core.errors import RunError
from hf_mps.metal.kernels import modules, store
from hf_mps.metal.kernels.metallib import Library
from hf_mps.metal.kernels.objects import Objects
from hf_mps.metal.kernels.runtime import Kernel, NoRule
from hf_mps.metal.kernels.signature import Signature, read


class Release:
    """The kernels of a fetched release, to be launched.

    `checked` bounds each access of a kernel to the buffers that were bound. Raises UserError, with the next command,
    where the release was not fetched or llvmlite is not installed.
    """

    def __init__(self, version: str, *, checked: bool = False) -> None:
        modules.require()
        self.version, self.checked = store.canonical(version), checked
        self._kernels: dict[str, Kernel] = {}
        self.seconds = 0.0
        """Time that this process has spent in loading kernels, compiling those that no process had compiled."""
        store.verify(self.version)
        self.objects = Objects(self.version, checked=checked)

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
            start = perf_counter()
            found = self._kernels[name] = self._load(name)
            self.seconds += perf_counter() - start
        return found

    def signature(self, name: str) -> Signature:
        """What the kernel says of its bindings. Raises NoRule where the release has no such kernel."""
        return self._described(name)[0]

    def _load(self, name: str) -> Kernel:
        found = self.objects.read(name)
        if found is None:
            with self.objects.survived(name):
                found = self._compiled(name)
            self.objects.write(name, *found)
        signature, threadgroup_bytes, code = found
        return Kernel(self.version, signature, code, threadgroup_bytes, checked=self.checked)

    def _compiled(self, name: str) -> tuple[Signature, int, bytes]:
        from hf_mps.metal.kernels.lowering.compiler import compile_kernel

        signature, bitcode = self._described(name)
        try:
            compiled = compile_kernel(signature, bitcode, checked=self.checked)
        except RunError as unknown:
            raise NoRule(str(unknown)) from None
        return signature, compiled.threadgroup_bytes, compiled.code

    def _described(self, name: str) -> tuple[Signature, bytes]:
        import llvmlite.binding as llvm

        if name not in self.library:
            raise NoRule(f"torch {self.version} has no kernel {name}")
        bitcode = self.library[name]
        return read(str(llvm.parse_bitcode(bitcode)), name), bitcode
