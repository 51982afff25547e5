"""Cross-lane calls that need nothing from one another are waited for once, and give what they give apart."""

from __future__ import annotations

import pytest
import torch

from hf_mps.metal.kernels.lowering.flatten import Flat
from hf_mps.metal.kernels.lowering.lanes import steps
from tests.metal.kernels.lowering.small import Small

DECLARES = """
declare float @air.simd_sum.f32(float)
declare float @air.simd_max.f32(float)
declare i1 @air.simd_is_first()
declare void @air.simdgroup.barrier(i32, i32)
declare i32 @air.simd_shuffle_xor.s.i32(i32, i16)
declare <64 x float> @air.simdgroup_matrix_8x8_load.v64f32.p1f32(ptr addrspace(1), i64, <2 x i64>, i1)
declare void @air.simdgroup_matrix_8x8_store.v64f32.p1f32(<64 x float>, ptr addrspace(1), i64, <2 x i64>, i1)
declare <64 x float> @air.simdgroup_matrix_8x8_multiply_accumulate.v64f32.v64f32.v64f32.v64f32(<64 x float>, <64 x float>, <64 x float>)
"""  # noqa: E501
PRODUCT = "@air.simdgroup_matrix_8x8_multiply_accumulate.v64f32.v64f32.v64f32.v64f32"


def waits(body: str) -> int:
    """How often a thread waits in a body."""
    text = (
        f"{DECLARES}define dso_local void @kernel(float %x, i32 %i, ptr addrspace(1) %p) {{\n{body}\n  ret void\n}}\n"
    )
    return len(steps(Flat(text.replace("<64 x ", "<2 x ").replace(".v64", ".v2"), 0, ())).reach) - 1


SUM, MAXIMUM = "  %a = call float @air.simd_sum.f32(float %x)", "  %b = call float @air.simd_max.f32(float %x)"


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ("  %y = fadd float %x, 1.0", 1),
        ("  %y = fadd float %a, 1.0", 2),
        ("  store float %x, ptr addrspace(1) %p", 2),
        ("  %y = load float, ptr addrspace(1) %p", 2),
        ("  br label %next\nnext:", 2),
        ("  call void @air.simdgroup.barrier(i32 2, i32 1)", 3),
    ],
    ids=["arithmetic", "a result is used", "a store", "a load", "another block", "a barrier"],
)
def test_calls_are_joined_where_nothing_stands_between_them(between: str, expected: int) -> None:
    assert waits(f"{SUM}\n{between}\n{MAXIMUM}") == expected


def test_a_slot_holds_so_many_calls() -> None:
    many = "\n".join(f"  %s{i} = call float @air.simd_sum.f32(float %x)" for i in range(300))
    assert 1 < waits(many) < 10


def test_products_are_joined_over_loads_and_take_one_anothers_results() -> None:
    def product(result: str, added: str) -> str:
        return f"  %{result} = call <64 x float> {PRODUCT}(<64 x float> %m, <64 x float> %m, <64 x float> %{added})\n"

    load = "  %m = load <64 x float>, ptr addrspace(1) %p\n"
    again = "  %z = load float, ptr addrspace(1) %p\n"
    body = load + product("c", "m") + again + product("d", "c") + product("e", "m")
    assert waits(body) == 1


def _matrices(count: int) -> Small:
    """out = given * given + ... + given * given, `count` products, and its first element's sum over lanes."""
    place = "i64 8, <2 x i64> zeroinitializer, i1 false"
    lines = [
        "  %in = getelementptr float, ptr addrspace(1) %given, i64 0",
        f"  %m = call <64 x float> @air.simdgroup_matrix_8x8_load.v64f32.p1f32(ptr addrspace(1) %in, {place})",
    ]
    last = "zeroinitializer"
    for i in range(count):
        lines.append(f"  %s{i} = call <64 x float> {PRODUCT}(<64 x float> %m, <64 x float> %m, <64 x float> {last})")
        last = f"%s{i}"
    stored = f"<64 x float> {last}, ptr addrspace(1) %out, {place}"
    lines += [f"  call void @air.simdgroup_matrix_8x8_store.v64f32.p1f32({stored})", "  ret void"]
    attributes = [("thread_index_in_simdgroup", "uint")]
    return Small([("out", "device"), ("given", "device")], attributes, "\n".join(lines), DECLARES)


@pytest.mark.parametrize("count", [1, 2, 9, 60])
def test_a_chain_of_products_is_their_sum(count: int) -> None:
    given, out = torch.randint(-3, 4, (8, 8)).float(), torch.zeros(8, 8)
    _matrices(count).kernel().launch({"out": out, "given": given}, groups=1, group=32)
    assert torch.equal(out, count * (given @ given))


def test_joined_calls_of_different_types_keep_their_results_apart() -> None:
    body = """
  %i = zext i32 %thread_index_in_simdgroup to i64
  %x = uitofp i32 %thread_index_in_simdgroup to float
  %sum = call float @air.simd_sum.f32(float %x)
  %first = call i1 @air.simd_is_first()
  %other = call i32 @air.simd_shuffle_xor.s.i32(i32 %thread_index_in_simdgroup, i16 1)
  %max = call float @air.simd_max.f32(float %x)
  %f = uitofp i1 %first to float
  %o = uitofp i32 %other to float
  %hundreds = fmul float %f, 100.0
  %a = fadd float %sum, %max
  %b = fadd float %a, %hundreds
  %c = fadd float %b, %o
  %to = getelementptr float, ptr addrspace(1) %out, i64 %i
  store float %c, ptr addrspace(1) %to
  ret void"""
    small = Small([("out", "device")], [("thread_index_in_simdgroup", "uint")], body, DECLARES)
    out = torch.zeros(20)
    small.kernel().launch({"out": out}, groups=1, group=20)
    lanes = torch.arange(20)
    assert torch.equal(out, (190 + 19 + 100 * (lanes == 0) + (lanes ^ 1)).float())
