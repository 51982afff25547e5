"""A compiled Metal library loads on the simulated device: kernels by name, launched, function constants stated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hf_mps.core.errors import UserError
from hf_mps.metal.kernels.runtime import OutOfBounds
from tests.metal.kernels import wheels

# What Apple's compiler writes for two function constants, one of which leaves a buffer out (as MLX's attention has it).
SCALED = """
target datalayout = "e-p:64:64:64-i64:64:64-n8:16:32"
target triple = "air64_v26-apple-macosx14.0.0"
@pred = internal addrspace(2) global i8 0, align 1
@_ZL5scale = internal unnamed_addr addrspace(2) global float undef, align 4
@_Z5scale.MTL_FC_INIT_1_f = internal unnamed_addr addrspace(2) externally_initialized constant float undef, \
section "air.fc_initializer", align 4
@_Z5added.MTL_FC_INIT_2_b = internal unnamed_addr addrspace(2) externally_initialized constant i8 undef, \
section "air.fc_initializer", align 1
@llvm.global_ctors = appending global [1 x { i32, ptr, ptr }] [{ i32, ptr, ptr } { i32 65535, ptr @start, ptr null }]
@llvm.compiler.used = appending global [1 x ptr] [ptr addrspacecast (ptr addrspace(2) @pred to ptr)], \
section "llvm.metadata"
define internal void @start() section "air.static_init" {
  %scale = load float, ptr addrspace(2) @_Z5scale.MTL_FC_INIT_1_f
  store float %scale, ptr addrspace(2) @_ZL5scale
  %added = load i8, ptr addrspace(2) @_Z5added.MTL_FC_INIT_2_b
  %whether = call i8 @air.normalize_function_constant_predicate.i8(i8 %added)
  store i8 %whether, ptr addrspace(2) @pred
  ret void
}
define void @NAME(ptr addrspace(1) %0, ptr addrspace(1) %1, i32 %2) {
begin:
  %at = getelementptr float, ptr addrspace(1) %0, i32 %2
  %value = load float, ptr addrspace(1) %at
  %uniform = call i1 @air.is_uniform.i32(i32 3)
  call void @llvm.assume(i1 %uniform)
  %scale = load float, ptr addrspace(2) @_ZL5scale
  %scaled = fmul float %value, %scale
  %added = load i8, ptr addrspace(2) @_Z5added.MTL_FC_INIT_2_b
  %adds = icmp ne i8 %added, 0
  br i1 %adds, label %add, label %end
add:
  %other.at = getelementptr float, ptr addrspace(1) %1, i32 %2
  %other = load float, ptr addrspace(1) %other.at
  %sum = fadd float %scaled, %other
  br label %end
end:
  %result = phi float [ %scaled, %begin ], [ %sum, %add ]
  store float %result, ptr addrspace(1) %at
  ret void
}
declare i8 @air.normalize_function_constant_predicate.i8(i8)
declare i1 @air.is_uniform.i32(i32)
declare void @llvm.assume(i1)
!air.kernel = !{!0}
!air.function_constants = !{!7, !8}
!0 = !{ptr @NAME, !1, !2}
!1 = !{}
!2 = !{!3, !4, !6}
!3 = !{i32 0, !"air.buffer", !"air.location_index", i32 0, i32 1, !"air.read_write", !"air.address_space", i32 1, \
!"air.arg_type_size", i32 4, !"air.arg_type_align_size", i32 4, !"air.arg_type_name", !"float", !"air.arg_name", !"out"}
!4 = !{i32 1, !"air.function_constant", !5, !"air.buffer", !"air.location_index", i32 1, i32 1, !"air.read", \
!"air.address_space", i32 1, !"air.arg_type_size", i32 4, !"air.arg_type_align_size", i32 4, !"air.arg_type_name", \
!"float", !"air.arg_name", !"bias"}
!5 = !{ptr addrspace(2) @pred, !"bool", !"added"}
!6 = !{i32 2, !"air.thread_position_in_grid", !"air.arg_type_name", !"uint", !"air.arg_name", !"tid"}
!7 = !{ptr addrspace(2) @_Z5scale.MTL_FC_INIT_1_f, !"float", !"scale", i32 1, i1 true}
!8 = !{ptr addrspace(2) @_Z5added.MTL_FC_INIT_2_b, !"bool", !"added", i32 2, i1 true}
"""


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A metallib with one kernel, `scaled`, that has the function constants `scale` and `added`."""
    monkeypatch.setattr(wheels, "DOUBLED", SCALED)
    return wheels.metallib("scaled")


def test_kernels_of_a_file_and_of_bytes_run(tmp_path: Path) -> None:
    content = wheels.metallib("double_float", "double_half")
    (tmp_path / "kernels.metallib").write_bytes(content)
    for library in (torch.mps.load_metallib(content), torch.mps.load_metallib(tmp_path / "kernels.metallib")):
        assert dir(library) == ["double_float", "double_half"]
        x = torch.arange(5.0, device="mps")
        library.double_float(x, 0, [1, 2])
        assert x.tolist() == [0, 2, 4, 6, 8]


def test_a_thread_that_leaves_its_buffer_ends_the_call() -> None:
    library = torch.mps.load_metallib(wheels.metallib("double_float"))
    with pytest.raises(OutOfBounds, match=r"double_float of the metallib: the thread \(5, 0, 0\)"):
        library.double_float(torch.zeros(5, device="mps"), 0, [1, 2], threads=6)


def test_function_constants_are_stated_and_decide_which_buffers_there_are(scaled: bytes) -> None:
    library = torch.mps.load_metallib(scaled)
    x, bias = torch.arange(4.0, device="mps"), torch.full((4,), 10.0, device="mps")
    library.with_constants(scale=0.5, added=False).scaled(x)
    assert x.tolist() == [0, 0.5, 1, 1.5]
    library.with_constants(scale=-2, added=True).scaled(x, bias)
    assert x.tolist() == [10, 9, 8, 7]
    with pytest.raises(RuntimeError, match=r"nothing is bound at buffer\(1\), which is 'bias'"):
        library.with_constants(scale=1, added=True).scaled(x)


def test_constants_that_are_missing_or_do_not_fit_get_one_line(scaled: bytes) -> None:
    library = torch.mps.load_metallib(scaled)
    missing = "scaled has function constants without a value: added (bool); next: library.with_constants(added=…)"
    with pytest.raises(UserError, match=re.escape(missing)):
        _ = library.with_constants(scale=1).scaled
    with pytest.raises(UserError, match="the function constant added is a bool, and 2 is none"):
        _ = library.with_constants(scale=1, added=2).scaled


def test_what_is_no_metallib_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="Failed to load Metal library: not a metallib"):
        torch.mps.load_metallib(b"text")
    with pytest.raises(RuntimeError, match="No such file"):
        torch.mps.load_metallib(tmp_path / "absent.metallib")
    with pytest.raises(RuntimeError, match="Failed to create function state object for: absent"):
        _ = torch.mps.load_metallib(wheels.metallib("double_float")).absent
