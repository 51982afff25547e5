"""8x8 matrices of a simdgroup: where a lane's elements lie, and the product against numpy."""

import re

import numpy as np
import pytest

from hf_mps.metal.kernels.intrinsics import define, lanes, narrowed
from tests.metal.kernels.intrinsics.harness import run, run_lanes
from tests.metal.kernels.intrinsics.test_coverage import DECLARED
from tests.metal.kernels.intrinsics.values import from_bfloat, to_bfloat

LANES = np.arange(32)
QUARTER = LANES // 4
# the layout that MLX's matrix kernels rely on
ROW = (QUARTER & 4) + LANES // 2 % 4
COLUMN = (QUARTER & 2) * 2 + LANES % 2 * 2
DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(np.uint16)}
PRODUCTS = [found[1] for line in DECLARED if (found := re.search(r"@(air\.\w+multiply_accumulate[\w.]+)\(", line))]
LOADS = [found[1] for line in DECLARED if (found := re.search(r"@(air\.simdgroup_matrix_8x8_load[\w.]+)\(", line))]
STORES = [found[1] for line in DECLARED if (found := re.search(r"@(air\.simdgroup_matrix_8x8_store[\w.]+)\(", line))]


def spread(matrix: np.ndarray) -> np.ndarray:
    """A matrix as the lanes' values: 32 of 64 elements, of which two count."""
    values = np.full((32, 64), 77, matrix.dtype)
    values[:, 0], values[:, 1] = matrix[ROW, COLUMN], matrix[ROW, COLUMN + 1]
    return values


def gathered(values: np.ndarray) -> np.ndarray:
    """The matrix that the lanes' values are."""
    matrix = np.zeros((8, 8), values.dtype)
    matrix[ROW, COLUMN], matrix[ROW, COLUMN + 1] = values[:, 0], values[:, 1]
    return matrix


def suffix_dtype(name: str) -> np.dtype:
    return DTYPES[re.search(r"\.v64(\w+)", name)[1]]  # type: ignore[index]


def test_each_element_has_one_place() -> None:
    places = {(row, column + i) for row, column in zip(ROW, COLUMN, strict=True) for i in (0, 1)}
    assert places == {(row, column) for row in range(8) for column in range(8)}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", LOADS)
def test_loads_take_rows_by_their_stride(name: str, transposed: bool) -> None:
    memory = np.arange(40 * 20, dtype=np.uint16).view(np.uint16).astype(suffix_dtype(name)).reshape(1, -1)
    options = (np.array([20]), np.array([[3, 5]]), np.array([transposed]))
    got = gathered(run(name, memory, *options, count=32))
    block = memory.reshape(40, 20)[5:13, 3:11]
    np.testing.assert_array_equal(got, block.T if transposed else block)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", STORES)
def test_stores_write_their_block_alone(name: str, transposed: bool) -> None:
    matrix = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    memory = np.zeros((1, 10 * 16), np.float32)
    run(name, spread(matrix), memory, np.array([16]), np.array([[2, 1]]), np.array([transposed]))
    want = np.zeros((10, 16), np.float32)
    want[1:9, 2:10] = matrix.T if transposed else matrix
    np.testing.assert_array_equal(memory.reshape(10, 16), want)


def test_diagonal_and_filled() -> None:
    x = np.float32([-1.5])
    diagonal = run("air.simdgroup_matrix_8x8_init_diag.v64f32.f32", x, count=32)
    np.testing.assert_array_equal(gathered(diagonal), np.float32(-1.5) * np.eye(8, dtype=np.float32))
    filled = run("air.simdgroup_matrix_8x8_init_filled.v64f32.f32", x, count=32)
    np.testing.assert_array_equal(gathered(filled), np.full((8, 8), -1.5, np.float32))


