"""A kernel's bound is asked of a row of threads before they run; what lies inside is run without it."""

import pytest
import torch

from hf_mps.metal.kernels.lowering.rows import question, versions
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.values import i64, u32

BOUND = """define dso_local void @kernel(ptr addrspace(1) noundef captures(none) %0, ptr addrspace(2) noundef %1, <2 x i32> noundef %2) #0 {
  %4 = extractelement <2 x i32> %2, i64 0
  %5 = shl i32 %4, 2
  %6 = load i32, ptr addrspace(2) %1, align 4, !tbaa !3
  %7 = icmp {predicate} i32 %5, %6
  br i1 %7, label %8, label %9
8:
  ret void
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("predicate", "ordinary"), [("ugt", "false"), ("sge", "false"), ("ult", "true"), ("sle", "true")]
)
def test_the_question_is_the_first_blocks_comparison(predicate: str, ordinary: str) -> None:
    asked = question(BOUND.replace("{predicate}", predicate))
    assert asked
    assert asked.ordinary == ordinary
    assert asked.text.splitlines() == [
        "define internal i1 @question(ptr addrspace(1) %v0, ptr addrspace(2) %v1, <2 x i32> %v2) "
        "alwaysinline nounwind {",
        "  %v4 = extractelement <2 x i32> %v2, i64 0",
        "  %v5 = shl i32 %v4, 2",
        "  %v6 = load i32, ptr addrspace(2) %v1, align 4",
        f"  %v7 = icmp {predicate} i32 %v5, %v6",
        "  ret i1 %v7",
        "}",
    ]


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("icmp {predicate} i32 %5, %6", "icmp eq i32 %5, %6"),
        ("load i32, ptr addrspace(2) %1", "load i32, ptr addrspace(1) %0"),
        ("shl i32 %4, 2", "call i32 @next(i32 %4)"),
    ],
    ids=["equality has no ordinary answer", "memory that threads write", "a call"],
)
def test_other_first_blocks_have_none(line: str, other: str) -> None:
    assert question(BOUND.replace(line, other).replace("{predicate}", "ugt")) is None


def test_long_kernels_are_not_copied() -> None:
    long = BOUND.replace("{predicate}", "ugt").replace(
        "  ret void", "  store i32 0, ptr addrspace(1) %0\n" * 900 + "  ret void"
    )
    assert question(long) is None


@pytest.mark.parametrize("count", [1, 3, 4, 5, 63, 64, 65, 4095, 4096, 4099, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_elements_a_thread_end_at_the_last_element(release: str, count: int, dtype: torch.dtype) -> None:
    """`numel` is no multiple of four, or of a row's vectors: c10/metal's dense unary kernels."""
    name = {torch.float32: "float", torch.bfloat16: "bfloat"}[dtype]
    kernel = Release(release).kernel(f"erf_dense_{name}_{name}")
    x = torch.randn(count + 8, generator=torch.Generator().manual_seed(count)).to(dtype)
    result = torch.full_like(x, 7.0)
    kernel.launch([result, x, u32(count)], threads=-(-count // 4), group=256)
    torch.testing.assert_close(result[:count], torch.erf(x[:count]))
    assert (result[count:] == 7.0).all()


STRIDES = BOUND.replace("{predicate}", "ugt")


def test_a_kernel_has_versions_by_what_it_reads_of_its_number_of_dimensions() -> None:
    made = versions(STRIDES, 1)
    assert [line.split("@")[1].split("(")[0] for line in made.splitlines() if line.startswith("define ")] == [
        "kernel.2",
        "kernel.3",
        "kernel.4",
    ]
    assert [line for line in made.splitlines() if " %6 = " in line] == [f"  %6 = add i32 {at}, 0" for at in (2, 3, 4)]
    assert versions(STRIDES, 0) == ""


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ["mul_strided_float_float", "copy_identity_strided_float_float"])
def test_any_number_of_dimensions_gives_the_same(release: str, name: str, dimensions: int) -> None:
    sizes = [5, 2, 3, 2, 3][:dimensions]  # the fastest first
    given = torch.randn([2 * size for size in reversed(sizes)])[(slice(None, None, 2),) * dimensions]
    other = torch.randn(sizes).permute(*reversed(range(dimensions)))
    out = torch.zeros(given.shape)
    strides = [i64([4 * each for each in reversed(tensor.stride())]) for tensor in (out, given, other)]
    kernel = Release(release).kernel(name)
    if name.startswith("mul"):
        kernel.launch([out, given, other, i64(sizes), *strides, u32(dimensions, 0, 0, 0)], threads=out.numel())
        torch.testing.assert_close(out, given * other)
    else:
        arguments = [out, given, i64(sizes), strides[1], strides[0], u32(dimensions)]
        kernel.launch(arguments, threads=(sizes[0], out.numel() // sizes[0], 1), group=(4, 4, 1))
        assert torch.equal(out, given)
