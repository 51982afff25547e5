"""Guards of single operators.

large-pad: large tensors of five dimensions or more are padded in four.
huge-cat: huge tensors are put together in parts.
adaptive-max-pool: adaptive max pools whose sizes do not divide run on the CPU.
lerp-weight: the weight of torch.lerp may be a number of another dtype.
lone-scans: cumulative sums over a dimension of size 1 are given that dimension's usual stride.
lstm-dropout: an LSTM of several layers with dropout runs a layer at a time.
mixed-dtypes: a layer norm of float32 weights may take half-precision inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hf_mps.core.choice import Choice
from hf_mps.core.patching import OriginalCall, Patch
from hf_mps.layer.guards import training_hooks
from hf_mps.layer.guards.base import Guard, tried
from hf_mps.layer.guards.kernel_overrides import Kernel, Tried, in_place_of

PAD_LIMIT = 2**16
"""Elements in the last dimension, or in all behind the first padded one, from which MPSGraph is wrong (PR 195147)."""
OPERATORS = (
    "constant_pad_nd",  # its own backward pass too
    *(f"{mode}_pad3d{backward}" for mode in ("reflection", "replication") for backward in ("", "_backward")),
)


def _large(first: Any, *args: Any) -> bool:
    if first.dim() < 5:
        return False
    padding = args[1] if hasattr(args[0], "shape") else args[0]
    # A longer padding is made of copies.
    if not 2 <= len(padding) <= 6:
        return False
    # No smaller than the padded sizes, which for a backward pass and a negative padding are those given.
    sizes = [n + abs(a) + abs(b) for n, a, b in zip(first.shape[::-1], padding[::2], padding[1::2], strict=False)]
    return bool(max(sizes[0], math.prod(sizes[:-1])) >= PAD_LIMIT)


def _right() -> bool:
    """Return whether two frames of 65,536 ones are kept when a third of zeros is put before them."""
    frames = torch.ones(1, 1, 2, 2**8, 2**8, device="mps")
    return int(torch.constant_pad_nd(frames, [0, 0, 0, 0, 1, 0]).sum().cpu()) == frames.numel()


class LargePad(Tried):
    """Folds the dimensions that are not padded into one, below autograd: MPSGraph is right up to four dimensions.

    Video VAEs pad like this before each causal convolution, and frames of 256 by 256 pixels are large enough.
    """

    name = "large-pad"
    what = "F.pad of five dimensions or more loses the values of large tensors (videos, volumes), without an error"

    given, trials = "large tensors of five dimensions", {"F.pad": _right}
    says = "large tensors of five dimensions or more are padded in four"
    patches = dict.fromkeys(
        (f"aten::{name}" for name in OPERATORS), Kernel("_folded", when=_large, says=says, faults=("large-pad",))
    )

    def _folded(self, stock: OriginalCall, *args: Any) -> Any:
        tensors = 2 if hasattr(args[1], "shape") else 1
        kept = args[0].dim() - len(args[tensors]) // 2
        found = stock.partial(*(each.flatten(0, kept - 1) for each in args[:tensors]), *args[tensors:])
        return found.unflatten(0, args[0].shape[:kept])


CAT_LIMIT = 2**31
"""Elements; offsets beyond are negative in the 32 bits that the kernel keeps them in."""


def _huge(tensors: Any, dim: int = 0, *, out: Any = None) -> bool:
    gapped = [each for each in tensors if not each.is_contiguous()] + ([] if out is None else [out])
    return sum(each.numel() for each in tensors) > CAT_LIMIT or any(_span(each) > CAT_LIMIT for each in gapped)


def _span(tensor: Any) -> int:
    """Return how far its last element is from its first, in elements."""
    if tensor.numel() == 0 or tensor.untyped_storage().nbytes() <= CAT_LIMIT:
        return 0
    return 1 + sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def together(tensors: Sequence[Any], dim: int = 0, *, out: Any = None) -> Any:
    """Return what torch.cat returns, put together of parts that reach over no more than CAT_LIMIT elements each.

    Raises what torch.cat raises for tensors that do not fit together.
    """
    shapes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
    wanted = torch.cat(shapes, dim)
    if out is None:
        out = torch.empty_strided(wanted.shape, wanted.stride(), dtype=wanted.dtype, device=tensors[0].device)
    elif out.shape != wanted.shape:
        out.resize_(wanted.shape)
    _fill(out, [each for each in tensors if each.numel()], dim % max(1, wanted.dim()))
    return out


def _fill(out: Any, tensors: list[Any], dim: int) -> None:
    if all(max(each.numel(), _span(each)) <= CAT_LIMIT for each in (out, *tensors)):
        torch.cat(tensors, dim, out=out)
    elif dim == 0 and len(tensors) > 1:
        for part, each in zip(out.split([len(each) for each in tensors]), tensors, strict=True):
            _fill(part, [each], 0)
    elif len(out) == 1:
        _fill(out[0], [each[0] for each in tensors], max(dim - 1, 0))
    else:
        for half in (slice(0, len(out) // 2), slice(len(out) // 2, None)):
            _fill(out[half], [each[half] for each in tensors], dim)


class HugeCat(Guard):
    """Stands before torch.cat, below autograd, on the releases that have the fault; stack and hstack come through it.

    Evaluation meets it, where Trainer collects the logits of a vocabulary on the device.
    """

    name = "huge-cat"
    what = "torch.cat to more than 2^31 elements, or of a view into as many, loses rows and writes over other tensors"
    untried = "a trial would take gigabytes, and could write over other tensors"

    says = f"tensors of more than {CAT_LIMIT:,} elements are put together in parts"
    patches = dict.fromkeys(
        ("aten::cat", "aten::cat.out"), Kernel(together, when=_huge, says=says, through=in_place_of)
    )


def _misread(given: Any, end: Any, weight: Any) -> bool:
    # A number within a larger CPU tensor is read at that tensor's beginning (pytorch#187117).
    within = weight.device.type == "cpu" and weight.storage_offset() != 0
    return bool(weight.dim() == 0 and (weight.dtype != given.dtype or within))


ONE_DTYPE = "lerp is given weights of another dtype in the dtype of its tensors"


def _of_one_dtype(name: str, given: Any, end: Any, weight: Any) -> Any:
    weight = weight.item() if weight.device.type == "cpu" else weight.to(given.dtype)
    return getattr(torch.ops.aten, name)(given, end, weight)


class LerpWeight(Guard):
    """Hands such a weight on as a Python number, or in the tensors' dtype where it is on the device.

    Optimizers that keep their betas in tensors, as nanochat's do, update a state in half precision like this.
    """

    name = "lerp-weight"
    what = "torch.lerp misreads a weight that is one number in a tensor of another dtype, without an error"

    patches = {
        f"aten::{name}.Tensor": Kernel(
            partial(_of_one_dtype, name), when=_misread, says=ONE_DTYPE, through=in_place_of, faults=("lerp-weight",)
        )
        for name in ("lerp", "lerp_")
    }

    def trial(self) -> Choice[bool]:
        """Return whether half of the way from 0 to 1 in float16 is 0.5 by a weight of float32."""
        ends = torch.arange(2.0, dtype=torch.float16, device="mps")
        with self.left_alone():
            found = float(torch.lerp(ends[0], ends[1], torch.tensor(0.5, device="mps")).cpu())
        right = "lerp reads a weight of another dtype rightly"
        return tried(found != 0.5, f"lerp reads 0.5 of another dtype as {found:g}", right)


def _lone(given: Any, *args: Any, **_: Any) -> bool:
    dim = args[2] if hasattr(args[0], "shape") else args[0]
    size, *inner = given.shape[dim:] or (0,)
    # What is not contiguous is copied by the host, which gives it the usual strides. The last dimension needs none.
    lone = size == 1 and bool(inner) and given.is_contiguous()
    return bool(lone and given.stride()[dim:][0] != math.prod(inner))


SCANS = (
    *(f"{name}{out}" for name in ("cumsum", "cumprod", "_logcumsumexp") for out in ("", ".out")),
    "_cummax_helper",
    "_cummin_helper",
)


def _all_written() -> bool:
    """Return whether each of 33 ones in a row, which was a column, is written."""
    row = torch.ones(33, 1, device="mps").t()
    return int(torch.cumsum(row, 0, out=torch.zeros(1, 33, device="mps")).sum().cpu()) == row.numel()


class LoneScans(Tried):
    """Gives such a tensor the strides that its shape has, over the same memory, below autograd.

    A batch of one, of which some columns are taken (`mask[:, :7].cumsum(0)`), is enough. What is scanned in place is
    written over by itself, and stays right.
    """

    name = "lone-scans"
    what = (
        "cumulative sums, products and extremes over a dimension of size 1 leave values of slices and transposed"
        " columns unwritten, or write over other tensors, without an error"
    )

    until = "PyTorch takes the columns of such a scan from the shape"
    given, trials = "a transposed column", {"cumsum": _all_written}
    says = "cumulative sums over a dimension of size 1 are given its usual stride"
    patches = dict.fromkeys(
        (f"aten::{name}" for name in SCANS),
        Kernel("_with_usual_strides", when=_lone, says=says, faults=("lone-scans",)),
    )

    def _with_usual_strides(self, stock: OriginalCall, given: Any, *args: Any, **kwargs: Any) -> Any:
        strides = [math.prod(given.shape[dim + 1 :]) for dim in range(given.dim())]
        return stock.partial(given.as_strided(given.shape, strides), *args, **kwargs)


def _uneven(given: Any, sizes: Any) -> bool:
    pairs = list(zip(given.shape[-2:], sizes, strict=True))
    # Metal refuses a height that grows beside a width that shrinks, and goes on refusing it.
    alike = all(size >= wanted for size, wanted in pairs) or all(size <= wanted for size, wanted in pairs)
    return alike and all(wanted > 0 for _, wanted in pairs) and any(size % wanted for size, wanted in pairs)


POOLS: dict[str, Callable[..., bool]] = {
    "adaptive_max_pool2d": _uneven,
    "adaptive_max_pool2d_backward": lambda grad, given, indices: _uneven(given, grad.shape[-2:]),
}
"""Operator -> which calls of it Metal's windows are wrong for."""


