"""How many dispatches, graphs and blits a call is on a release, and how many encoders a row of calls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_mps.metal.operators import launch_class
from hf_mps.metal.operators.calls import call_of, read, text_of
from hf_mps.metal.operators.launch_class import Call, LaunchTable, Operand, encoders, multi_tensor
from tests.metal.operators.test_launch_class import on, tensor

RELEASES = ("2.13.0", "2.14.1")
M, G, B = "metal", "graph", "blit"


def encoded(release: str, operator: str, *inputs: Operand, result: Operand | None = None, **more: object) -> str:
    """The classes as letters: "MMG" is two dispatches and a graph."""
    call = Call(f"aten::{operator}", inputs, () if result is None else (result,), **more)  # type: ignore[arg-type]
    return "".join(kind[0].upper() for kind in on(release).encoded(call))


def test_a_concatenation_is_a_blit_for_each_dense_input_before_2_14_and_a_dispatch_else() -> None:
    """Shape.mm; pytorch#188198."""
    parts = tensor(2, 4), tensor(0, 4), tensor(3, 4), tensor(1, 4)
    assert [encoded(release, "cat", *parts, lists=(4,)) for release in RELEASES] == ["BBB", "MMM"]
    assert encoded("2.13.0", "cat", *parts, arguments=(None, 1), lists=(4,)) == "MMM"
    assert encoded("2.13.0", "cat.out", *parts, tensor(6, 4), lists=(4,)) == "BBB", "the result is no input"


@pytest.mark.parametrize("operator", ["_foreach_add_.Scalar", "_foreach_mul.List", "_foreach_norm.Scalar"])
def test_operators_on_lists_loop_over_the_first_list(operator: str) -> None:
    """ForeachOpsKernels.cpp: Metal has no kernels for lists."""
    several = [tensor(4)] * 6
    assert [encoded(release, operator, *several, lists=(3, 3)) for release in RELEASES] == ["MMM"] * 2


def test_the_fused_optimizers_dispatch_for_2m_elements_or_32_tensors() -> None:
    """MultiTensorApply.h: 32 threadgroups, each for 65,536 elements of one tensor."""
    assert multi_tensor([4] * 32) == 1
    assert multi_tensor([4] * 33) == 2
    assert multi_tensor([65536 * 32]) == 1
    assert multi_tensor([65536 * 33]) == 2
    assert multi_tensor([65536 * 20] * 2) == 2
    assert multi_tensor([65536 * 33, *[4] * 31]) == 2
    assert multi_tensor([65536 * 33, *[4] * 32]) == 3, "a tensor that goes on counts among the 32 of the next one"
    assert multi_tensor([0, 0]) == 0
    lists = [tensor(8)] * 66
    assert encoded("2.13.0", "_fused_adamw_", *lists, lists=(33, 33)) == "MM"


@given(
    st.lists(st.integers(0, 2) | st.integers(0, 40).map(lambda chunks: 65536 * chunks + 1), max_size=90), st.booleans()
)
def test_dispatches_are_counted_as_they_are_made(sizes: list[int], alone: bool) -> None:
    assert multi_tensor(sizes, alone=alone) == len(list(launch_class.batches(sizes, alone=alone)))


def test_gradscalers_kernel_for_a_list_dispatches_each_tensor() -> None:
    """Amp.mm, MultiTensorApply.h: GPT-2's token embedding alone is 19 dispatches of at most 2,048 threads."""
    name, scale = "_amp_foreach_non_finite_check_and_unscale_", (tensor(), tensor())
    assert encoded("2.13.0", name, tensor(8), tensor(0), tensor(8), *scale, lists=(3,)) == "MM"
    assert len(encoded("2.13.0", name, tensor(50257, 768), *scale, lists=(1,))) == 19
    assert encoded("2.13.0", name, tensor(8, dense=False), tensor(8), *scale, lists=(2,)) == "MM"


@pytest.mark.parametrize(
    ("wanted", "graphs"), [((1, 1, 1), "GG GGM"), ((1, 1, 0), "GG GG"), ((0, 1, 0), "G G"), ((0, 0, 1), "G GM")]
)
def test_a_linear_layers_gradients_are_two_graphs_and_from_2_14_on_a_sum(wanted: tuple[int, ...], graphs: str) -> None:
    """Linear.mm: from 2.14 on it calls mm, mm and sum."""
    operands = tensor(8, 16), tensor(8, 4), tensor(4, 16)
    found = [encoded(release, "linear_backward", *operands, arguments=(None,) * 3 + (wanted,)) for release in RELEASES]
    assert found == graphs.split()


