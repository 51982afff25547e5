"""What fake tensors lack for a training step: values that the step reads, and the shapes of Metal's operators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from hf_mps.core.errors import chain
from hf_mps.metal.operators.calls import tensors_of

# Values are followed in tensors of up to so many elements: ids, masks and lengths. Floats, such as an optimizer's first
# moments, are followed only in small tensors; a batch's tensors, and what is computed from them, at their size.
FOLLOWED, FRACTIONS = 2**22, 2**12
CPU = torch.device("cpu")
_aten = torch.ops.aten
_TENSOR, _DATA_PTR = torch.tensor, torch.Tensor.data_ptr
# transformers' losses that pair what is found with what there is.
LOSSES, PAIRING = "transformers.loss.", "linear_sum_assignment"
# Operators that a mask tells which elements to take: where the mask is true must be known.
BY_MASKS = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
# PyTorch asks a fake tensor for its device twice an operator, through every mode.
DEVICE = torch.ops.prim.device.default
# Their result depends on a tensor's shape alone, or on a size that is given beside it.
OF_A_SHAPE = (_aten.ones_like.default, _aten.zeros_like.default, _aten.full_like.default)
OF_A_SIZE = (_aten.new_ones.default, _aten.new_zeros.default, _aten.new_full.default)


class _Real(WeakIdKeyDictionary):
    """Real tensors by fake ones. `seen` has the ids of all that ever were in it: most tensors are told by these."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __setitem__(self, key: Any, value: Any) -> None:
        self.seen.add(id(key))
        super().__setitem__(key, value)


