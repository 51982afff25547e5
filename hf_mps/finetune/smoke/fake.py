"""What fake tensors cannot do by themselves in a training step: read a number, and an operator's shape on Metal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

# Numbers are followed in tensors of up to so many elements: ids, masks and lengths. Fractions that nothing was computed
# for, as an optimizer's first moments, only where they are few.
FOLLOWED, FRACTIONS = 2**22, 2**12
CPU = torch.device("cpu")
_aten = torch.ops.aten
# Where a mask says which elements: what its places are has to be known before.
BY_MASKS = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
# What they make depends on a tensor's shape alone.
OF_A_SHAPE = (
    *(_aten.ones_like.default, _aten.zeros_like.default, _aten.full_like.default),
    *(_aten.new_ones.default, _aten.new_zeros.default, _aten.new_full.default),
)


class FakeScalars(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around a step of fake tensors: answers for what has a result on a Mac and none among fake tensors.

    `given` are the fake tensors of the batch with their real ones. What a model computes of these alone (lengths, the
    largest label, whether anything is masked) is computed beside it on the CPU, so that reading it, or taking as many
    elements as a mask has, gives what a run would. Of all else a floating-point number (a metric, a loss to log) reads
    as 1.0, and reading an integer or a truth value, which decide on shapes and ways, stays an error.

    `aten::_ctc_loss` gets lengths that are such numbers, and its result's shape is theirs.

    `aten::_grouped_mm`, with which transformers multiplies by the weights of a mixture of experts: its rule for shapes
    (torch/_meta_registrations.py) is CUDA's, bfloat16 alone; on Metal a loop over the groups takes every dtype.
    """

    def __init__(self, given: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._real: Any = WeakIdKeyDictionary()
        for fake, real in given:
            if _followed(real.numel(), real.dtype):
                self._real[fake] = real

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._grouped_mm.default:
            return grouped(*args, **kwargs)
        if func is _aten._ctc_loss_backward.Tensor:
            return torch.empty_like(args[1])
        if func is _aten._ctc_loss.Tensor and all(one in self._real for one in args[2:4]):
            with unset_fake_temporarily():
                longest = [int(self._real[one].max()) for one in args[2:4]]
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
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            real = func(*tree_map(self._counterpart, args), **tree_map(self._counterpart, kwargs))
        if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
            device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            made = tree_map(lambda one: _like(one, device), real)
        else:
            made = func(*args, **kwargs)
        for fake, one in zip(tree_leaves(made), tree_leaves(real), strict=True):
            if isinstance(fake, torch.Tensor) and one.numel() <= FOLLOWED:
                self._real[fake] = one
        return made

    def _known(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the numbers of a call are all known: those of its tensors, and no others are drawn."""
        if func in OF_A_SHAPE:
            return _followed(args[0].numel(), kwargs.get("dtype") or args[0].dtype)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if (
            not all(leaf in self._real or _is_real(leaf) for leaf in leaves)
            or torch.Tag.nondeterministic_seeded in func.tags
        ):
            return False
        # What begins without a tensor has its size among its arguments.
        sizes = [one for one in tree_leaves(args) if isinstance(one, int)] if not leaves else []
        return bool(leaves) or _followed(torch.Size(sizes).numel(), kwargs.get("dtype"))

    def _forget(self, func: Any, args: Any) -> None:
        """Drop the numbers of what `func` writes to, and of everything that shares its memory."""
        if not func._schema.is_mutable:
            return
        written = [
            self._real[one]
            for one, said in zip(args, func._schema.arguments, strict=False)
            if isinstance(one, torch.Tensor) and one in self._real and said.alias_info and said.alias_info.is_write
        ]
        gone = {one.untyped_storage()._cdata for one in written}
        for fake in [fake for fake, one in self._real.items() if one.untyped_storage()._cdata in gone]:
            del self._real[fake]

    def _drawn(self, made: Any) -> Any:
        """A single draw, as 1.0: with it a layer that is dropped at random (LayerDrop) stays, which is the most."""
        with unset_fake_temporarily():
            self._real[made] = torch.ones((), dtype=made.dtype)
        return made

    def _places(self, indices: Any) -> list[Any]:
        """The indices with each mask, of which the numbers are known, as the places where it is true."""
        found: list[Any] = []
        for one in indices:
            if one is None or one.dtype != torch.bool or not (one in self._real or _is_real(one)):
                found.append(one)
                continue
            with unset_fake_temporarily():
                places = list(self._real.get(one, one).nonzero().unbind(1))
            for real in places:
                found.append(_like(real, one.device))
                self._real[found[-1]] = real
        return found

    def _counterpart(self, one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            if one in self._real or _is_real(one):
                return self._real.get(one, one)
            return torch.zeros((), dtype=one.dtype).expand(one.shape)
        return CPU if isinstance(one, torch.device) else one


def _followed(count: int, dtype: torch.dtype | None) -> bool:
    """Whether the numbers of so many elements are followed; no dtype said is float32's most often."""
    return count <= (FRACTIONS if dtype is None or dtype.is_floating_point or dtype.is_complex else FOLLOWED)


def _is_real(one: torch.Tensor) -> bool:
    """Whether a tensor has numbers itself: what is made of a list or an array is, until it meets the others."""
    return type(one) is torch.Tensor and one.device == CPU


def _like(real: Any, device: torch.device) -> Any:
    return torch.empty_like(real, device=device) if isinstance(real, torch.Tensor) else real


def aligned(scores: torch.Tensor, longest: int, labels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An empty result of `aten::_ctc_loss` for scores (time, rows, letters): losses (rows), and the alignments' sums.

    Those are of shape (rows, `longest` input, 2 x `labels` + 1), aten/src/ATen/native/LossCTC.cpp.
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
    """An empty result of `aten::_grouped_mm`: a matrix, or one for each group where both have as many dimensions.

    Its lines begin every 16 bytes, as `create_grouped_gemm_output_tensor` (aten/src/ATen/native/GroupedMMUtils.h) has
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
    """Whether a step failed only because its tensors have no numbers, or an operator cannot tell its result's shape."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )

    told = (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, told) or (isinstance(chain, AssertionError) and "FakeTensor" in str(chain)):
            return True
        chain = chain.__cause__ or chain.__context__
    return "FakeTensor" in str(error) or "meta" in str(error).lower()