def struct(left: np.dtype, right: np.dtype) -> np.dtype:
    """The arguments as LLVM lays them out: a vector begins at a multiple of its own size."""
    b = -(-64 * left.itemsize // (64 * right.itemsize)) * 64 * right.itemsize
    c = -(-(b + 64 * right.itemsize) // 256) * 256
    kinds = [(left, 64), (right, 64), (np.float32, 64)]
    return np.dtype({"names": ["a", "b", "c"], "formats": kinds, "offsets": [0, b, c], "itemsize": c + 256})


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    left, right = (DTYPES[suffix] for suffix in re.findall(r"\.v64(\w+?)(?=\.|$)", name)[1:3])
    random = np.random.default_rng(0)
    matrices = random.standard_normal((3, 8, 8)).astype(np.float32)
    stored, values = [], []
    for matrix, dtype in zip(matrices, (left, right, DTYPES["f32"]), strict=True):
        kept = to_bfloat(matrix) if dtype == np.uint16 else matrix.astype(dtype)
        stored.append(kept)
        values.append(from_bfloat(kept) if dtype == np.uint16 else kept.astype(np.float32))
    a, b, c = (v.astype(np.float64) for v in values)
    slots = np.zeros(32, struct(left, right))
    for key, matrix in zip("abc", stored, strict=True):
        slots[key] = spread(matrix)
    got = gathered(run_lanes(name, slots, np.zeros((32, 64), np.float32)))
    bound = (np.abs(a) @ np.abs(b) + np.abs(c)) * 2.0**-23
    assert (np.abs(got - (a @ b + c)) <= bound).all()
    whole = [np.round(v * 4) for v in (a, b, c)]
    for key, matrix, dtype in zip("abc", whole, (left, right, DTYPES["f32"]), strict=True):
        slots[key] = spread(to_bfloat(matrix) if dtype == np.uint16 else matrix.astype(dtype))
    exact = gathered(run_lanes(name, slots, np.zeros((32, 64), np.float32)))
    np.testing.assert_array_equal(exact, whole[0] @ whole[1] + whole[2])


KERNEL = """
%struct.tile = type { <64 x half> }
declare <64 x float> @air.simdgroup_matrix_8x8_init_diag.v64f32.f32(float)
define <2 x float> @f(<2 x float> %x, ptr %p) {
  %y = load <64 x float>, ptr %p, align 256
  %a = shufflevector <2 x float> %x, <2 x float> poison, <64 x i32> <i32 0, i32 1, i32 poison, i32 poison>
  %b = shufflevector <64 x float> %a, <64 x float> %y, <64 x i32> <i32 0, i32 65, i32 66, i32 67>
  %c = call <64 x float> @air.simdgroup_matrix_8x8_init_diag.v64f32.f32(float 1.0)
  store <64 x float> %b, ptr %p, align 256, !tbaa !1
  %d = shufflevector <64 x float> %b, <64 x float> poison, <2 x i32> <i32 0, i32 1>
  ret <2 x float> %d
}
!1 = !{!"<64 x float>"}
"""


def test_a_kernel_carries_the_two_elements_that_count() -> None:
    assert narrowed(KERNEL).splitlines() == [
        "",
        "%struct.tile = type { <2 x half> }",
        "declare <2 x float> @air.simdgroup_matrix_8x8_init_diag.v2f32.f32(float)",
        "define <2 x float> @f(<2 x float> %x, ptr %p) {",
        "  %y = load <2 x float>, ptr %p, align 4",
        "  %a = shufflevector <2 x float> %x, <2 x float> poison, <2 x i32> <i32 0, i32 1>",
        "  %b = shufflevector <2 x float> %a, <2 x float> %y, <2 x i32> <i32 0, i32 3>",
        "  %c = call <2 x float> @air.simdgroup_matrix_8x8_init_diag.v2f32.f32(float 1.0)",
        "  store <2 x float> %b, ptr %p, align 4, !tbaa !1",
        "  %d = shufflevector <2 x float> %b, <2 x float> poison, <2 x i32> <i32 0, i32 1>",
        "  ret <2 x float> %d",
        "}",
        '!1 = !{!"<64 x float>"}',
    ]


@pytest.mark.parametrize(
    "line",
    [
        "  %e = fadd <64 x float> %b, %b",
        "  %e = extractelement <64 x float> %b, i32 2",
        "  %e = shufflevector <64 x float> %b, <64 x float> poison, <2 x i32> <i32 2, i32 3>",
        "  call void @llvm.memcpy.p0.p0.i64(ptr %p, ptr %q, i64 512, i1 false)",
    ],
)
def test_a_kernel_that_does_more_stays(line: str) -> None:
    text = KERNEL.replace("  ret", f"{line}\n  ret")
    assert narrowed(text) == text


@pytest.mark.parametrize("name", PRODUCTS + LOADS + STORES)
def test_narrow_definitions_have_the_same_meaning(name: str) -> None:
    narrow = re.sub(r"\.v64(?=b?f)", ".v2", name)
    for look in (define, lanes):
        wide, small = look(name), look(narrow)
        assert (wide is None) == (small is None)
        if wide and small:
            assert small.text.replace("<2 x ", "<64 x ").replace(".v2", ".v64") == wide.text.replace("<2 x ", "<64 x ")