def _first_maximum() -> bool:
    """Return whether the first window of three of five by five numbers is two by two."""
    numbers = torch.arange(25.0, device="mps").reshape(1, 1, 5, 5)
    return float(torch.ops.aten.adaptive_max_pool2d(numbers, [3, 3])[0].flatten()[0].cpu()) == 6


ON_CPU = "adaptive max pools of sizes that do not divide run on the CPU"


def _on_cpu(name: str, *args: Any) -> Any:
    moved = [each.cpu() if isinstance(each, torch.Tensor) else each for each in args]
    found = getattr(torch.ops.aten, name)(*moved)
    return tuple(each.to("mps") for each in found) if isinstance(found, tuple) else found.to("mps")


class AdaptiveMaxPool(Tried):
    """Computes such a pool, and its gradient, by the CPU's kernels, below autograd."""

    name = "adaptive-max-pool"
    what = "adaptive max pools of sizes that do not divide (5 x 5 to 3 x 3) have wrong values, without an error"

    given, trials = "sizes that do not divide", {"adaptive_max_pool2d": _first_maximum}
    patches = {
        f"aten::{name}": Kernel(
            partial(_on_cpu, name), when=wrong, says=ON_CPU, through=in_place_of, faults=("adaptive-max-pool",)
        )
        for name, wrong in POOLS.items()
    }


