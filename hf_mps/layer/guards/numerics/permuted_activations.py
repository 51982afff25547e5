"""permuted-activations: some activations and the backward passes of others are given tensors that lie contiguously."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hf_mps.core.original_call import OriginalCall
from hf_mps.core.patching import Patch
from hf_mps.layer.guards.kernel_overrides import Kernel, Tried

NORM = "native_batch_norm_backward"


class PermutedActivations(Tried):
    """Stands before those operators, below autograd, from where it is installed to its trial.

    The first of them that is called starts the trial of all, and those that are right are left to the device alone
    from then on; the others get contiguous copies of what is permuted or in channels_last.
    """

    name = "permuted-activations"
    what = (
        "the gradients of tanh, sigmoid, silu, relu, softplus, mish and batch norm are wrong where their input is"
        " permuted or in channels_last, and softplus, prelu and threshold have no results there"
    )
    given = "permuted tensors"

    @property
    def patches(self) -> dict[str, str | Patch]:
        """Its kernels before the device's, until the trial."""
        plain = ("permuted-activations", "permuted-results")
        kernels = {name: Kernel("_laid_out", name, alone=True, faults=plain) for name in TRIALS}
        kernels[NORM] = Kernel("_laid_out", NORM, alone=True, faults=self.faults)
        return {f"aten::{name}": kernel for name, kernel in kernels.items()}

    def _laid_out(self, name: str, stock: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        if not self.needed or name not in self._wrong:
            self.release(f"aten::{name}")
            return stock(*args, **kwargs)
        if not any(map(_loose, args)):
            return stock(*args, **kwargs)
        self.acted(f"permuted activations are copied: {self.verdict().reason}", aloud=False)
        return stock(*(each.contiguous() if _loose(each) else each for each in args), **kwargs)


def _loose(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and not value.is_contiguous()


def _of(name: str, *rest: Any, backward: bool = True) -> Callable[[Any, Any], Any]:
    def run(grad: Any, values: Any) -> Any:
        import torch

        # prelu's weight is a tensor, and its backward pass has a gradient of that too.
        weight = (values.new_full((1, 1, 1, 1), 0.25),) * ("prelu" in name)
        found = getattr(torch.ops.aten, name)(*(grad,) * backward, values, *weight, *rest)
        return found if isinstance(found, torch.Tensor) else found[0]

    return run


def _of_batch_norm(grad: Any, values: Any) -> Any:
    """The gradients of the input and of the weight."""
    import torch

    columns = values.transpose(1, -1).reshape(-1, values.shape[1]).float()
    mean, spread = columns.mean(0), columns.var(0, unbiased=False).add(1e-5).rsqrt()
    arguments = grad, values, torch.ones_like(mean), None, None, mean, spread, True, 1e-5, [True, True, True]
    of_input, of_weight, _ = torch.ops.aten.native_batch_norm_backward(*arguments)
    return torch.cat([of_input.flatten(), of_weight])


# Operator -> its result for gradients and values; values lie between 0 and 1, as results of tanh and sigmoid do.
TRIALS: dict[str, Callable[[Any, Any], Any]] = {
    "tanh_backward": _of("tanh_backward"),
    "sigmoid_backward": _of("sigmoid_backward"),
    "silu_backward": _of("silu_backward"),
    "softplus_backward": _of("softplus_backward", 1, 20),
    "mish_backward": _of("mish_backward"),
    "threshold_backward": _of("threshold_backward", 0.5),
    "logit_backward": _of("logit_backward"),
    "softplus": _of("softplus", 1, 20, backward=False),
    "threshold": _of("threshold", 0.5, 0, backward=False),
    "_prelu_kernel": _of("_prelu_kernel", backward=False),
    "_prelu_kernel_backward": _of("_prelu_kernel_backward"),
    NORM: _of_batch_norm,
}


def _right(run: Callable[[Any, Any], Any]) -> bool:
    """Whether it gives the CPU's result for an input in channels_last and for one that is permuted otherwise."""
    import torch

    count = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32, device="cpu").view(2, 3, 4, 5)
    grad, values = count.remainder(7), count.mul(77).remainder(120).div(150).add(0.1)
    # Nobody writes to these two, and they are there until the results are read: only that is a wait for the device.
    at_hand, there = grad.to("mps", non_blocking=True), values.to("mps", non_blocking=True)
    found, right = [], []
    for order in ((0, 3, 1, 2), (0, 2, 1, 3)):
        # Permuted on the device: a moved tensor could come as contiguous.
        permuted = there.permute(order)
        right.append(run(grad.view(permuted.shape), values.permute(order)).flatten())
        try:
            found.append(run(at_hand.view(permuted.shape), permuted).flatten())
        except RuntimeError:  # "view size is not compatible", of batch norm on macOS 26
            return False
    return torch.allclose(torch.cat(found).cpu(), torch.cat(right), rtol=1e-3, atol=1e-3)


GUARD = PermutedActivations({name: partial(_right, run) for name, run in TRIALS.items()})
