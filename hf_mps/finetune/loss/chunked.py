"""Cross-entropy over a large vocabulary, some rows at a time: the logits never stand in memory whole.

A batch of 4 x 512 tokens over 151,936 words makes 1.2 GB of float32 logits, and the plain loss holds three tensors of
that size at once (logits or their log-softmax, and two gradients). Here each chunk's gradient is taken as soon as its
loss is, in place over its logits, so that one chunk is all there is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_mps.finetune.loss.tied_embedding import TiedGradient
from hf_mps.finetune.text.padding import IGNORED

# Bytes of one chunk's logits in float32: enough rows to keep a GPU busy, and to make the head's gradient, which is read
# and written once a chunk, little of the work.
CHUNK_BYTES = 128 * 2**20
# On Metal the last chunk is filled up with rows without a label to a multiple of so many: a graph is compiled for each
# size, and the number of tokens is another one at every step.
ROW_MULTIPLE = 64
# float16 cannot hold the small probabilities of a large vocabulary: its gradients are taken this much larger, a power
# of two, which changes no digit.
HALF_SCALE = 1024.0


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    num_items: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shared: TiedGradient | None = None,
) -> Tensor:
    """The cross-entropy of `hidden @ weight.T + bias` against `labels`, in float32, as a scalar that can be derived.

    `hidden` is (…, width), `labels` (…), `weight` (words, width), `bias` (words) or None. The mean over the labels that
    are not `ignore_index`, or, with `num_items`, their sum divided by it: as `fixed_cross_entropy` of transformers 5
    has it (loss/loss_utils.py). Equal to it, gradients included, to float32 rounding; under autocast the matrix
    products are done in autocast's dtype, as a linear layer's are. With `shared`, which a tied embedding has joined,
    the gradient of `weight` goes there.
    """
    rows, targets = hidden.flatten(0, -2), labels.flatten().to(hidden.device)
    counted = targets != ignore_index
    count = counted.sum() if num_items is None else num_items
    if hidden.device.type != "mps":
        # Rows without a label cost nothing. On Metal it would wait for the GPU and make a new shape at every step.
        kept = counted.nonzero().squeeze(1)
        if len(kept) < len(targets):
            rows, targets = rows[kept], targets[kept]
    derive = torch.is_grad_enabled()
    total: Tensor = _ChunkedCrossEntropy.apply(rows, weight, bias, targets, ignore_index, derive, shared)  # type: ignore[no-untyped-call]
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the rows' losses; the gradients of a sum are known before anything is asked backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore_index: int,
        derive: bool,
        shared: TiedGradient | None,
    ) -> Tensor:
        wanted = [derive and needed for needed in ctx.needs_input_grad[:3]]
        # Only a gradient that flows on through the rows reaches the embedding.
        ctx.shared = shared if shared is not None and shared.joined and wanted[0] else None
        device = rows.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype

        def gradients(wanted: list[bool]) -> tuple[Tensor, list[Tensor | None]]:
            with torch.autocast(device, enabled=False):
                return _loss_and_gradients(rows.detach(), weight.detach(), bias, targets, ignore_index, wanted, kind)

        late = ctx.shared is not None and ctx.shared.late and wanted[1]
        total, ctx.gradients = gradients([wanted[0], wanted[1] and not late, wanted[2]])
        ctx.late = (lambda: gradients([False, True, False])[1][1]) if late else None
        ctx.kinds = (rows.dtype, weight.dtype, bias.dtype if bias is not None else None)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss goes backward once: its gradients are scaled where they stand")
        # In place: another copy of the head's gradient would cost what was saved.
        found = [one.mul_(upstream) if one is not None else None for one in ctx.gradients]
        late, ctx.gradients, ctx.late = ctx.late, None, None
        if ctx.shared is not None:
            ready, found[1] = found[1], None
            ctx.shared.gradient = (lambda: late().mul_(upstream)) if late is not None else (lambda: ready)
        found = [one.to(kind) if one is not None else None for one, kind in zip(found, ctx.kinds, strict=True)]
        return (*found, None, None, None, None)


def _loss_and_gradients(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    wanted: list[bool],
    kind: torch.dtype,
) -> tuple[Tensor, list[Tensor | None]]:
    """The summed loss and the gradients of rows, weight and bias (None where not `wanted`), divided by nothing."""
    scale = HALF_SCALE if kind == torch.float16 else 1.0
    head, words = weight.to(kind), len(weight)
    total = torch.zeros((), dtype=torch.float32, device=rows.device)
    of_rows = torch.empty_like(rows, dtype=torch.float32 if scale > 1 else rows.dtype) if wanted[0] else None
    of_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
    of_bias = torch.zeros_like(weight[:, 0], dtype=torch.float32) if wanted[2] else None
    size = max(1, CHUNK_BYTES // (4 * words))
    for start in range(0, len(rows), size):
        chunk = slice(start, start + size)
        part, target = _padded_chunk(rows[chunk].to(kind), targets[chunk], size, ignore_index)
        logits = torch.nn.functional.linear(part, head, None if bias is None else bias.to(kind)).float()
        losses, gradient = _chunk_loss(logits, target, ignore_index, derive=any(wanted))
        total += losses
        if of_bias is not None:
            of_bias += gradient.sum(0)
        gradient = gradient.mul_(scale).to(kind) if kind != torch.float32 else gradient
        if of_rows is not None:
            here = of_rows[chunk]
            here.copy_((gradient @ head)[: len(here)])
        if of_weight is not None:
            _add_product(of_weight, gradient, part)
    if scale > 1:
        for one in (of_rows, of_weight):
            if one is not None:
                one.div_(scale)
    return total, [of_rows, of_weight, of_bias]


def _padded_chunk(part: Tensor, target: Tensor, size: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """A chunk of at most `size` rows, on Metal with rows added that change neither loss nor gradients."""
    missing = min(size, -(-len(part) // ROW_MULTIPLE) * ROW_MULTIPLE) - len(part) if part.device.type == "mps" else 0
    if missing:
        part = torch.nn.functional.pad(part, (0, 0, 0, missing))
        target = torch.nn.functional.pad(target, (0, missing), value=ignore_index)
    return part, target


def _chunk_loss(logits: Tensor, target: Tensor, ignore_index: int, derive: bool) -> tuple[Tensor, Tensor]:
    """The summed loss of a chunk, and its gradient by the logits (rows, words), which takes their place in memory."""
    counted = target != ignore_index
    place = target.where(counted, 0).unsqueeze(1)
    logits -= logits.amax(1, keepdim=True)
    right = logits.gather(1, place).squeeze(1)
    logits.exp_()
    sums = logits.sum(1, keepdim=True)
    losses = ((sums.squeeze(1).log() - right) * counted).sum()
    if derive:
        logits /= sums
        logits.scatter_add_(1, place, torch.full_like(place, -1, dtype=logits.dtype))
        logits *= counted.unsqueeze(1)
    return losses, logits


def _add_product(total: Tensor, gradient: Tensor, part: Tensor) -> None:
    """`total += gradient.T @ part` (words, width) without a second tensor of that size, added up in float32."""
    if part.dtype == total.dtype:
        total.addmm_(gradient.t(), part)
        return
    size = max(1, CHUNK_BYTES // (4 * part.shape[1]))
    for start in range(0, len(total), size):
        total[start : start + size] += gradient[:, start : start + size].t() @ part
