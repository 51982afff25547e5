"""What a call launches on a release: facts of its wheel, and PyTorch's own rules where its host has several ways."""

from __future__ import annotations

import pytest
import torch

from hf_mps.metal.operators import launch_class
from hf_mps.metal.operators.launch_class import Call, LaunchTable, Operand
from hf_mps.metal.operators.table import functions_file, parse, table

RELEASES = ("2.13.0", "2.14.1", "2.15.0")


def on(release: str, *, macos: tuple[int, int] = (15, 0)) -> LaunchTable:
    found = launch_class.table(release, macos=macos)
    assert found is not None
    return found


def tensor(*shape: int, dtype: str = "float32", dense: bool = True, device: str = "mps") -> Operand:
    return Operand(dtype, shape, dense, device)


def kind(release: str, operator: str, *inputs: Operand, result: Operand | None = None, **more: object) -> str:
    macos = more.pop("macos", (15, 0))
    results = () if result is None else (result,)
    table = on(release, macos=macos)
    found = table.of(Call(f"aten::{operator}", inputs, results, **more)).value  # type: ignore[arg-type]
    assert found in table.ways(f"aten::{operator}"), "a rule says what the code of the wheel cannot do"
    return found


def test_three_releases_need_no_fetching() -> None:
    assert launch_class.known() == RELEASES
    assert launch_class.table("2.13.0+cpu") is not None
    assert launch_class.table("2.9.0") is None
    assert launch_class.table("2.15.0.dev20261101") is None


@pytest.mark.skipif(not torch.__version__.startswith(RELEASES), reason="the installed torch is no release of the table")
def test_it_says_cpu_of_those_operators_alone_that_the_installed_dispatcher_has_no_kernel_of() -> None:
    found, stock = on(torch.__version__), table()
    on_cpu = {name for name in stock.native | stock.missing | stock.cpu if found.ways(name) == ("cpu",)}
    assert on_cpu == stock.missing | stock.cpu
    assert all(found.ways(name) for name in stock.native | stock.composite)


@pytest.mark.skipif(not torch.__version__.startswith(RELEASES), reason="the installed torch is no release of the table")
def test_an_operator_whose_schema_returns_a_view_launches_nothing() -> None:
    found = on(torch.__version__)
    views = []
    for name in parse(functions_file().read_bytes()).native:
        schema = torch._C._get_schema(*(name.partition(".")[::2]))
        if any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns):
            views.append(name)
    assert len(views) == 7
    assert {found.ways(name) for name in views} == {("view",)}


@pytest.mark.parametrize(
    ("operator", "classes"),
    [
        ("sin", "metal metal metal"),
        ("add.Tensor", "metal metal metal"),
        ("_fused_adamw_", "metal metal metal"),
        ("_softmax", "graph graph metal"),
        ("native_layer_norm_backward", "graph graph graph"),
        ("index_select", "graph metal metal"),
        ("sigmoid_backward", "graph metal metal"),
        ("sum.dim_IntList", "metal metal metal"),
        ("_ctc_loss", "cpu metal metal"),
        ("embedding", "graph metal metal"),
        ("transpose.int", "view view view"),
        ("linalg_inv_ex", "framework metal metal"),
        ("nll_loss_forward", "graph graph metal"),
        ("where.self", "graph graph metal"),
        ("take", "cpu cpu metal"),
    ],
)
def test_operators_move_from_the_cpu_and_from_graphs_to_kernels(operator: str, classes: str) -> None:
    assert [kind(release, operator, tensor(4, 4)) for release in RELEASES] == classes.split()


def test_matrix_products_are_graphs_but_for_whole_numbers_and_from_2_14_on_for_vectors() -> None:
    assert kind("2.13.0", "mm", tensor(8, 16), tensor(16, 4)) == "graph"
    assert kind("2.13.0", "addmm", tensor(4), tensor(8, 16), tensor(16, 4)) == "graph"
    assert kind("2.13.0", "mm", tensor(8, 16, dtype="int64"), tensor(16, 4, dtype="int64")) == "metal"
    assert kind("2.13.0", "mm", tensor(1, 16), tensor(16, 4)) == "graph"
    assert kind("2.14.1", "mm", tensor(1, 16), tensor(16, 4)) == "metal"
    assert kind("2.13.0", "bmm", tensor(2, 8, 16), tensor(2, 16, 4)) == "graph"
    assert kind("2.13.0", "bmm", tensor(32, 16384, 64), tensor(32, 64, 16384)) == "framework"


def test_a_linear_layer_is_apples_own_kernel_where_it_can_be_from_macos_15_on() -> None:
    operands = tensor(8, 32, 16), tensor(4, 16), tensor(4)
    assert kind("2.13.0", "linear", *operands) == "framework"
    assert kind("2.13.0", "linear", *operands, macos=(14, 0)) == "graph"
    assert kind("2.13.0", "linear", tensor(8, 16, dense=False), *operands[1:]) == "graph"


