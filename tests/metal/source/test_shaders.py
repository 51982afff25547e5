"""Metal source compiles and runs on the simulated device, as torch.mps.compile_shader does on a Mac."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_mps.metal.kernels.runtime import OutOfBounds


def compiled(source: str) -> Any:
    return torch.mps.compile_shader(source)


def mps(*sizes: int, **options: Any) -> Tensor:
    return torch.randn(*sizes, **options).to("mps")


def test_a_kernel_runs_over_the_elements_of_its_first_tensor() -> None:
    library = compiled("kernel void count(device half* x, uint i [[thread_position_in_grid]]) { x[i] = i; }")
    x = torch.zeros(12, device="mps", dtype=torch.half)
    library.count(x)
    assert x.tolist() == list(range(12))


def test_a_grid_has_up_to_three_dimensions() -> None:
    library = compiled("""
        kernel void place(device uint* x, uint3 at [[thread_position_in_grid]], uint3 size [[threads_per_grid]]) {
            x[(at.z * size.y + at.y) * size.x + at.x] = at.x + 10 * at.y + 100 * at.z;
        }""")
    x = torch.zeros(2, 3, 4, dtype=torch.int32, device="mps")
    library.place(x, threads=(4, 3, 2), group_size=(2, 2, 1))
    assert x[1, 2].tolist() == [120, 121, 122, 123]
    with pytest.raises(RuntimeError, match="wrong dimension"):
        library.place(x, threads=(1, 1, 1, 1))


def test_numbers_are_bound_as_pytorch_binds_them() -> None:
    library = compiled("""
        kernel void line(
            device float* x, constant float& start, constant long& step, uint i [[thread_position_in_grid]]) {
            x[i] = start + i * step;
        }
        kernel void halves(device float* x, constant half2& both, uint i [[thread_position_in_grid]]) {
            x[i] = both.x + i * both.y;
        }""")
    x = torch.zeros(4, device="mps")
    library.line(x, 0.5, 2)
    assert x.tolist() == [0.5, 2.5, 4.5, 6.5]
    library.line(x, torch.tensor(1.5), 1)  # a tensor of the CPU's is a number where it has no dimension
    assert x.tolist() == [1.5, 2.5, 3.5, 4.5]
    library.line(x, torch.tensor(2.5, dtype=torch.float64), 1)
    assert x.tolist() == [2.5, 3.5, 4.5, 5.5]
    with torch.device("mps"):
        library.line(x, 0.25, 1)
    assert x.tolist() == [0.25, 1.25, 2.25, 3.25]
    torch.set_default_dtype(torch.bfloat16)
    try:
        library.line(x, 0.1, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert x.tolist() == torch.full((4,), 0.1).tolist()
    library.halves(x, [1.5, 0.25], arg_casts="fp16")
    assert x.tolist() == [1.5, 1.75, 2.0, 2.25]
    with pytest.raises(RuntimeError, match=r"halves: 'both' at buffer\(1\) takes 4 bytes .* the argument has 2"):
        library.halves(x, 1.5, arg_casts={1: "fp16"})


ROWS = """
    #include <metal_stdlib>
    using namespace metal;
    template <typename T>
    [[kernel]] void row_sum(
        device const T* x [[buffer(0)]], device float* out [[buffer(1)]], constant uint& width [[buffer(2)]],
        uint row [[threadgroup_position_in_grid]], uint t [[thread_position_in_threadgroup]],
        uint n [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]],
        uint group [[simdgroup_index_in_threadgroup]]) {
      threadgroup float part[32];
      float sum = 0;
      for (uint i = t; i < width; i += n) sum += float(x[row * width + i]);
      sum = simd_sum(sum);
      if (lane == 0) part[group] = sum;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (t == 0) { for (uint i = 1; i < n / 32; i++) sum += part[i]; out[row] = sum; }
    }
    #define INSTANTIATE(T) template [[host_name("row_sum_" #T)]] [[kernel]] void row_sum<T>( \\
        device const T* x [[buffer(0)]], device float* out [[buffer(1)]], constant uint& width [[buffer(2)]], \\
        uint row [[threadgroup_position_in_grid]], uint t [[thread_position_in_threadgroup]], \\
        uint n [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]], \\
        uint group [[simdgroup_index_in_threadgroup]]);
    INSTANTIATE(float) INSTANTIATE(half) INSTANTIATE(bfloat)
