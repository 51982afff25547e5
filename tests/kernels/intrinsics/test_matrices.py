"""8x8 matrices of a simdgroup: where a lane's elements lie, and the product against numpy."""

import re

import numpy as np
import pytest

from tests.kernels.intrinsics.harness import run, run_lanes
from tests.kernels.intrinsics.test_coverage import DECLARED
from tests.kernels.intrinsics.values import from_bfloat, to_bfloat

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