def test_what_no_rule_decides_is_mixed_and_names_the_ways() -> None:
    found = on("2.13.0").of(Call("aten::cross_entropy_loss", (tensor(8, 3),)))
    assert (found.value, found.reason) == ("mixed", "the host decides: graph, metal")


def test_attention_without_gradients_is_a_kernel_for_few_queries_and_for_many() -> None:
    few, many = (tensor(2, 4, queries, 64) for queries in (4, 64))
    keys = tensor(2, 4, 64, 64)
    name = "_scaled_dot_product_attention_math_for_mps"
    assert [kind(release, name, few, keys, keys) for release in RELEASES] == ["metal"] * 3
    assert [kind(release, name, many, keys, keys) for release in RELEASES] == ["metal"] * 3
    assert kind("2.13.0", name, many, keys, keys, tensor(2, 4, 64, 64, dtype="int64")) == "graph"
    narrow = tensor(2, 4, 64, 40)
    assert kind("2.13.0", name, narrow, narrow, narrow) == "graph"


def test_pools_are_kernels_where_their_windows_move_by_more_than_one_or_round_up() -> None:
    image = tensor(1, 3, 8, 8)
    assert kind("2.13.0", "max_pool2d", image, arguments=(None, (3, 3), (2, 2), (1, 1))) == "metal"
    assert kind("2.13.0", "max_pool2d_with_indices", image, arguments=(None, (3, 3), (1, 1))) == "graph"
    assert kind("2.13.0", "max_pool2d", image, arguments=(None, (2, 2))) == "metal"
    assert kind("2.13.0", "avg_pool2d", image, arguments=(None, (2, 2))) == "graph"
    assert kind("2.13.0", "avg_pool2d", image, arguments=(None, (2, 2), (), 0, True)) == "metal"


def test_convolutions_are_graphs_but_for_large_filters_from_2_14_on() -> None:
    image, filters = tensor(1, 3, 512, 512), tensor(8, 3, 3, 3)
    assert [kind(release, "convolution", image, filters) for release in RELEASES] == ["graph"] * 3
    assert kind("2.14.1", "convolution", image, tensor(8, 3, 256, 1)) == "metal"
    assert kind("2.13.0", "convolution_backward", image, image, filters) == "graph"


def test_convolutions_along_one_dimension_are_kernels_from_2_15_on() -> None:
    sound, filters = tensor(2, 80, 3000), tensor(384, 80, 3)
    one = (None, None, None, (1,), (1,), (1,), False)
    kinds = [kind(release, "convolution", sound, filters, arguments=one) for release in RELEASES]
    assert kinds == ["graph"] * 2 + ["metal"]
    transposed = (*one[:6], True)
    assert kind("2.15.0", "convolution", sound, filters, arguments=transposed) == "graph"
    assert kind("2.15.0", "convolution_backward", sound, sound, filters) == "graph"
    # What the host makes of it: an image and a filter of height one.
    flat, wide = tensor(2, 80, 1, 3000), tensor(384, 80, 1, 3)
    assert kind("2.15.0", "_mps_convolution", flat, wide, arguments=(None, None, None, (0, 1))) == "metal"
    assert kind("2.15.0", "_mps_convolution", flat, wide, arguments=(None, None, None, (1, 1))) == "graph"


def test_a_softmax_that_masks_whole_rows_follows_the_softmax() -> None:
    assert [kind(release, "_safe_softmax", tensor(8, 16)) for release in RELEASES] == ["graph"] * 2 + ["metal"]


def test_a_call_with_fewer_tensors_or_arguments_than_a_rule_knows_of_has_a_class() -> None:
    table, one = on("2.13.0"), tensor(8, 16)
    assert table.of(Call("aten::mm", (one,), (one,))).value == "mixed"
    assert table.encoded(Call("aten::slice_backward", (one,), (one,))) == ("metal",)


def test_other_libraries_operators_are_unknown() -> None:
    assert on("2.13.0").of(Call("torchvision::nms")).value == "unknown"
    assert on("2.13.0").of(Call("aten::linalg_polar")).value == "unknown"


def test_a_graph_serves_calls_of_the_same_shapes_and_dtypes() -> None:
    one = Call("aten::_softmax", (tensor(8, 16),), (tensor(8, 16),), (None, 1))
    assert one.graph == Call("aten::_softmax", (tensor(8, 16),)).graph
    assert one.graph != Call("aten::_softmax", (tensor(8, 32),)).graph
    assert one.graph != Call("aten::_softmax", (tensor(8, 16, dtype="float16"),)).graph
