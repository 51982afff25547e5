"""linear-shapes: the gradients of a linear layer are those of matrices where Metal's graph would end Python."""

from __future__ import annotations

from typing import Any

from hf_mps.core.original_call import OriginalCall
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.kernel_overrides import Kernel
from hf_mps.metal.device import machine

DEEP = 4
"""Dimensions above which the graph flattens its input, which macOS 27 does not compile (pytorch#187201)."""


class LinearShapes(Guard):
    """Puts a kernel before the device's `linear_backward`, below autograd; a call costs 2.5 µs more then.

    F.linear takes a weight of one dimension as a matrix of one row; its backward pass does not (pytorch#187988). Either
    fault is an assertion of Apple's.
    """

    name = "linear-shapes"
    what = (
        "the backward pass of F.linear ends Python where the weight has one dimension, and on macOS 27 where the input "
        "has five or more and two of them are 1"
    )
    untried = "a trial would end Python"
    patches = {"aten::linear_backward": Kernel("_linear_backward")}

    def _linear_backward(self, stock: OriginalCall, rows: Any, grad: Any, weight: Any, mask: Any) -> Any:
        vector = weight.dim() == 1
        if not vector and not _deep(rows.shape):
            return stock(rows, grad, weight, mask)
        what = "a weight of one dimension" if vector else "an input of many dimensions"
        self.acted(f"the gradients of a linear layer with {what} are computed as those of matrices", aloud=False)
        matrix = weight.unsqueeze(0) if vector else weight
        flat = rows.reshape(-1, rows.shape[-1]), grad.reshape(-1, matrix.shape[0])
        of_rows, of_weight, of_bias = stock.partial(*flat, matrix, mask)
        return (
            of_rows.view(rows.shape) if mask[0] else None,
            of_weight.view(weight.shape) if mask[1] else None,
            of_bias if mask[2] else None,
        )


def _deep(shape: Any) -> bool:
    """Whether the graph for this input is one that macOS 27 does not compile."""
    return len(shape) > DEEP and sum(size == 1 for size in shape) > 1 and machine.present().macos_at_least(27)


GUARD = LinearShapes()