class FakeScalars(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode around a step of fake tensors: supplies values and shapes that a Mac would have and fake tensors lack.

    `given` pairs the batch's fake tensors with their real ones. What a model computes from these alone (lengths, the
    largest label, whether anything is masked) is computed on the CPU as well, so that reading it, or indexing by a
    mask, gives what a run would. Any other floating-point scalar (a metric, a loss to log) reads as 1.0; reading any
    other integer or boolean, on which shapes and branches depend, stays an error.

    `aten::_ctc_loss` takes its lengths from such values, and its result's shape follows from them.

    Qwen-VL makes a tensor of a list of such scalars (`get_rope_index`): there too they are read.

    DETR's loss pairs boxes with queries by their costs, on the CPU (scipy's linear_sum_assignment): here the first
    queries are taken. Whether all of some unknown values meet a condition reads as true: it is a check, of boxes whose
    corners are in order for instance.

    `aten::_grouped_mm` multiplies by the weights of a mixture of experts in transformers. PyTorch's shape rule for it
    (torch/_meta_registrations.py) is CUDA's, bfloat16 alone; on Metal a loop over the groups takes every dtype.
    """

    active: ClassVar[FakeScalars | None] = None
    """The one that was entered last, also for autograd's threads."""

    def __init__(self, given: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._real: Any = _Real()
        self._most = FOLLOWED
        for fake, real in given:
            # A batch's pixels too: Idefics3 asks which of its images are of zeros alone, and leaves those out.
            self._real[fake] = real
            self._most = max(self._most, real.numel())

    def __enter__(self) -> Any:
        losses = [module for name, module in list(sys.modules.items()) if name.startswith(LOSSES)]
        with ExitStack() as entered:
            for module in losses:
                if hasattr(module, PAIRING):
                    entered.enter_context(patch.object(module, PAIRING, _first_queries(getattr(module, PAIRING))))
            if bitsandbytes := sys.modules.get("bitsandbytes.functional"):
                # What the 256 values of a moment's byte are, it reads from tensors that it makes.
                of_size = patch.object(bitsandbytes, "create_dynamic_map", lambda **_: torch.empty(256, device=CPU))
                entered.enter_context(of_size)
            entered.enter_context(patch.object(torch, "tensor", _tensor))
            entered.enter_context(patch.object(torch.Tensor, "data_ptr", _data_ptr))
            entered.enter_context(patch.object(FakeScalars, "active", self))
            self._entered = entered.pop_all()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._entered.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        kwargs = kwargs or {}
        if func is _aten._grouped_mm.default:
            return grouped(*args, **kwargs)
        if func is _aten._ctc_loss_backward.Tensor:
            return torch.empty_like(args[1])
        if func is _aten._ctc_loss.Tensor and all(tensor in self._real for tensor in args[2:4]):
            with unset_fake_temporarily():
                longest = [int(self._real[tensor].max()) for tensor in args[2:4]]
            return aligned(args[0], *longest)
        if func is _aten.rand.default and not args[0]:
            return self._drawn(func(*args, **kwargs))
        if func in BY_MASKS:
            args = (args[0], self._places(args[1]), *args[2:])
        known = self._known(func, args, kwargs)
        if func is _aten._local_scalar_dense.default:
            if known:
                with unset_fake_temporarily():
                    return self._real[args[0]].item()
            return 1.0 if args[0].is_floating_point() else func(*args)
        if not known:
            self._forget(func, args)
            result = func(*args, **kwargs)
            if func is _aten.all.default:
                with unset_fake_temporarily():
                    self._real[result] = torch.ones((), dtype=torch.bool)
            return result
        with unset_fake_temporarily():
            real = func(*map(self._counterpart, args), **{n: self._counterpart(one) for n, one in kwargs.items()})
        if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
            device = tensors_of(args, kwargs)[0].device
            result = tree_map(lambda tensor: _like(tensor, device), real)
        else:
            result = func(*args, **kwargs)
        for fake, tensor in zip(tree_leaves(result), tree_leaves(real), strict=True):
            if isinstance(fake, torch.Tensor) and tensor.numel() <= self._most:
                self._real[fake] = tensor
        return result

    def lacks(self, tensors: Iterable[torch.Tensor], how: Callable[[Iterable[bool]], bool]) -> bool:
        """Whether the values of all or any (`how`) of some fake tensors are unknown."""
        known, seen = self._real.data, self._real.seen
        return how([id(tensor) not in seen or WeakIdRef(tensor) not in known for tensor in tensors])

    def _known(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether all values of a call are known: its tensors' are, and it draws no random numbers."""
        if func in OF_A_SHAPE or func in OF_A_SIZE:
            size = args[0].shape if func in OF_A_SHAPE else torch.Size(args[1])
            return _followed(size.numel(), kwargs.get("dtype") or args[0].dtype)
        leaves = tensors_of(args, kwargs)
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        if drawn or not all(leaf in self._real or _is_real(leaf) for leaf in leaves):
            return False
        # A call without tensor arguments has its size among its arguments.
        sizes = [size for size in tree_leaves(args) if isinstance(size, int)] if not leaves else []
        return bool(leaves) or _followed(torch.Size(sizes).numel(), kwargs.get("dtype"))

    def _forget(self, func: Any, args: Any) -> None:
        """Forget the values of what `func` writes to, and of everything that shares its memory."""
        if not func._schema.is_mutable:
            return
        pairs = zip(args, func._schema.arguments, strict=False)
        changed = (one for one, argument in pairs if argument.alias_info and argument.alias_info.is_write)
        written = [self._real[one] for one in changed if isinstance(one, torch.Tensor) and one in self._real]
        if not written:
            return
        # By the address of the C++ storage, which all tensors that share it have in common.
        storages = {tensor.untyped_storage()._cdata for tensor in written}
        for fake in [fake for fake, tensor in self._real.items() if tensor.untyped_storage()._cdata in storages]:
            del self._real[fake]

    def _drawn(self, made: Any) -> Any:
        """Let a single draw be 1.0: a layer that LayerDrop may skip then stays, which is the largest step."""
        with unset_fake_temporarily():
            self._real[made] = torch.ones((), dtype=made.dtype)
        return made

    def _places(self, indices: Any) -> list[Any]:
        """Return the indices with each mask whose values are known replaced by the positions where it is true."""
        positions: list[Any] = []
        for index in indices:
            if index is None or index.dtype != torch.bool or not (index in self._real or _is_real(index)):
                positions.append(index)
                continue
            with unset_fake_temporarily():
                true_positions = list(self._real.get(index, index).nonzero().unbind(1))
            for column in true_positions:
                positions.append(_like(column, index.device))
                self._real[positions[-1]] = column
        return positions

    def _counterpart(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value in self._real or _is_real(value):
                return self._real.get(value, value)
            return torch.zeros((), dtype=value.dtype).expand(value.shape)
        if isinstance(value, (list, tuple)):
            return [*map(self._counterpart, value)]
        return CPU if isinstance(value, torch.device) else value


def _first_queries(stock: Any) -> Any:
    """Return scipy's linear_sum_assignment, which pairs rows and columns in their order where costs are no numbers."""

    def assigned(costs: Any, *arguments: Any, **settings: Any) -> Any:
        if type(costs) is torch.Tensor or not isinstance(costs, torch.Tensor):
            return stock(costs, *arguments, **settings)
        with unset_fake_temporarily():
            pairs = torch.arange(min(costs.shape)).numpy()
        return pairs, pairs

    return assigned


def _tensor(data: Any, *arguments: Any, **settings: Any) -> torch.Tensor:
    """torch.tensor, which reads fake numbers in a list as the step would: PyTorch's own looks for them in memory."""
    if isinstance(data, (list, tuple)):
        data = tree_map(lambda one: one.item() if isinstance(one, FakeTensor) else one, data)
    return _TENSOR(data, *arguments, **settings)


def _data_ptr(tensor: torch.Tensor) -> int:
    """Tensor.data_ptr, by which transformers tells embeddings apart for 8-bit optimizers, of fake tensors too."""
    return id(tensor) if isinstance(tensor, FakeTensor) else _DATA_PTR(tensor)


def _followed(count: int, dtype: torch.dtype | None) -> bool:
    """Whether the values of `count` elements are followed; None as dtype most often means float32."""
    return count <= (FRACTIONS if dtype is None or dtype.is_floating_point or dtype.is_complex else FOLLOWED)


def _is_real(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds values itself: one made of a list or an array does, until it meets fake ones."""
    return type(tensor) is torch.Tensor and tensor.device == CPU


def _like(real: Any, device: torch.device) -> Any:
    return torch.empty_like(real, device=device) if isinstance(real, torch.Tensor) else real


def aligned(scores: torch.Tensor, longest: int, labels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an empty result of `aten::_ctc_loss` for scores (time, rows, letters): losses (rows), alignment sums.

    The sums have shape (rows, `longest` input, 2 x `labels` + 1), aten/src/ATen/native/LossCTC.cpp.
    """
    rows = scores.shape[1]
    return scores.new_empty(rows), scores.new_empty(rows, longest, 2 * labels + 1)


def grouped(
    first: torch.Tensor,
    second: torch.Tensor,
    offsets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return an empty result of `aten::_grouped_mm`: a matrix, or one a group where both inputs have equal rank.

    Its rows are aligned to 16 bytes, as `create_grouped_gemm_output_tensor` (aten/src/ATen/native/GroupedMMUtils.h) has
    it.
    """
    groups = [len(second)] if offsets is None else [len(offsets)]
    shape = [first.shape[-2], second.shape[-1]]
    dtype = out_dtype or first.dtype
    step = 16 // dtype.itemsize
    line = -(-shape[1] // step) * step
    if first.dim() == second.dim():
        return first.new_empty_strided([*groups, *shape], [shape[0] * line, line, 1], dtype=dtype)
    return first.new_empty_strided(shape, [line, 1], dtype=dtype)


def needs_numbers(error: BaseException) -> bool:
    """Whether a step failed only because its tensors hold no values, or an operator cannot know its result's shape."""
    kinds = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    )
    for one in chain(error):
        if isinstance(one, kinds) or (isinstance(one, AssertionError) and "FakeTensor" in str(one)):
            return True
    # PyTorch exchanges no fake parameter in place: D-FINE's loss moves a module of its own in each step.
    return any(word in str(error).lower() for word in ("faketensor", "meta", "couldn't swap"))
