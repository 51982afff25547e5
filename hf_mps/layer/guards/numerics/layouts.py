"""Guards of copies and layouts.

non-blocking: copies to the CPU wait until they are done.
dtype-copies: a copy to the CPU that changes the dtype is a move, then a change.
non-contiguous: parameters are contiguous before they are trained.
permuted-activations: some activations and backward passes are given contiguous tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hf_mps.core.choice import Choice
from hf_mps.core.patching import OriginalCall
from hf_mps.layer.guards import training_hooks
from hf_mps.layer.guards.base import Guard, tried
from hf_mps.layer.guards.kernel_overrides import Kernel, Tried
from hf_mps.metal.device import faults


class NonBlocking(Guard):
    """Wraps Tensor.to and Tensor.copy_, the lowest place where a `non_blocking=True` can be seen.

    Module.to, accelerate's send_to_device, Trainer and BatchEncoding.to all end there. A kernel under aten::copy_ would
    lie lower, and would put Python into each of a step's thousands of copies.

    No release makes the CPU wait for a copy to it: whoever reads the result at once reads too soon. A copy to the
    device stays as it was asked for: torch holds its source until the GPU has read it (pytorch#181017). A script that
    writes to the source meanwhile changes what arrives, as with pinned memory on CUDA.
    """

    name = "non-blocking"
    what = "a non_blocking copy to the CPU is read before it is there: silent wrong values"
    until = "a non_blocking copy to the CPU is there when it is read"
    untried = "a race that a trial does not show is not known to be absent"
    patches = {"torch:Tensor.to": "_to", "torch:Tensor.copy_": "_copy"}

    def _to(self, stock: Any, tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("non_blocking") or (len(args) > 1 and True in args[1:])
        if asked and not has_its_own(tensor) and tensor.device.type == "mps" and target_device(args, kwargs) == "cpu":
            # By position it comes before `copy`, which changes nothing here: the CPU's tensor is a copy.
            args = (*args[:1], *(False if each is True else each for each in args[1:]))
            kwargs |= {"non_blocking": False} if "non_blocking" in kwargs else {}
            self._tell()
        return stock(tensor, *args, **kwargs)

    def _copy(self, stock: Any, tensor: Any, src: Any, *args: Any, **kwargs: Any) -> Any:
        asked = args[0] if args else kwargs.get("non_blocking")
        if asked and not has_its_own(tensor, src) and src.device.type == "mps" and tensor.device.type == "cpu":
            self._tell()
            return stock(tensor, src)
        return stock(tensor, src, *args, **kwargs)

    def _tell(self) -> None:
        self.acted("copies to the CPU wait: with non_blocking=True they would be read too early", aloud=False)


def has_its_own(*tensors: Any) -> bool:
    """Whether a tensor's class is asked first what a function of torch does: it is called, and calls the plain one.

    Its `__torch_function__` would be told of every attribute that is read before.
    """
    return torch.overrides.has_torch_function(tensors)


def target_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the device type that Tensor.to is asked for, or None where it only changes the dtype."""
    first = args[0] if args else kwargs.get("device", kwargs.get("tensor"))
    if isinstance(first, str):
        return first.partition(":")[0]
    device = getattr(first, "device", first)  # `to(other)` goes to another tensor's device
    kind = getattr(device, "type", None)
    return kind if isinstance(kind, str) else None


WIDE = ("torch.float64", "torch.complex128")
"""What torch 2.14.0 writes nothing of, without an error; 2.13 and 2.14.1 raise (pytorch#197715)."""


class DtypeCopies(Guard):
    """Wraps Tensor.to and Tensor.copy_ on the releases that have the fault; others keep their own methods.

    Up to 2.13 the device converts into the memory of the source where elements do not grow, unless the end happens to
    begin a page of memory (#189563), and reads a view's result at the wrong place (#194344): half weights that are
    saved, embeddings that are kept as float16. `tensor.to("cpu", torch.float64)`, which those releases refuse, works.
    Not seen: values assigned to a part of a CPU tensor (`kept[3:7] = there`) and Tensor.type_as.
    """

    name = "dtype-copies"
    what = "a copy from the device to the CPU that also changes the dtype overwrites its source or reads beside it"
    until = "the oldest supported torch is 2.14.1"
    patches = {"torch:Tensor.to": "_to", "torch:Tensor.copy_": "_copy"}

    untried = "a trial would depend on where the CPU's memory happens to lie"

    def trial(self) -> Choice[bool]:
        """Return whether such copies, to ends that begin no page of memory, leave their source and their end right."""
        with self.left_alone():
            wrong = [name for name, copied in COPY_TRIALS.items() if not copied()]
        copies = " and ".join(wrong or COPY_TRIALS)
        return tried(bool(wrong), f"wrong are copies {copies}", f"right are copies {copies}")

    def _to(self, stock: OriginalCall, tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not has_its_own(tensor) and tensor.device.type == "mps" and target_device(args, kwargs) == "cpu":
            # to(other), to(device, dtype), by position or by name
            other, named = args[0] if args else kwargs.get("tensor"), kwargs.get("dtype", args[1] if args[1:] else None)
            like = hasattr(other, "is_floating_point") and hasattr(other, "device")
            wanted = getattr(other, "dtype", None) if like else named
            if wanted is not None and self._wrong(tensor.dtype, wanted):
                tensor = stock.partial(tensor, "cpu")
        return stock(tensor, *args, **kwargs)

    def _copy(self, stock: OriginalCall, tensor: Any, src: Any, *args: Any, **kwargs: Any) -> Any:
        plain = not has_its_own(tensor, src)
        if plain and src.device.type == "mps" and tensor.device.type == "cpu" and self._wrong(src.dtype, tensor.dtype):
            src = stock.foreign(src.to, "cpu")
        return stock(tensor, src, *args, **kwargs)

    def _wrong(self, given: Any, wanted: Any) -> bool:
        if given == wanted or (str(wanted) not in WIDE and not faults.possible("dtype-copies")) or not self.needed:
            return False
        self.acted("copies to the CPU that also change the dtype are made in two steps", aloud=False)
        return True


def _keeps_its_source() -> bool:
    """Return whether 1,024 values are the same after a copy of them as float16 (pytorch#189563)."""
    values = torch.arange(1024.0, device="cpu")
    there = values.to("mps")
    end = torch.zeros(1027, dtype=torch.float16, device="cpu")[3:]  # begins no page of memory
    end.copy_(there)
    return torch.equal(there.cpu(), values) and torch.equal(end, values.half())


def _reads_a_view() -> bool:
    """Return whether a view that begins behind its storage's first value arrives as it is (pytorch#194344)."""
    values = torch.arange(1024.0, device="cpu")
    return torch.equal(values.to("mps")[512:].to("cpu", torch.float16), values[512:].half())


COPY_TRIALS: dict[str, Callable[[], bool]] = {"as float16": _keeps_its_source, "of a view": _reads_a_view}


class NonContiguous(Guard):
    """Makes parameters contiguous when their optimizer is made; what optimizers keep beside them then is so too."""

    name = "non-contiguous"
    what = (
        "some kernels give wrong results on tensors that are not contiguous: such weights never move, or move wrongly"
    )
    # Frozen ones too, as convolutions misread them.
    patches = training_hooks.parameters("_look", frozen=True)

    def trial(self) -> Choice[bool]:
        """Return whether one of the operators named by those issues differs from the CPU on transposed tensors."""
        trials: dict[str, Any] = {
            "addcmul_": lambda x, y, z: x.addcmul_(y, z),
            "addcdiv_": lambda x, y, z: x.addcdiv_(y, z),
            "conv2d": lambda x, y, z: torch.nn.functional.conv2d(x[None, None], y[None, None, :2, :2]),
        }
        wrong = [name for name, run in trials.items() if not _agrees(run)]
        differ = f"{', '.join(wrong)} differ from the CPU on transposed tensors"
        return tried(bool(wrong), differ, "the operators of those issues are right on transposed tensors")

    def _look(self, parameters: list[Any]) -> None:
        loose = [parameter for parameter in parameters if not parameter.is_contiguous()]
        if not loose or not self.needed:
            return
        owners = Counter(parameter.untyped_storage().data_ptr() for parameter in parameters)
        alone = [parameter for parameter in loose if owners[parameter.untyped_storage().data_ptr()] == 1]
        for parameter in alone:
            # In the user's model: the kernel of each update reads and writes the parameter itself.
            parameter.data = parameter.data.contiguous()
        if alone:
            self.acted(f"{len(alone)} parameters were made contiguous: {self.verdict().reason}", aloud=False)
        if shared := len(loose) - len(alone):
            self.acted(
                f"{shared} parameters are views of others and stay as they are, so they may not be trained rightly"
            )


def _agrees(run: Any) -> bool:
    def result(device: str) -> torch.Tensor:
        made = (torch.linspace(1, 2, 12).view(3, 4) * factor for factor in (1.0, 0.5, -0.3))
        # The transpose of a tensor of the device: a moved one could come as contiguous.
        found: torch.Tensor = run(*(matrix.to(device).t() for matrix in made))
        return found.detach().cpu()

    return torch.allclose(result("cpu"), result("mps"), rtol=1e-4, atol=1e-5)


NORM = "native_batch_norm_backward"
PERMUTED = ("permuted-activations", "permuted-results", "permuted-batch-norm")
"""The faults of the activations, the last of batch norm alone."""


def _loose(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_contiguous()


def _of_activation(name: str, rest: tuple[float, ...], grad: Any, values: Any) -> Any:
    # prelu's weight is a tensor, and its backward pass has a gradient of that too.
    weight = (values.new_full((1, 1, 1, 1), 0.25),) * ("prelu" in name)
    found = getattr(torch.ops.aten, name)(*(grad,) * name.endswith("_backward"), values, *weight, *rest)
    return found if isinstance(found, torch.Tensor) else found[0]


def _of_batch_norm(grad: Any, values: Any) -> Any:
    """Return the gradients of the input and of the weight."""
    columns = values.transpose(1, -1).reshape(-1, values.shape[1]).float()
    mean, spread = columns.mean(0), columns.var(0, unbiased=False).add(1e-5).rsqrt()
    arguments = grad, values, torch.ones_like(mean), None, None, mean, spread, True, 1e-5, [True, True, True]
    of_input, of_weight, _ = torch.ops.aten.native_batch_norm_backward(*arguments)
    return torch.cat([of_input.flatten(), of_weight])


_ARGUMENTS: dict[str, tuple[float, ...]] = {
    "tanh_backward": (), "sigmoid_backward": (), "silu_backward": (), "softplus_backward": (1, 20), "mish_backward": (),
    "threshold_backward": (0.5,), "logit_backward": (), "softplus": (1, 20), "threshold": (0.5, 0),
    "_prelu_kernel": (), "_prelu_kernel_backward": (),
}  # fmt: skip
# Operator -> its result for gradients and values; values lie between 0 and 1, as results of tanh and sigmoid do.
TRIALS: dict[str, Callable[[Any, Any], Any]] = {
    name: partial(_of_activation, name, rest) for name, rest in _ARGUMENTS.items()
} | {NORM: _of_batch_norm}


def _right(run: Callable[[Any, Any], Any]) -> bool:
    """Return whether it gives the CPU's result for an input in channels_last and for one that is permuted otherwise."""
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
        # Batch norm raises it on macOS 26: "view size is not compatible".
        except RuntimeError:
            return False
    return torch.allclose(torch.cat(found).cpu(), torch.cat(right), rtol=1e-3, atol=1e-3)


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
    given, trials = "permuted tensors", {name: partial(_right, run) for name, run in TRIALS.items()}
    patches = {
        f"aten::{name}": Kernel("_laid_out", name, faults=PERMUTED[: 3 if name == NORM else 2]) for name in TRIALS
    }

    def _laid_out(self, name: str, stock: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        if name not in self._wrong:
            self.release(f"aten::{name}")
            return stock(*args, **kwargs)
        if not any(map(_loose, args)):
            return stock(*args, **kwargs)
        self.acted(f"permuted activations are copied: {self.verdict().reason}", aloud=False)
        return stock(*(each.contiguous() if _loose(each) else each for each in args), **kwargs)