class LstmDropout(Guard):
    """Runs such a stack as single layers with dropout between them: the same function, with other masks."""

    name = "lstm-dropout"
    what = "the gradients of an LSTM of two or more layers with dropout are computed as if there had been no dropout"
    # The function that nn.LSTM calls; nothing else in torch is touched.
    patches = {"torch._VF:lstm": "_lstm"}

    def trial(self) -> Choice[bool]:
        """Whether a gradient passes between two layers that dropout=1 cuts apart; leaves the generator as it was."""
        with torch.random.fork_rng([0], device_type="mps"):
            weights: list[torch.Tensor] = [*torch.nn.LSTM(3, 3, num_layers=2, device="mps").parameters()]
            x = torch.ones(4, 1, 3, device="mps", requires_grad=True)
            zeros = torch.zeros(2, 1, 3, device="mps")
            out = torch.lstm(x, (zeros, zeros), weights, True, 2, 1.0, True, False, False)
            (gradient,) = torch.autograd.grad(out[0].sum(), x)
        passes = "gradient passes a dropout of 1 between two layers"
        return tried(bool((gradient != 0).any()), f"a {passes}", f"no {passes}")

    def _lstm(self, stock: Any, input: Any, *rest: Any) -> Any:
        # Packed sequences give batch sizes second and take no kernel of Metal's own.
        if len(rest) != 8 or not isinstance(rest[0], list | tuple) or input.device.type != "mps":
            return stock(input, *rest)
        states, weights, has_bias, layers, dropout, training, bidirectional, batch_first = rest
        if layers < 2 or not dropout or not training or not self.needed:
            return stock(input, *rest)
        line = f"an LSTM of {layers} layers with dropout runs a layer at a time, for the right gradients"
        self.acted(line, aloud=False)
        return _layer_by_layer(
            stock.partial, input, states, weights, has_bias, layers, dropout, bidirectional, batch_first
        )


