"""The walk over pointwise operands is TensorIterator's: outputs lie as PyTorch's, and each element is met once."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hf_mps.metal.kernels.launch.pointwise import all_dense, broadcast, result, walk
from hf_mps.metal.kernels.values import NoRule

LAYOUTS = {
    "contiguous": lambda: torch.empty(2, 3, 4),
    "transposed": lambda: torch.empty(4, 3, 2).permute(2, 1, 0),
    "middle first": lambda: torch.empty(3, 2, 4).transpose(0, 1),
    "expanded": lambda: torch.empty(3, 1).expand(2, 3, 4),
    "every second": lambda: torch.empty(2, 3, 8)[..., ::2],
    "a row": lambda: torch.empty(4),
    "a column": lambda: torch.empty(3, 1),
    "ones": lambda: torch.empty(1, 1, 1),
    "a number": lambda: torch.empty(()),
    "one of one": lambda: torch.empty(2, 1, 4).transpose(1, 2).transpose(0, 1),
}


def broadcast_together(one: str, two: str) -> bool:
    try:
        broadcast(tuple(LAYOUTS[one]().shape), tuple(LAYOUTS[two]().shape))
    except NoRule:
        return False
    return True


PAIRS = [pair for pair in itertools.product(LAYOUTS, repeat=2) if broadcast_together(*pair)]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_an_output_has_the_strides_of_pytorchs(first: str, second: str) -> None:
    one, two = LAYOUTS[first](), LAYOUTS[second]()
    found = result(torch.float32, one, two)
    wanted = torch.add(one, two)
    assert (found.shape, found.stride()) == (wanted.shape, wanted.stride())


def test_channels_last_stays() -> None:
    image = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert result(torch.float32, image, image).is_contiguous(memory_format=torch.channels_last)
    assert walk(image, image).contiguous


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_walk_meets_each_element_once_with_its_own_inputs(first: str, second: str) -> None:
    one, two = LAYOUTS[first](), LAYOUTS[second]()
    output = result(torch.float32, one, two)
    way = walk(output, one, two)
    met = list(zip(*(_offsets(way.shape, steps) for steps in way.strides), strict=True))
    expected = zip(*(_places(each, output) for each in (output, one, two)), strict=True)
    assert sorted(met) == sorted(expected)


def test_operands_without_gaps_in_one_order_are_one_line() -> None:
    square = torch.empty(8, 8).t()
    assert walk(square, square) == ((64,), ((4,), (4,)), True)
    assert not walk(square, square.contiguous()).contiguous


def test_what_the_host_launches_in_parts_has_no_rule() -> None:
    large = torch.empty(1 << 30, device="meta")
    assert not all_dense(large, large)
    with pytest.raises(NoRule, match="2 GiB"):
        walk(large, large)
    assert walk(large[: 1 << 29], large[: 1 << 29]).contiguous


def _offsets(shape: tuple[int, ...], steps: tuple[int, ...]) -> list[int]:
    positions = itertools.product(*map(range, shape))
    return [sum(at * step for at, step in zip(position, steps, strict=True)) for position in positions]


def _places(tensor: Tensor, output: Tensor) -> list[int]:
    spread = tensor.expand(output.shape)
    return _offsets(tuple(spread.shape), tuple(stride * 4 for stride in spread.stride()))