"""


@pytest.mark.parametrize("dtype", [torch.float, torch.half, torch.bfloat16])
def test_templates_threadgroup_memory_barriers_and_simdgroups(dtype: torch.dtype) -> None:
    library = compiled(ROWS)
    name = {torch.float: "float", torch.half: "half", torch.bfloat16: "bfloat"}[dtype]
    assert dir(library) == ["row_sum_bfloat", "row_sum_float", "row_sum_half"]
    x, out = mps(7, 1000).to(dtype), torch.zeros(7, device="mps")
    kernel = getattr(library, f"row_sum_{name}")
    kernel(x, out, 1000, threads=7 * 128, group_size=128)
    torch.testing.assert_close(out.cpu().double(), x.cpu().double().sum(1), rtol=1e-5, atol=1e-4)
    assert kernel.static_thread_group_memory_length == 128
    assert (kernel.max_threads_per_threadgroup, kernel.thread_execution_width) == (1024, 32)


def test_threadgroup_memory_needs_no_barrier_where_a_thread_reads_its_own() -> None:
    library = compiled("""
        kernel void twice(device float* x, uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
            threadgroup float part[64];
            part[t] = x[i];
            x[i] = 2 * part[t];
        }""")
    x = torch.arange(256.0, device="mps")
    library.twice(x, group_size=64)
    assert torch.equal(x.cpu(), 2 * torch.arange(256.0))


def test_structs_vectors_and_a_struct_s_own_functions() -> None:
    library = compiled("""
        using namespace metal;
        struct Line { float slope; float start[2];
                      float at(float x) const { return start[0] + slope * x + start[1]; } };
        kernel void apply(device float4* x, constant Line& given, uint i [[thread_position_in_grid]]) {
            Line line = given;
            half4 narrow = half4(x[i]);
            float2 pair = float2(line.at(x[i].x), given.at(x[i].y));
            x[i] = float4(pair, static_cast<float2>(narrow.zw)) + float4(0, 0, float2(1));
        }""")
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device="mps")
    line = torch.frombuffer(bytearray(struct.pack("3f", 2.0, 0.5, 0.25)), dtype=torch.uint8).to("mps")
    library.apply(x, line, threads=1)
    assert x.tolist() == [[2.75, 4.75, 4.0, 5.0]]


def test_atomics_add_from_every_threadgroup() -> None:
    library = compiled("""
        using namespace metal;
        kernel void histogram(device const int* x, device atomic_uint* bins, device atomic<float>* sum,
                              uint i [[thread_position_in_grid]]) {
            atomic_fetch_add_explicit(&bins[x[i]], 1, memory_order_relaxed);
            atomic_fetch_add_explicit(sum, float(x[i]), memory_order_relaxed);
        }""")
    x = torch.randint(0, 8, (4096,), dtype=torch.int32)
    bins, total = torch.zeros(8, dtype=torch.int32, device="mps"), torch.zeros(1, device="mps")
    library.histogram(x.to("mps"), bins, total)
    assert bins.cpu().tolist() == torch.bincount(x, minlength=8).tolist()
    assert total.item() == x.sum().item()


def test_a_simdgroup_multiplies_matrices() -> None:
    library = compiled("""
        using namespace metal;
        kernel void product(device const half* a, device const half* b, device float* c) {
            simdgroup_half8x8 left, right;
            simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8>(1.0f);
            simdgroup_load(left, a);
            simdgroup_load(right, b, 8, ulong2(0, 0), true);
            simdgroup_multiply_accumulate(sum, left, right, sum);
            simdgroup_store(sum, c);
        }""")
    a, b = mps(8, 8).half(), mps(8, 8).half()
    c = torch.zeros(8, 8, device="mps")
    library.product(a, b, c, threads=32, group_size=32)
    torch.testing.assert_close(c.cpu(), 1 + a.cpu().float() @ b.cpu().float().T)


def test_a_list_of_tensors_is_an_argument_buffer() -> None:
    library = compiled("""
        struct Lists { metal::array<device float*, 3> of; };
        kernel void scale(constant Lists& lists, constant float& by, uint2 at [[thread_position_in_grid]]) {
            lists.of[at.y][at.x] *= by;
        }""")
    tensors = [torch.full((4,), float(number), device="mps") for number in range(3)]
    library.scale(tensors, 10.0, threads=(4, 3))
    assert [each.tolist() for each in tensors] == [[0.0] * 4, [10.0] * 4, [20.0] * 4]
    tensors[0].copy_(torch.ones(4), non_blocking=True)
    library.scale(tensors, 10.0, threads=(4, 3))
    assert tensors[0].tolist() == [10.0] * 4
    with pytest.raises(RuntimeError, match="Passed CPU tensor to MPS op"):
        library.scale([torch.ones(4)] * 3, 10.0, threads=(4, 3))


@pytest.mark.parametrize("name", ["utils", "reduction_utils", "atomic", "indexing", "special_math", "random", "igamma"])
def test_pytorch_s_own_headers_compile(name: str) -> None:
    library = compiled(f"""
        #include <c10/metal/utils.h>
        #include <c10/metal/{name}.h>
        kernel void same(device float* x, uint i [[thread_position_in_grid]]) {{ x[i] = c10::metal::max(x[i], 0.0f); }}
        """)
    x = torch.tensor([-1.0, 2.0], device="mps")
    library.same(x)
    assert x.tolist() == [0.0, 2.0]


def test_template_arguments_of_a_vector_may_be_on_several_lines() -> None:
    library = compiled("""
        using namespace metal;
        kernel void spread(device float4* x, constant float& part, uint i [[thread_position_in_grid]]) {
            x[i] = vec<float,
                       4>(part, x[i].yzw);
        }""")
    x = torch.arange(4.0).to("mps")
    library.spread(x, 7.0, threads=1)
    assert x.tolist() == [7.0, 1.0, 2.0, 3.0]


def test_a_function_may_be_there_for_constant_and_for_device_memory() -> None:
    pair = """
        inline float second({0} float* x) {{ return x[1]; }}

        inline float second({1} float* x) {{ return {2}; }}
        struct Pair {{
            float of[2];
            float sum() const {0} {{ return of[0] + of[1]; }}
            float sum() const {1} {{ return of[0] + of[1]; }}
        }};
        kernel void add(device float* x, constant float* y, constant Pair& c, device const Pair& d) {{
            x[0] = second(x) + second(y) + c.sum() + d.sum(); }}
        """
    x, y = mps(2), mps(2) + 10
    expected = x[1] + y[1] + y.sum() + y.sum()
    compiled(pair.format("constant", "const device", "x[1]")).add(x, y, y, y, threads=1)
    assert x[0] == expected
    # What is no such pair is the author's error, with his line.
    for two in (("constant", "const device", "x[0]"), ("constant", "constant", "x[1]")):
        with pytest.raises(SyntaxError, match=r"program_source:4:.* redefinition of 'second'"):
            compiled(pair.format(*two))


def test_errors_name_line_and_column_of_the_author_s_text() -> None:
    source = """#define NEXT(x) ((x) + 1)
