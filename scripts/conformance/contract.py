"""What an operator promises of its results, beyond their values: what is compared and what is not.

Facts of PyTorch's documentation and of its schemas; none is about Metal.
"""

from __future__ import annotations

from torch import Tensor

from scripts.conformance import calls
from scripts.conformance.calls import Call

PRIVATE = {
    "_embedding_bag": frozenset([1, 2, 3]),
    "_embedding_bag_forward_only": frozenset([1, 2, 3]),
    "log_sigmoid_forward": frozenset([1]),
}
"""Results, by their place, that an operator hands to its own gradient alone. Each backend leaves there what its own
gradient reads: the CPU no sizes of bags for a sum (native/EmbeddingBag.cpp), Metal no buffer of a sigmoid."""
ANY_OF_EQUALS = frozenset(["sort", "topk", "kthvalue", "median", "nanmedian", "mode"])
"""Operators that choose among equal values as they like, where a stable order is not asked for; max and min promise
the first."""


def private(operator: str, place: int) -> bool:
    """Whether a result (its place as `calls.run` lists them) is the operator's own affair."""
    returned = len(calls.overload(operator)._schema.returns) or 1
    return place % returned in PRIVATE.get(operator.partition(".")[0], ())


def failed(operator: str, right: list[Tensor | None], place: int) -> Tensor | None:
    """Where a result is not defined, since `info` reports a failure: a matrix that has no such factor.

    None where the operator reports none, or the result is no batch of matrices.
    """
    names = _names(operator, len(right))
    info = right[names.index("info")] if "info" in names else None
    result = right[place]
    if info is None or result is None or names[place] == "info" or not info.any():
        return None
    if result.shape[: info.dim()] != info.shape:
        return None
    return (info != 0).reshape(*info.shape, *[1] * (result.dim() - info.dim())).expand(result.shape)


def as_good(call: Call, found: list[Tensor | None], place: int) -> Tensor | None:
    """Which of the indices found point to the value beside them, each at another element; None where that is no matter.

    They are right where several values are equal and no stable order was asked for.
    """
    names = _names(call.operator, len(found))
    if names[place] != "indices" or call.operator.partition(".")[0] not in ANY_OF_EQUALS:
        return None
    given, indices, values = calls.argument(call, "self"), found[place], found[names.index("values")]
    if calls.argument(call, "stable") or indices is None or values is None or given.dim() == 0 or not indices.numel():
        return None
    dim = calls.argument(call, "dim") % given.dim()
    if indices.dim() < given.dim():
        indices, values = indices.unsqueeze(dim), values.unsqueeze(dim)
    if bool(((indices < 0) | (indices >= given.shape[dim])).any()):
        return None
    pointed = given.gather(dim, indices)
    good = (pointed == values) | ((pointed != pointed) & (values != values))
    repeated = indices.sort(dim).values.diff(dim=dim).eq(0).any()
    return None if bool(repeated) else good.reshape(found[place].shape)  # type: ignore[union-attr]


def _names(operator: str, count: int) -> list[str]:
    """Names of the results as `calls.run` lists them; none where lists of tensors are among them."""
    schema = calls.overload(operator)._schema
    returned = [each.name for each in schema.arguments if each.is_out] or [each.name for each in schema.returns]
    names = [*returned, *(name for _, name in calls.written(operator))]
    return names if len(names) == count else [""] * count
