"""One call becomes many: other strides, offsets and sizes, with the same values or ones that are spread alike."""

from __future__ import annotations

import pytest
import torch

from scripts.conformance import calls, layouts, reproduction, schema
from scripts.conformance.calls import Call

GIVEN = torch.arange(24.0).reshape(4, 6)
CALL = Call("mul.Tensor", (GIVEN, GIVEN + 1), {}, "here")


@pytest.mark.parametrize(
    ("layout", "strides", "offset"),
    [("dense", (6, 1), 0), ("transposed", (1, 4), 0), ("strided", (12, 2), 0), ("offset", (6, 1), 3)],
)
def test_a_layout_keeps_the_values(layout: str, strides: tuple[int, ...], offset: int) -> None:
    changed = layouts.laid_out(CALL, layout)
    first = changed.tensors[0]
    assert torch.equal(first, GIVEN)
    assert (first.stride(), first.storage_offset()) == (strides, offset)


def test_broadcast_has_strides_of_zero_and_never_in_what_is_written() -> None:
    changed = layouts.laid_out(CALL._replace(operator="mul_.Tensor"), "broadcast")
    assert [each.stride() for each in changed.tensors] == [(6, 1), (0, 1)]


def test_a_layout_that_changes_nothing_is_no_case() -> None:
    assert layouts.laid_out(Call("exp", (torch.tensor(1.0),), {}, ""), "strided") is None


def test_sizes_change_equal_dimensions_alike() -> None:
    shapes = {size: layouts.sized(CALL, size) for size in ("one", "empty", "large")}
    assert [tuple(each.shape) for each in shapes["one"].tensors] == [(1, 1), (1, 1)]
    assert [tuple(each.shape) for each in shapes["empty"].tensors] == [(0, 6), (0, 6)]
    first, second = shapes["large"].tensors
    assert first.shape == second.shape
    assert layouts.LARGE <= first.numel() <= layouts.LARGEST


def test_a_shape_among_the_arguments_changes_with_them() -> None:
    call = Call("native_layer_norm", (GIVEN, [6], torch.ones(6), None, 1e-5), {}, "")
    large = layouts.sized(call, "large")
    assert large.arguments[1] == [large.arguments[0].shape[-1]] == [large.arguments[2].shape[0]]


def test_sorted_integers_stay_sorted_and_places_stay_inside() -> None:
    table, indices, offsets = torch.ones(10, 5), torch.tensor([8, 7, 0, 5, 7]), torch.tensor([0, 3])
    call = Call("_embedding_bag", (table, indices, offsets), {}, "")
    large, one = layouts.sized(call, "large"), layouts.sized(call, "one")
    begins = large.arguments[2]
    assert begins[0] == 0
    assert begins.diff().min() >= 0
    assert [int(each.max()) for each in one.arguments[1:]] == [0, 0]
    assert layouts.sized(Call("embedding", (table[:5], indices), {}, ""), "empty") is not None
    assert layouts.sized(Call("embedding", (table[:2], indices), {}, ""), "empty") is None


def test_a_schema_is_enough_for_arguments() -> None:
    found = schema.generated("_amp_foreach_non_finite_check_and_unscale_")
    assert found
    assert all(len(call.arguments[0]) == 3 for call in found)


def test_a_call_is_written_as_a_program_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    strided = layouts.laid_out(CALL._replace(operator="mul_.Tensor"), "strided")
    assert strided is not None
    text = reproduction.program(strided, "2.13.0", "a case")
    head, *body, end = text.splitlines()
    assert (head, end) == ("HF_MPS_SIMULATE=1 HF_MPS_KERNELS=2.13.0 python - <<'END'", "END")
    scope: dict[str, object] = {}
    exec("\n".join(body).replace('"mps"', '"cpu"'), scope)
    assert capsys.readouterr().out.count(str(GIVEN * (GIVEN + 1))[:30]) == 4
    result = calls.run(calls.on(strided, "cpu"))
    assert torch.equal(result[0], GIVEN * (GIVEN + 1))
