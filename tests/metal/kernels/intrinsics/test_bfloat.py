"""bfloat arithmetic made explicit, and the functions of compiler-rt that a module carries."""

import ctypes

import llvmlite.binding as llvm
import numpy as np
import pytest

from hf_mps.metal.kernels.intrinsics import RUNTIME, define, explicit, lacking
from tests.metal.kernels.intrinsics.harness import compiled, linked, machine, optimised
from tests.metal.kernels.intrinsics.values import EDGES, all_halves, floats, from_bfloat, to_bfloat

KERNEL = """
define void @run(ptr noalias %a, ptr noalias %b, ptr noalias %c, i64 %n) {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  %pa = getelementptr {a}, ptr %a, i64 %i
  %pb = getelementptr {b}, ptr %b, i64 %i
  %pc = getelementptr {c}, ptr %c, i64 %i
  %x = load {a}, ptr %pa
  %y = load {b}, ptr %pb
  %z = {operation}
  store {c} %z, ptr %pc
  %next = add nuw i64 %i, 1
  %end = icmp eq i64 %next, %n
  br i1 %end, label %exit, label %loop
exit:
  ret void
}}
declare bfloat @llvm.fmuladd.bf16(bfloat, bfloat, bfloat)
"""
OPERATIONS = {
    "add": ("fadd bfloat %x, %y, !tbaa !0", np.add),
    "sub": ("fsub contract bfloat %x, %y", np.subtract),
    "mul": ("fmul nnan ninf bfloat %x, %y", np.multiply),
    "div": ("fdiv bfloat %x, %y", np.divide),
    "fused": ("tail call bfloat @llvm.fmuladd.bf16(bfloat %x, bfloat %y, bfloat %y)", lambda x, y: x * y + y),
}


def call(engine: llvm.ExecutionEngine, *arrays: np.ndarray) -> None:
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(arrays), ctypes.c_int64)
    function(engine.get_function_address("run"))(*(array.ctypes.data for array in arrays), len(arrays[0]))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("features", [None, "+avx2,+fma,+f16c"], ids=["this host", "AVX2"])
def test_arithmetic_is_rounded_once_on_every_host(operation: str, features: str | None) -> None:
    line, numpy = OPERATIONS[operation]
    text, needs = explicit(KERNEL.format(operation=line, a="bfloat", b="bfloat", c="bfloat").replace(", !tbaa !0", ""))
    engine = compiled(text + linked([found for name in needs if (found := define(name))]), features)
    bits = np.random.default_rng(0).integers(0, 65536, (2, 100_000), dtype=np.uint16)
    x, y = bits
    result = np.zeros_like(x)
    call(engine, x, y, result)
    with np.errstate(all="ignore"):
        exact = numpy(from_bfloat(x).astype(np.float64), from_bfloat(y).astype(np.float64))
        want = to_bfloat(exact.astype(np.float32))
    np.testing.assert_array_equal(from_bfloat(result), from_bfloat(want))


def test_rounding_is_vectorised_and_calls_nothing_without_avx512() -> None:
    text, needs = explicit(KERNEL.format(operation="fptrunc float %x to bfloat", a="float", b="float", c="bfloat"))
    assert needs == {"hf.bfloat.f32"}
    features = "+avx2,+fma,+f16c"
    module = optimised(text + linked([found for name in needs if (found := define(name))]), features)
    assert "lshr <8 x i32>" in str(module)
    assert "call" not in machine(features).emit_assembly(module)


def test_text_without_bfloat_arithmetic_stays() -> None:
    text = "%z = fadd float %x, %y\n%w = fpext bfloat %v to float\n%c = fcmp olt float %a, %b\n"
    assert explicit(text) == (text, frozenset())


def test_a_comparison_of_bfloats_is_made_in_float() -> None:
    text, needs = explicit("%c = fcmp nnan olt bfloat %a, 0xR0000\n")
    assert text == "%c = call i1 @hf.bfloat.cmp.olt(bfloat %a, bfloat 0xR0000)\n"
    (name,) = needs
    definition = define(name)
    assert "fcmp olt float" in definition.text


def test_a_host_without_f16c_finds_its_functions_in_the_module() -> None:
    operation = "fptrunc float %x to half"
    engine = compiled(KERNEL.format(operation=operation, a="float", b="float", c="half") + linked(RUNTIME), "")
    x = np.concatenate([floats(), EDGES])
    result = np.zeros(len(x), np.float16)
    call(engine, x, x, result)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(result, x.astype(np.float16))
    engine = compiled(
        KERNEL.format(operation="fpext half %x to float", a="half", b="half", c="float") + linked(RUNTIME), ""
    )
    halves = all_halves()
    widened = np.zeros(len(halves), np.float32)
    call(engine, halves, halves, widened)
    np.testing.assert_array_equal(widened, halves.astype(np.float32))


def test_a_host_without_bfloat_finds_its_function_in_the_module() -> None:
    operation = "fptrunc float %x to bfloat"
    engine = compiled(KERNEL.format(operation=operation, a="float", b="float", c="bfloat") + linked(RUNTIME), "+avx2")
    x = np.concatenate([floats(), EDGES])
    result = np.zeros(len(x), np.uint16)
    call(engine, x, x, result)
    np.testing.assert_array_equal(from_bfloat(result), from_bfloat(to_bfloat(x)))


@pytest.mark.parametrize(
    ("features", "names"),
    [
        ({"f16c": True, "avx512bf16": True}, []),
        ({"f16c": True, "avx512bf16": False}, ["__truncsfbf2"]),
        ({}, ["__extendhfsf2", "__truncsfhf2", "__truncsfbf2"]),
    ],
    ids=["AVX512-BF16", "AVX2 with F16C", "neither"],
)
def test_a_module_carries_the_functions_that_its_cpu_lacks(features: dict[str, bool], names: list[str]) -> None:
    found = lacking(features)
    assert [each.text.split("@")[1].split("(")[0] for each in found] == names


@pytest.mark.parametrize("definition", RUNTIME, ids=lambda definition: definition.text.split("@")[1].split("(")[0])
def test_a_runtime_function_is_visible_to_the_linker(definition: object) -> None:
    assert getattr(definition, "text", "").startswith("define weak ")
