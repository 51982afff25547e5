"""Small kernels of the tests' own, written as Metal's compiler writes them, and compiled as a release's are."""

from __future__ import annotations

from dataclasses import dataclass, field

import llvmlite.binding as llvm

from hf_mps.metal.kernels.lowering.compiler import compile_kernel
from hf_mps.metal.kernels.runtime import Kernel
from hf_mps.metal.kernels.signature import read

SPACES = {"device": 1, "constant": 2, "threadgroup": 3}
WIDTHS = {"uint": "i32", "uint2": "<2 x i32>", "uint3": "<3 x i32>", "ushort": "i16"}
DECLARES = """
declare void @air.wg.barrier(i32, i32)
declare i32 @air.simd_sum.u.i32(i32)
"""
ATTRIBUTES = [("thread_position_in_threadgroup", "uint"), ("threadgroup_position_in_grid", "uint")]


@dataclass
class Small:
    """A kernel: buffers as (name, address space), thread attributes as (name, type), and its body.

    In the body `%NAME` is the parameter of a buffer or an attribute. `declares` are lines before it.
    """

    buffers: list[tuple[str, str]]
    attributes: list[tuple[str, str]]
    body: str
    declares: str = ""
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The module in LLVM's assembly."""
        names = [name for name, _ in self.buffers] + [name for name, _ in self.attributes]
        kinds = [f"ptr addrspace({SPACES[space]})" for _, space in self.buffers]
        kinds += [WIDTHS[kind] for _, kind in self.attributes]
        given = ", ".join(f"{kind} noundef %{at}" for at, kind in enumerate(kinds))
        copies = "\n".join(
            f"  %{name} = getelementptr i8, {kind} %{at}, i64 0"
            if kind.startswith("ptr")
            else f"  %{name} = select i1 true, {kind} %{at}, {kind} %{at}"
            for at, (name, kind) in enumerate(zip(names, kinds, strict=True))
        )
        nodes = [self._buffer(at, *each) for at, each in enumerate(self.buffers)]
        nodes += [
            f'!{{i32 {at}, !"air.{name}", !"air.arg_type_name", !"{kind}", !"air.arg_name", !"p{at}"}}'
            for at, (name, kind) in enumerate(self.attributes, start=len(self.buffers))
        ]
        listed = ", ".join(f"!{at + 3}" for at in range(len(nodes)))
        metadata = "\n".join(f"!{at + 3} = {node}" for at, node in enumerate(nodes))
        return (
            f"{self.declares}\ndefine void @small({given}) {{\nstart:\n{copies}\n{self.body}\n}}\n"
            f"!air.kernel = !{{!0}}\n!0 = !{{ptr @small, !1, !2}}\n!1 = !{{}}\n!2 = !{{{listed}}}\n{metadata}\n"
        )

    @staticmethod
    def _buffer(at: int, name: str, space: str) -> str:
        access = "air.read_write" if space == "device" else "air.read"
        return (
            f'!{{i32 {at}, !"air.buffer", !"air.location_index", i32 {at}, i32 1, !"{access}", !"air.address_space", '
            f'i32 {SPACES[space]}, !"air.arg_type_size", i32 4, !"air.arg_type_align_size", i32 4, '
            f'!"air.arg_type_name", !"float", !"air.arg_name", !"{name}"}}'
        )

    def kernel(self, *, checked: bool = False) -> Kernel:
        """The kernel, compiled for this CPU."""
        module = llvm.parse_assembly(self.text())
        signature = read(str(module), "small")
        compiled = compile_kernel(signature, module.as_bitcode(), checked=checked)
        return Kernel("a test", compiled, checked=checked)
