"""What counts as a Metal kernel that did not run: by the overload that was called."""

from __future__ import annotations

from collections import Counter

from hf_mps.metal.kernels.coverage import Counts, covered


def test_an_overload_that_is_a_graph_is_not_missing_though_another_is_a_kernel() -> None:
    calls = Counter({"aten::where.self": 3, "aten::add.Tensor": 2, "aten::add_.Tensor": 1})
    said = covered(Counts(calls, Counter({"add.Tensor": 2})), "2.13.0")
    assert said.others == {"an MPSGraph, compiled once for each shape": 3}
    assert said.missing == {("aten::add_.Tensor", "no rule"): 1}
    assert said.ran == 2


def test_a_kernel_that_somebody_compiled_is_none_of_the_releases_and_not_missing() -> None:
    said = covered(
        Counts(Counter({"metal::clip_float": 3, "aten::add.Tensor": 2}), Counter({"add.Tensor": 2})), "2.13.0"
    )
    assert (said.ran, said.missing, said.others) == (2, {}, {"compiled from source": 3})