def test_a_convolutions_gradients_are_two_graphs_and_a_sum() -> None:
    """Convolution.mm, and native/Convolution.cpp for the bias."""
    operands = tensor(2, 8, 6, 6), tensor(2, 3, 8, 8), tensor(8, 3, 3, 3)
    arguments = (*(None,) * 10, (1, 1, 1))
    found = [encoded(release, "convolution_backward", *operands, arguments=arguments) for release in RELEASES]
    assert found == ["GGM", "GGM"]
    first_layer = (*(None,) * 10, (0, 1, 0))
    assert encoded("2.13.0", "convolution_backward", *operands, arguments=first_layer) == "G"


@pytest.mark.parametrize(
    ("operator", "found"),
    [
        ("embedding_dense_backward", "MM MM"),  # Embedding.mm: zeros first
        ("native_layer_norm_backward", "G G"),  # Normalization.mm: one graph for all three
        ("_softmax", "G G"),
    ],
)
def test_operators_whose_dispatches_a_release_changed(operator: str, found: str) -> None:
    assert [encoded(release, operator, tensor(4, 4)) for release in RELEASES] == found.split()


def test_copies_between_host_and_device_are_blits_with_a_kernel_where_memory_is_strided_or_of_another_dtype() -> None:
    """Copy.mm."""
    here, there, half = tensor(4, 4), tensor(4, 4, device="cpu"), tensor(4, 4, dtype="float16", device="cpu")
    gaps = tensor(4, 4, dense=False)
    assert encoded("2.13.0", "copy_", here, there) == "B"
    assert encoded("2.13.0", "copy_", gaps, there) == "BM"
    assert encoded("2.13.0", "copy_", there, gaps) == "MB"
    assert [encoded(release, "_to_copy", here, result=half) for release in RELEASES] == ["MB", "MB"]
    assert encoded("2.13.0", "copy_", here, gaps) == "M"
    assert encoded("2.13.0", "clone", here, result=here) == "B"


def test_gradients_of_views_are_zeros_and_a_copy() -> None:
    """native/TensorShape.cpp."""
    first, token = {"arguments": (None, (8, 4), 0, 0)}, {"arguments": (None, (2, 8, 4), 1, 0)}
    assert encoded("2.13.0", "select_backward", tensor(4), result=tensor(8, 4), **first) == "MB"
    assert encoded("2.13.0", "select_backward", tensor(2, 4), result=tensor(2, 8, 4), **token) == "MM"
    every_other = {"arguments": (None, (8, 4), 0, 0, 8, 2)}
    assert encoded("2.13.0", "slice_backward", tensor(4, 4), result=tensor(8, 4), **every_other) == "MM"


def test_a_softmax_made_safe_is_five_operators() -> None:
    """native/transformers/attention.cpp."""
    assert encoded("2.13.0", "_safe_softmax", tensor(2, 8, 8), result=tensor(2, 8, 8)) == "GGMMG"


def test_views_and_what_the_cpu_runs_encode_nothing() -> None:
    assert encoded("2.13.0", "transpose.int", tensor(4, 4)) == ""
    assert encoded("2.13.0", "_ctc_loss", tensor(4, 4)) == ""


def test_kernels_share_an_encoder_until_something_else_comes() -> None:
    """MPSStream.mm, Linear.mm."""
    assert encoders([(M, M), (M,)]) == 1
    assert encoders([(M,), (G,), (M,)]) == 3
    assert encoders([(G, G)]) == 2
    assert encoders([(B, B, B)]) == 1, "the blits of one call"
    assert encoders([(B,), (B,)]) == 2
    assert encoders([("framework",), (M,)]) == 1
    assert encoders([(M,), ("framework",)]) == 2


def test_releases_that_need_fetching_are_counted_as_the_next_older_one() -> None:
    found: list[LaunchTable] = [launch_class.nearest(release) for release in ("2.12.1", "2.13.1+cpu", "2.99.0")]
    assert [each.release for each in found] == ["2.13.0", "2.13.0", launch_class.known()[-1]]


def test_a_call_is_read_from_the_text_that_it_was_written_as() -> None:
    weights = [torch.ones(2, 3), torch.ones(3, 2).t()]
    call = call_of("aten::cat", ((weights, 1), {"out": torch.ones(4, 3)}), ())
    assert call.lists == (2,)
    assert [each.dense for each in call.inputs] == [True, False, True]
    assert read(text_of(call)) == call
