"""How far an export's logits may be from the model's, and what is said where they are farther."""

from __future__ import annotations

import numpy
import pytest

from hf_mps.core.errors import RunError
from hf_mps.tools.export.base import Comparison, difference


def test_the_relative_difference_is_that_of_the_norms_whatever_the_scale() -> None:
    model = [numpy.array([[3.0, 0.0], [0.0, 4.0]], dtype=numpy.float32)]
    export = [numpy.array([[3.0, 0.0], [0.0, 4.5]], dtype=numpy.float32)]
    for scale in (1.0, 1000.0):
        found = difference([scale * model[0]], [scale * export[0]], "q8")
        assert found.relative == pytest.approx(0.1)
        assert found.largest == pytest.approx(0.5 * scale)
        assert not found.within
    assert difference(model, export, "q4").within


def test_equal_answers_are_counted_over_positions() -> None:
    model = [numpy.array([[[1.0, 2.0], [5.0, 1.0]]]), numpy.array([[0.0, 1.0]])]
    export = [numpy.array([[[1.0, 2.0], [1.0, 5.0]]]), numpy.array([[0.0, 1.0]])]
    found = difference(model, export, "q4")
    assert (found.same, found.positions) == (2, 3)


def test_what_is_not_finite_is_never_near() -> None:
    model = [numpy.ones((1, 4))]
    assert not difference(model, [numpy.full((1, 4), numpy.nan)], "q4").within


def test_other_shapes_are_said() -> None:
    with pytest.raises(RunError, match=r"logits of shape \(1, 3\), the model \(1, 4\)"):
        difference([numpy.ones((1, 4))], [numpy.ones((1, 3))], "f32")


def test_an_export_that_is_too_far_is_refused_in_one_line() -> None:
    far = Comparison("a reader", difference([numpy.ones((1, 2))], [numpy.array([[1.0, 2.0]])], "bf16"))
    with pytest.raises(RunError) as refused:
        far.refuse("export gguf of teller")
    assert str(refused.value) == (
        "export gguf of teller: its logits, opened by a reader, are not the model's: relative difference 0.71 (allowed"
        " 0.03), largest 1, the same answer at 0 of 1 positions; nothing was written"
    )
