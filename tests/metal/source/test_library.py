"""Metal's standard library: each function computes what its specification says, within Metal's own error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

X = torch.linspace(-3, 3, 41, dtype=torch.float64)
UNIT = torch.linspace(-0.99, 0.99, 41, dtype=torch.float64)
POSITIVE = torch.linspace(0.01, 5, 41, dtype=torch.float64)
ULP = {torch.float: 4 * 2.0**-23, torch.half: 4 * 2.0**-10, torch.bfloat16: 4 * 2.0**-7}
NAMES = {torch.float: "float", torch.half: "half", torch.bfloat16: "bfloat"}

ONE: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    **{name: (getattr(torch, name), X) for name in (
        "exp", "exp2", "sin", "cos", "tan", "atan", "sinh", "cosh", "tanh", "asinh", "floor", "ceil", "trunc", "abs",
        "sign",
    )},
    **{name: (getattr(torch, name), POSITIVE) for name in ("log", "log2", "log10", "sqrt", "rsqrt")},
    **{name: (getattr(torch, name), UNIT) for name in ("asin", "acos", "atanh")},
    "exp10": (lambda x: 10**x, X),
    "acosh": (torch.acosh, POSITIVE + 1),
    "sinpi": (lambda x: torch.sin(x * torch.pi), UNIT),
    "cospi": (lambda x: torch.cos(x * torch.pi), UNIT),
    "rint": (torch.round, X),
    "fract": (lambda x: x - x.floor(), X),
    "saturate": (lambda x: x.clamp(0, 1), X),
}  # fmt: skip
TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in ("pow", "atan2", "fmod", "fmin", "fmax", "copysign")},
    "min": torch.minimum, "max": torch.maximum, "step": lambda edge, x: (x >= edge).double(),
}  # fmt: skip


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
def test_functions_of_one_and_two_numbers(dtype: torch.dtype) -> None:
    kind = NAMES[dtype]
    # Of a bfloat, Apple's library leaves open which min and max are meant, and is asked for fmin and fmax.
    two = {
        name: function for name, function in TWO.items() if (kind, name) not in {("bfloat", "min"), ("bfloat", "max")}
    }
    body = "".join(
        f"kernel void one_{name}(device {kind}* x, uint i [[thread_position_in_grid]]) {{ x[i] = {name}(x[i]); }}\n"
        for name in ONE
    ) + "".join(
        f"kernel void two_{name}(device {kind}* x, device {kind}* y, uint i [[thread_position_in_grid]]) "
        f"{{ x[i] = {name}(x[i], y[i]); }}\n"
        for name in two
    )
    library = torch.mps.compile_shader(f"using namespace metal;\n{body}")
    wrong = {}
    for name, (function, given) in ONE.items():
        x = given.to(dtype)
        expected, found = function(x.double()), x.to("mps")
        getattr(library, f"one_{name}")(found)
        wrong[name] = _error(found, expected, dtype)
    for name, both in two.items():
        x, y = POSITIVE.to(dtype), POSITIVE.flip(0).to(dtype)
        expected, found = both(x.double(), y.double()), x.to("mps")
        getattr(library, f"two_{name}")(found, y.to("mps"))
        wrong[name] = _error(found, expected, dtype)
    assert {name: error for name, error in wrong.items() if not error <= 1} == {}


def _error(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """The largest error in units of what is allowed: four last places, of the number or of one."""
    allowed = ULP[dtype] * expected.abs().clamp(min=1)
    return float(((found.cpu().double() - expected).abs() / allowed).max())


def test_integers_and_bits() -> None:
    library = torch.mps.compile_shader("""
        using namespace metal;
        kernel void bits(device uint* x, device uint4* out, uint i [[thread_position_in_grid]]) {
            uint v = x[i];
            out[4 * i] = uint4(popcount(v), clz(v), ctz(v), reverse_bits(v));
            out[4 * i + 1] = uint4(rotate(v, 5u), extract_bits(v, 4, 8), insert_bits(v, 0xffu, 8, 4),
                                   mulhi(v, 0xdeadbeefu));
            out[4 * i + 2] = uint4(min(v, 7u), max(v, 7u), clamp(v, 3u, 9u), absdiff(v, 100u));
            out[4 * i + 3] = uint4(abs(int(v)), as_type<uint>(as_type<float>(v)), uchar4(1, 2, 3, 4).zy);
        }""")
    numbers = [0, 1, 6, 0x80000001, 0x7F800000, 0xFFFFFFFF]
    x = torch.tensor(numbers, dtype=torch.int64).to(torch.uint32).to("mps")
    out = torch.zeros(len(numbers), 16, dtype=torch.uint32, device="mps")
    library.bits(x, out, threads=len(numbers))
    for v, row in zip(numbers, out.cpu().to(torch.int64).tolist(), strict=True):
        text = f"{v:032b}"
        rotated = ((v << 5) | (v >> 27)) & 0xFFFFFFFF
        trailing = 32 if v == 0 else len(text) - len(text.rstrip("0"))
        signed = v - (1 << 32) if v >> 31 else v
        assert row == [
            *(text.count("1"), 32 - v.bit_length(), trailing, int(text[::-1], 2)),
            *(rotated, v >> 4 & 0xFF, v & ~0xF00 | 0xF00, v * 0xDEADBEEF >> 32),
            *(min(v, 7), max(v, 7), min(max(v, 3), 9), abs(v - 100)),
            *(abs(signed) & 0xFFFFFFFF, v, 3, 2),
        ], hex(v)


def test_vectors_matrices_and_comparisons() -> None:
    library = torch.mps.compile_shader("""
        using namespace metal;
        kernel void mixed(device float4* out, device const packed_float3* p) {
            float3 a = float3(p[0]), b = p[1];
            out[0] = float4(cross(a, b), dot(a, b));
            out[1] = float4(length(a), distance(a, b), normalize(a).x, any(a > b) ? 1 : 0);
            bool3 less = a < b;
            out[2] = float4(select(a, b, less), all(less) ? 1 : 0);
            float2x2 m = float2x2(float2(1, 2), float2(3, 4));
            float2 v = m * float2(5, 6);
            out[3] = float4(v, (m * m)[1]);
            out[4] = float4(isnan(NAN), isinf(-INFINITY), isfinite(1.0f), signbit(-0.0f));
        }""")
    p = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 5.0]])
    out = torch.zeros(5, 4, device="mps")
    library.mixed(out, p.to("mps"), threads=1)
    a, b = p
    expected = [
        [*torch.linalg.cross(a, b).tolist(), (a @ b).item()],
        [a.norm().item(), (a - b).norm().item(), (a / a.norm())[0].item(), 1.0],
        [3.0, 2.0, 5.0, 0.0],
        [23.0, 34.0, 15.0, 22.0],
        [1.0, 1.0, 1.0, 1.0],
    ]
    torch.testing.assert_close(out.cpu(), torch.tensor(expected))


def test_a_simdgroup_s_functions() -> None:
    library = torch.mps.compile_shader("""
        using namespace metal;
        kernel void group(device const int* x, device int* out, uint i [[thread_index_in_simdgroup]]) {
            int v = x[i];
            int all[] = {simd_sum(v), simd_max(v), simd_min(v), simd_prefix_inclusive_sum(v),
                         simd_prefix_exclusive_sum(v), simd_shuffle(v, ushort(31 - i)),
                         simd_shuffle_xor(v, 1), simd_broadcast(v, 7),
                         simd_shuffle_and_fill_down(v, -1, 2), simd_shuffle_and_fill_up(v, -1, 2), quad_sum(v),
                         simd_any(v > 90) ? 1 : 0, simd_all(v >= 0) ? 1 : 0,
                         int(ulong(simd_ballot(v % 2 == 0)) >> i & 1)};
            for (int k = 0; k < 14; ++k) out[k * 32 + i] = all[k];
        }""")
    x = torch.randint(0, 100, (32,), dtype=torch.int32)
    out = torch.zeros(14, 32, dtype=torch.int32, device="mps")
    library.group(x.to("mps"), out, threads=32, group_size=32)
    lanes = torch.arange(32)
    same = torch.ones(32, dtype=torch.int64)
    expected = [
        x.sum() * same, x.max() * same, x.min() * same, x.cumsum(0), x.cumsum(0) - x, x.flip(0), x[lanes ^ 1],
        x[7] * same,
        torch.cat([x[2:], torch.tensor([-1, -1])]), torch.cat([torch.tensor([-1, -1]), x[:-2]]),
        x.view(8, 4).sum(1).repeat_interleave(4), (x > 90).any() * same, same, (x % 2 == 0) * same,
    ]  # fmt: skip
    for row, right in zip(out.cpu(), expected, strict=True):
        assert row.tolist() == right.tolist()
