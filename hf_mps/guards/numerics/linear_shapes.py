"""linear-shapes: the gradients of a linear layer are those of matrices where Metal's graph would end Python."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.stock import Stock
from hf_mps.device import machine
from hf_mps.guards import kernel_overrides
from hf_mps.guards.base import Guard
from hf_mps.guards.introspect import torch_release
from hf_mps.guards.kernel_overrides import Kernel

FIXED = (2, 14)
"""Its backward pass multiplies matrices by `mm` instead of in a graph (pytorch PR 183535)."""
DEEP = 4
"""Dimensions above which the graph flattens its input, which macOS 27 does not compile (pytorch#187201)."""


class LinearShapes(Guard):
    """Puts a kernel before the device's `linear_backward`, below autograd; a call costs 2.5 µs more then.

    F.linear takes a weight of one dimension as a matrix of one row; its backward pass does not (pytorch#187988). Either
    fault is an assertion of Apple's, so it is not tried: the release decides.
    """

    name = "linear-shapes"
    what = (
        "the backward pass of F.linear ends Python where the weight has one dimension, and on macOS 27 where the input "
        "has five or more and two of them are 1"
    )
    issue = "https://github.com/pytorch/pytorch/issues/187988"
    until = "the oldest supported torch is 2.14"
    releases = "<2.14"
    patches = {"aten::linear_backward": Kernel("_linear_backward")}

    def applies(self) -> Choice[bool]:
        """Whether this release computes the gradients in the graph that ends Python."""
        import torch

        if torch_release() >= FIXED:
            return Choice(False, f"torch {torch.__version__} computes these gradients without MPSGraph")
        possible = kernel_overrides.given_out()
        if not possible.value:
            return possible
        return Choice(
            True, f"torch {torch.__version__} has the faults of pytorch#187988 and #187201; a trial would abort"
        )

    def concerns(self, module: ModuleType) -> bool:
        """Whether this release has the fault."""
        return torch_release() < FIXED and kernel_overrides.given_out().value

    def _linear_backward(self, stock: Stock, rows: Any, grad: Any, weight: Any, mask: Any) -> Any:
        vector = weight.dim() == 1
        if not vector and not _deep(rows.shape):
            return stock(rows, grad, weight, mask)
        what = "a weight of one dimension" if vector else "an input of many dimensions"
        self.acted(f"the gradients of a linear layer with {what} are computed as those of matrices", aloud=False)
        matrix = weight.unsqueeze(0) if vector else weight
        flat = rows.reshape(-1, rows.shape[-1]), grad.reshape(-1, matrix.shape[0])
        of_rows, of_weight, of_bias = stock.part(*flat, matrix, mask)
        return (
            of_rows.view(rows.shape) if mask[0] else None,
            of_weight.view(weight.shape) if mask[1] else None,
            of_bias if mask[2] else None,
        )


def _deep(shape: Any) -> bool:
    """Whether the graph for this input is one that macOS 27 does not compile."""
    return len(shape) > DEEP and sum(size == 1 for size in shape) > 1 and machine.present().macos_at_least(27)


GUARD = LinearShapes()