kernel void first(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = NEXT(missing); }
kernel void second(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = 1 }
"""
    with pytest.raises(SyntaxError) as raised:
        compiled(source)
    first, second = str(raised.value).splitlines()[1:]
    assert first.startswith("program_source:2:")
    assert "undeclared identifier 'missing'" in first
    assert second == f"program_source:3:{source.splitlines()[2].index(' }') + 1}: error: expected ';' after expression"


def test_an_access_out_of_bounds_names_kernel_thread_and_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "kernel void past(device float* x, uint i [[thread_position_in_grid]]) { x[i + 1] = 0; }"
    with pytest.raises(OutOfBounds, match=r"past of program_source: the thread \(7, 0, 0\) .* 4 bytes .* of x"):
        compiled(source).past(torch.zeros(8, device="mps"))
    monkeypatch.setenv("HF_MPS_SHADERS", "unchecked")
    whole = torch.ones(9, device="mps")
    compiled(source).past(whole[:8])  # the memory behind is the storage's own
    assert whole[8] == 0


def test_what_a_mac_would_read_unbound_is_refused() -> None:
    library = compiled("""
        kernel void two(device float* x, constant float& y, uint i [[thread_position_in_grid]]) { x[i] = y; }
        kernel void sized(device float* x, threadgroup float* part, uint i [[thread_position_in_grid]]) {
            x[i] = part[i];
        }
        [[max_total_threads_per_threadgroup(64)]]
        kernel void small(device float* x, uint i [[thread_position_in_grid]]) { x[i] = i; }
        """)
    x = torch.zeros(128, device="mps")
    with pytest.raises(
        RuntimeError, match=r"two: nothing is bound at buffer\(1\), which is 'y'; 1 arguments were given"
    ):
        library.two(x)
    with pytest.raises(RuntimeError, match=r"sized: .*cannot state the size of 'part'"):
        library.sized(x)
    with pytest.raises(RuntimeError, match="a threadgroup of 128 threads; Metal launches 1 to 64"):
        library.small(x, group_size=128)
    with pytest.raises(RuntimeError, match="Passed CPU tensor to MPS op"):
        library.small(torch.zeros(3))
    with pytest.raises(RuntimeError, match="Failed to create function state object for: missing"):
        library.missing(x)
    library.small(x)
    assert x.tolist() == list(range(128))


def test_without_a_clang_the_line_has_the_command_that_installs_one(run_python: Any) -> None:
    code = """
import os, sys
sys.modules["ziglang"] = None
os.environ["PATH"] = ""
import torch
try:
    torch.mps.compile_shader("kernel void f(device float* x) { x[0] = 1; }")
except Exception as error:
    print(error)
"""
    done = run_python("-c", code)
    assert done.stdout.strip().endswith('there is none here; next: pip install "hf_mps[metal-source]"')