def _layer_by_layer(
    stock: Any, x: Any, states: Any, weights: Any, has_bias: Any, layers: int, p: float, both: bool, first: bool
) -> Any:
    """As torch's composite form (aten/src/ATen/native/RNN.cpp, apply_layer_stack): dropout after all but the last."""
    each, ways = len(weights) // layers, 2 if both else 1
    hidden, cells = [], []
    for layer in range(layers):
        here = tuple(state[layer * ways : (layer + 1) * ways] for state in states)
        own = weights[layer * each : (layer + 1) * each]
        x, h, c = stock(x, here, own, has_bias, 1, 0.0, True, both, first)
        hidden.append(h)
        cells.append(c)
        if layer < layers - 1:
            x = torch.nn.functional.dropout(x, p, training=True)
    return x, torch.cat(hidden), torch.cat(cells)


LAYER_NORM = "torch.nn.functional:layer_norm"


class MixedDtypes(Guard):
    """Computes such a layer norm in its weights' dtype, as the CPU does, and returns the input's.

    peft's prepare_model_for_kbit_training and models that keep their norms in float32 make such layers.
    """

    name = "mixed-dtypes"
    what = (
        "a layer norm of float32 weights over a half-precision input gives garbage, and its backward pass aborts Python"
    )
    patches = {
        # Frozen ones too: below an adapter the norms of the frozen model are misread as well.
        **training_hooks.parameters("_look", frozen=True),
        # Touched only where it must be.
        LAYER_NORM: Patch("_layer_norm", late=True),
    }

    def trial(self) -> Choice[bool]:
        """Whether such a layer norm's output on the device is wrong; its backward pass, which aborts, is not tried."""
        x, weight = torch.linspace(-1, 2, 8).view(2, 4), torch.tensor([1.0, 0.5, 0.3, 0.1])
        with torch.no_grad():
            expected = torch.layer_norm(x, (4,), weight, weight)
            found = torch.layer_norm(x.half().to("mps"), (4,), weight.to("mps"), weight.to("mps"))
        norm = "a layer norm of float32 weights over float16"
        right = torch.allclose(found.cpu().float(), expected, atol=0.01)
        return tried(not right, f"{norm} is wrong", f"{norm} is right")

    def _look(self, parameters: list[Any]) -> None:

        if len({parameter.dtype for parameter in parameters}) > 1 and self.needed:
            self.arm(LAYER_NORM)

    def _layer_norm(
        self, stock: Any, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Any:
        # Autocast gives a layer norm float32 throughout.
        mixed = weight is not None and weight.dtype != input.dtype and not torch.is_autocast_enabled(input.device.type)
        if not mixed or input.device.type != "mps" or not self.needed:
            return stock(input, normalized_shape, weight, bias, eps)
        line = f"layer norms of {_word(weight)} weights over {_word(input)} are computed in {_word(weight)}"
        self.acted(line, aloud=False)
        return stock.partial(input.to(weight.dtype), normalized_shape, weight, bias, eps).to(input.dtype)


def _word(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
