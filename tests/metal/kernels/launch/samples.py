"""PyTorch's own samples of an operator on a release's kernels, results and gradients compared with the CPU's."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hf_mps.metal.kernels.rules import Dispatch
from scripts.conformance.opinfo import operators
from tests.metal.simulator.conformance.samples import copied

TOLERANCE = {torch.float32: 1e-4, torch.complex64: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}

REFUSED = ("Adaptive pool MPS: Input height and width must both be",)
"""What a Mac refuses too, in its words, among the samples of some releases (since 2.15, adaptive_max_pool2d's)."""


@dataclass
class Samples:
    """How many samples were taken, how many of them a rule ran, and a line for each whose values differ."""

    taken: int = 0
    ran: int = 0
    differ: list[str] = field(default_factory=list)


def compared(
    kernels: Dispatch,
    operator: str,
    dtype: torch.dtype,
    *,
    variant: str | None = None,
    tolerance: float | None = None,
    every: int = 1,
) -> Samples:
    """Run the samples of an operator ("nn.functional.avg_pool2d") that the CPU runs: forward, and backward if it can.

    Integers and booleans agree exactly, other numbers within `tolerance`, relative and absolute. Of operators with
    thousands of samples, `every` takes each third, tenth, …; of those with variants, `variant` takes one.
    """
    found = Samples()
    allowed = tolerance if tolerance is not None else TOLERANCE.get(dtype, 0.0)
    for info in _named(operator):
        if not info.supports_dtype(dtype, "cpu") or variant not in (None, info.variant_test_name):
            continue
        floating = dtype.is_floating_point or dtype.is_complex
        graded = floating and info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
        for sample in islice(info.sample_inputs("cpu", dtype, requires_grad=graded), 0, None, every):
            try:
                wanted = _results(info, sample, "cpu", graded)
            except (RuntimeError, NotImplementedError):
                continue
            kernels.ledger.clear()
            try:
                got = _results(info, sample, "mps", graded)
            except NotImplementedError as error:
                if not str(error).startswith(REFUSED):
                    raise
                continue
            found.taken += 1
            found.ran += bool(kernels.ledger.operators)
            found.differ += [f"{info.name} {dtype} {sample}: {why}" for why in _differences(wanted, got, allowed)]
    return found


@cache
def _named(operator: str) -> tuple[Any, ...]:
    return tuple(info for info in operators() if info.name == operator)


def _results(info: Any, sample: Any, device: str, graded: bool) -> list[torch.Tensor | None]:
    """What an operator returns, then the gradients of all that asks for one, on the CPU."""
    given = copied((sample.input, sample.args, sample.kwargs), device)
    outputs = [each for each in tree_leaves(info(given[0], *given[1], **given[2])) if isinstance(each, torch.Tensor)]
    gradients: list[torch.Tensor | None] = []
    asking = [each for each in tree_leaves(given) if isinstance(each, torch.Tensor) and each.requires_grad]
    graded_outputs = [each for each in outputs if each.requires_grad]
    if graded and asking and graded_outputs:
        draw = torch.Generator().manual_seed(0)
        seeds = [torch.rand(each.shape, generator=draw).to(each.dtype).to(device) for each in graded_outputs]
        gradients = list(torch.autograd.grad(graded_outputs, asking, seeds, allow_unused=True))
    return [None if each is None else each.detach().cpu() for each in [*outputs, *gradients]]


def _differences(wanted: list[Any], got: list[Any], allowed: float) -> list[str]:
    found = []
    for right, ours in zip(wanted, got, strict=True):
        if right is None or ours is None:
            if right is not ours:
                found.append("a gradient on one of them alone")
            continue
        bound = allowed if right.is_floating_point() or right.is_complex() else 0.0
        try:
            torch.testing.assert_close(ours, right, rtol=bound, atol=bound, equal_nan=True)
        except AssertionError as error:
            found.append(str(error).splitlines()[0])
    return found
