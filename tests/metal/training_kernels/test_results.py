"""Each kernel is as exact as PyTorch's own operators, and what would make it wrong is seen."""

from __future__ import annotations

import pytest
import torch

from hf_mps.metal.training_kernels import norms, rotary, trial
from hf_mps.metal.training_kernels.library import Source, threshold

BARRIER = "  threadgroup_barrier(mem_flags::mem_threadgroup);\n"
# Kernel -> what is changed in its source, each a mistake that an author makes.
MUTATIONS = {
    "clip": [
        (BARRIER, ""),
        ("tensors[chunk.x] + chunk.y;\n  float", "tensors[chunk.x] + chunk.y + 1;\n  float"),
        ("float sum = 0;\n  for (uint i", "half sum = 0;\n  for (uint i"),
    ]
}
MUTATIONS["layer-norm"] = MUTATIONS["rms-norm"] = [
    (BARRIER + "  const float2 part", "  const float2 part"),
    ("sums[group * columns + i] = kept[k]", "sums[group * columns + i + 1] = kept[k]"),
    ("float squares = 0;", "half squares = 0;"),
    ("row += groups) {", "row += groups + 1) {"),
    ("memory[lane] = sum;\n" + BARRIER, "memory[lane] = sum;\n"),
    # Not the group: a column that nobody writes may hold what an earlier call wrote there, which is right.
    ("other = lane + SIMDGROUP", "other = lane"),
    ("float(beside[first + i])", "float(beside[i])"),
]
MUTATIONS["residual-norm"] = [
    (BARRIER + "  const float2 part", "  const float2 part"),
    ("sums[group * columns + i] = kept[k]", "sums[group * columns + i + 1] = kept[k]"),
    ("float(residual[first + i]) + kept", "kept"),
    ("draw, call.threshold, first + i)", "draw, call.threshold, i)"),
    ("float(beside[first + i])", "float(beside[i])"),
    ("draw.y + place", "place"),
]
MUTATIONS["cross-entropy"] = [
    (BARRIER, ""),
    ("i == label ?", "i == label + 1 ?"),
    ("const float share = exp", "const half share = exp"),
    ("apart = 16", "apart = 8"),
]
MUTATIONS["attention"] = [
    ("    BARRIER;\n    add<", "    add<"),
    ("key > query)", "key >= query)"),
    ("const float power = seen", "const half power = seen"),
    ("arrived - through[r]", "arrived"),
    ("sum[r] = sum[r] * shrink", "sum[r] = sum[r]"),
    ("min(call.keys, first + BLOCK)", "min(call.keys, first)"),
    ("draw, one, place, row)", "draw, one, row, place)"),
    ("draw.y + place", "place"),
]
MUTATIONS["adam-8bit"] = [
    (BARRIER + "  return simd_max", "  return simd_max"),
    ("first_map[first[i]]", "first_map[first[i] + 1]"),
    ("(map[middle] + map[middle + 1]) / 2", "map[middle]"),
    ("const float weight", "const half weight"),
]
MUTATIONS["rotary"] = [
    ("-second * sine", "second * sine"),
    ("call.back ? second * far_sine", "call.back ? second * sine"),
    ("one >= call.heads", "one > call.heads"),
    ("second * far_cosine", "second * cosine"),
]
MUTATIONS["gelu"] = [
    ("number % sizes.x", "(number + 1) % sizes.x"),
    ("0.044715f * x * x);\n    slope", "0.0447f * x * x);\n    slope"),
    ("1.421413741f", "1.421f"),
    ("0.134145f", "0.044715f"),
    ("sum += arrived;", "sum = half(sum + arrived);"),
    ("threadgroup_barrier", "simdgroup_barrier"),
    ("row += width / SIMDGROUP", "row += width / SIMDGROUP + 1"),
]
MUTATIONS["swiglu"] = [
    ("float(gate[row * rows.gate + column]);", "float(gate[row * rows.gate + column + 1]);"),
    ("of_up[row * rows.of_up + column] = T(arrived * x", "of_up[row * rows.of_up + column] = T(arrived * x * x"),
    ("const float part = ", "const half part = "),
    ("(1.0f - part) * slope", "part * slope"),
]


@pytest.mark.parametrize("name", trial.FAMILIES)
def test_a_kernel_is_as_exact_as_pytorchs_own_operators(name: str) -> None:
    for case in trial.family(name).cases(name):
        ours, stock = trial.errors(case)
        assert ours <= max(2 * stock, trial.EXACT * torch.finfo(case.inputs[0].dtype).eps), case.label


@pytest.mark.rotated("-")  # of each family one in eight
@pytest.mark.parametrize(
    ("name", "right", "wrong"), [(name, *change) for name, changes in MUTATIONS.items() for change in changes]
)
def test_a_mistake_in_a_kernel_loses_its_trial(
    name: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source: Source = trial.family(name).SOURCE
    assert right in source.text
    monkeypatch.setitem(vars(source), "compiled", torch.mps.compile_shader(source.text.replace(right, wrong)))
    found = trial.outcome(name)
    assert not found.on
    assert "off by" in found.reason or "it failed: OutOfBounds" in found.reason


def test_cosines_and_sines_may_lie_in_memory_in_two_ways() -> None:
    draw = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 3, 5, 8, generator=draw).to("mps") for _ in range(2))
    cos, sin = (torch.randn(2, 9, 8, generator=draw).to("mps")[:, :5] for _ in range(2))
    wanted = rotary.written_out(query, key, cos, sin)
    for angles in ((cos, sin.contiguous()), (cos.contiguous(), sin), (cos, sin.mT.contiguous().mT)):
        torch.testing.assert_close(rotary.rotated(query, key, *angles), wanted)


def test_a_dropout_of_next_to_nothing_passes_the_gradient_on() -> None:
    draw = torch.Generator().manual_seed(0)
    given, residual = (torch.randn(8, 64, generator=draw).to("mps").requires_grad_() for _ in range(2))
    weight = torch.randn(64, generator=draw).to("mps")
    norms.normed("rms_norm", 1e-5, given, weight, None, residual, 1e-9, (0, 0))[0].sum().backward()
    torch.testing.assert_close(given.grad, residual.grad)
    assert (threshold(0.0), threshold(1e-9)) == (0, 1)


def test_every_kernel_has_mutations() -> None:
    assert set(MUTATIONS) == set(trial.FAMILIES)
