"""The arguments of the calls: OpInfo's samples, a few for each operator and dtype, and their twins on the device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_map

from scripts.conformance.opinfo import seed

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64)
SAMPLES = 5
# Some samples are made to be large; what they test (speed, overflow of 32-bit sizes) is not what is compared here.
MOST_ELEMENTS = 200_000


def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


# The split points of this one are read on the CPU; a tensor of them on any other device is an error there too.
KEPT_ON_CPU = {"tensor_split"}


def take(operator: Any, dtype: torch.dtype) -> Iterator[Any]:
    """The first SAMPLES samples of `operator` on the CPU, the same in every process and run."""
    seed(20)
    random.seed(20)
    gradients = dtype.is_floating_point and operator.supports_autograd
    made = operator.sample_inputs("cpu", dtype, requires_grad=gradients)
    for sample in islice((sample for sample in made if _elements(sample) <= MOST_ELEMENTS), SAMPLES):
        if operator.name in KEPT_ON_CPU:
            for tensor in (leaf for leaf in sample.args if isinstance(leaf, torch.Tensor)):
                tensor.stays_on_cpu = True
        yield sample


def _elements(sample: Any) -> int:
    leaves = torch.utils._pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


def copied(tree: Any, device: str) -> Any:
    """`tree` with every tensor and every mention of a device on `device`: own memory, same strides and offsets."""
    return tree_map(lambda leaf: _copied_leaf(leaf, device), tree)


def _copied_leaf(leaf: Any, device: str) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _twin(leaf, "cpu" if getattr(leaf, "stays_on_cpu", False) else device)
    if isinstance(leaf, torch.device):
        return torch.device(device)
    if isinstance(leaf, torch.Generator):
        return torch.Generator(device).manual_seed(leaf.initial_seed())
    return device if leaf == "cpu" and isinstance(leaf, str) else leaf


def _twin(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if tensor.layout != torch.strided:
        return tensor.detach().clone().to(device).requires_grad_(tensor.requires_grad)
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    # The conjugate and negative bits are a view's, not memory's; a sample that has them is copied as its values.
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().detach().requires_grad_(tensor.requires_grad)
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.detach().as_strided((size,), (1,), 0).clone().to(device)
    twin = whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return twin.requires_grad_(tensor.requires_grad)
