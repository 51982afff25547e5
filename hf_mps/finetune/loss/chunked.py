"""Cross-entropy over a large vocabulary, some rows at a time: the logits are never in memory whole.

A batch of 4 x 512 tokens over 151,936 words makes 1.2 GB of float32 logits, and the plain loss holds three tensors of
that size at once (logits or their log-softmax, and two gradients). Here each chunk's gradient is taken as soon as its
loss is, in place over its logits, so that one chunk is all there is.

Kept although PyTorch 2.13 has torch.nn.functional.linear_cross_entropy: for 1,024 x 192 rows over 48,000 words that
took 122 MiB and 1.65 s where this takes 63 MiB and 1.2 s (plain: 538 MiB, 1.6 s; one CPU thread, float32, chunks of 16
MiB). This can go when the oldest supported torch has it in as
little memory.

Where the word embedding has the head's weight, autograd would make a gradient of each use and add them: two tensors of
the vocabulary's size at once, the head's from the forward pass on, beside all activations. Here the head hands
its gradient to the embedding (`TiedEmbedding`), whose backward pass comes last and adds its own rows. Where memory is
dearer than time the head's gradient is computed only then, when the activations are gone, from logits that are computed
again (a third more work for the head, none for the layers).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_mps.finetune.text.lengths import IGNORED
from hf_mps.metal.training_kernels import trial
from hf_mps.metal.training_kernels.cross_entropy import losses_in_place
from hf_mps.metal.training_kernels.library import ordinary

# Bytes of one chunk's logits in float32: enough rows to keep a GPU busy, and few chunks, since each reads and writes
# the head's gradient once.
CHUNK_BYTES = 128 * 2**20
# On Metal the last chunk is filled up to a multiple of so many rows with rows without a label: Metal compiles a graph
# for each size, and the number of tokens changes at every step.
ROW_MULTIPLE = 64
# float16 cannot hold the small probabilities of a large vocabulary: gradients are scaled up by this power of two, which
# changes no digit.
HALF_SCALE = 1024.0


class TiedGradient:
    """The head's gradient on its way to the embedding, in one forward and backward pass.

    The embedding sets `claimed` when it takes the gradient; `gradient()` returns it, (words, width) in float32. With
    `recompute` the head computes it only when the embedding calls that.
    """

    def __init__(self, recompute: bool) -> None:
        self.recompute = recompute
        self.claimed = False
        self.gradient: Callable[[], Tensor] | None = None


class TiedEmbedding(torch.nn.Embedding):
    """A word embedding that claims `shared` where it is set for the pass; otherwise it is the Embedding that it took
    over.
    """

    shared: TiedGradient | None = None

    def __init__(self, embedding: torch.nn.Embedding) -> None:
        self.__dict__.update(embedding.__dict__)  # its weights and its hooks

    def forward(self, ids: Tensor) -> Tensor:
        shared, self.shared = self.shared, None  # a second use in the same pass gets its own gradient
        if shared is None:
            return super().forward(ids)
        shared.claimed = True
        look_up: Callable[..., Tensor] = _TiedLookup.apply
        return look_up(self.weight, ids, self.padding_idx, shared)


def is_tied(embedding: Any, head: Any) -> bool:
    """Whether `embedding` is a plain word embedding over the weight of `head`, its gradient dense and unscaled."""
    return (
        type(embedding) is torch.nn.Embedding
        and embedding.weight is head.weight
        and embedding.max_norm is None
        and not (embedding.sparse or embedding.scale_grad_by_freq)
    )


class _TiedLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, shared: TiedGradient) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shared, ctx.padding, ctx.like = shared, padding, (weight.shape, weight.dtype)
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        shape, kind = ctx.like
        head_gradient, ctx.shared.gradient = ctx.shared.gradient, None
        total = (head_gradient or partial(torch.zeros, shape, dtype=torch.float32, device=upstream.device))()
        rows = upstream.flatten(0, -2).float()
        if ctx.padding is not None:  # as in nn.Embedding: the padding row learns nothing
            rows = rows * (ids.flatten() != ctx.padding).unsqueeze(1)
        return total.index_add_(0, ids.flatten(), rows).to(kind), None, None, None


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    num_items: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shared: TiedGradient | None = None,
) -> Tensor:
    """Return the cross-entropy of `hidden @ weight.T + bias` against `labels` as a differentiable float32 scalar.

    `hidden` is (…, width), `labels` (…), `weight` (words, width), `bias` (words) or None. The result is the mean over
    the labels that are not `ignore_index`, or with `num_items` their sum divided by it, as `fixed_cross_entropy` of
    transformers 5 computes it (loss/loss_utils.py); loss and gradients equal that to float32 rounding. Under autocast
    the matrix products use autocast's dtype, as a linear layer does. With `shared`, which a tied embedding has claimed,
    the gradient of `weight` goes there.
    """
    rows, targets = hidden.flatten(0, -2), labels.flatten().to(hidden.device)
    is_label = targets != ignore_index
    count = is_label.sum() if num_items is None else num_items
    recorded = hidden.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if hidden.device.type != "mps" and not recorded:
        # Rows without a label are dropped. On Metal that would wait for the GPU and make a new shape at every step, and
        # a CUDA graph has one shape.
        labelled = is_label.nonzero().squeeze(1)
        if len(labelled) < len(targets):
            rows, targets = rows[labelled], targets[labelled]
    needs_gradients = torch.is_grad_enabled()
    loss: Callable[..., Tensor] = _ChunkedCrossEntropy.apply
    total = loss(rows, weight, bias, targets, ignore_index, needs_gradients, shared)
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the rows' losses; its gradients are computed in the forward pass, while a chunk's logits are there."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore_index: int,
        needs_gradients: bool,
        shared: TiedGradient | None,
    ) -> Tensor:
        needs = [needs_gradients and needed for needed in ctx.needs_input_grad[:3]]
        # Only a gradient that flows on through the rows reaches the embedding.
        ctx.shared = shared if shared is not None and shared.claimed and needs[0] else None
        device = rows.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype

        def gradients(needs: list[bool]) -> tuple[Tensor, list[Tensor | None]]:
            with torch.autocast(device, enabled=False):
                return _loss_and_gradients(rows.detach(), weight.detach(), bias, targets, ignore_index, needs, dtype)

        recompute = ctx.shared is not None and ctx.shared.recompute and needs[1]
        total, ctx.gradients = gradients([needs[0], needs[1] and not recompute, needs[2]])
        ctx.recompute = (lambda: gradients([False, True, False])[1][1]) if recompute else None
        ctx.dtypes = (rows.dtype, weight.dtype, bias.dtype if bias is not None else None)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss goes backward once: its gradients are scaled in place")
        # In place: a copy of the head's gradient would cost the memory that was saved.
        scaled = [gradient.mul_(upstream) if gradient is not None else None for gradient in ctx.gradients]
        recompute, ctx.gradients, ctx.recompute = ctx.recompute, None, None
        if ctx.shared is not None:
            ready, scaled[1] = scaled[1], None
            ctx.shared.gradient = (lambda: recompute().mul_(upstream)) if recompute is not None else (lambda: ready)
        pairs = zip(scaled, ctx.dtypes, strict=True)
        scaled = [gradient.to(dtype) if gradient is not None else None for gradient, dtype in pairs]
        return (*scaled, None, None, None, None)


def _loss_and_gradients(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    needs: list[bool],
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the summed loss and the gradients of rows, weight and bias (None where `needs` is False), undivided."""
    scale = HALF_SCALE if dtype == torch.float16 else 1.0
    head = weight.to(dtype)
    total = torch.zeros((), dtype=torch.float32, device=rows.device)
    rows_gradient = torch.empty_like(rows, dtype=torch.float32 if scale > 1 else rows.dtype) if needs[0] else None
    weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
    bias_gradient = torch.zeros_like(weight[:, 0], dtype=torch.float32) if needs[2] else None
    size, made = max(1, CHUNK_BYTES // (4 * len(weight))), list[Tensor | None]([None] * 3)
    for start in range(0, len(rows), size):
        chunk = slice(start, start + size)
        part, target = rows[chunk].to(dtype), targets[chunk]
        missing = min(size, -(-len(part) // ROW_MULTIPLE) * ROW_MULTIPLE) - len(part)
        if missing and part.device.type == "mps":  # rows that change neither loss nor gradients
            part = torch.nn.functional.pad(part, (0, 0, 0, missing))
            target = torch.nn.functional.pad(target, (0, missing), value=ignore_index)
        gradients = rows_gradient[chunk] if rows_gradient is not None else None, weight_gradient, bias_gradient
        _add_chunk(made, part, target, total, head, bias, gradients, ignore_index, scale)
    if scale > 1:
        for scaled in (rows_gradient, weight_gradient, bias_gradient):
            if scaled is not None:
                scaled.div_(scale)
    return total, [rows_gradient, weight_gradient, bias_gradient]


def _add_chunk(
    made: list[Tensor | None],
    part: Tensor,
    target: Tensor,
    total: Tensor,
    head: Tensor,
    bias: Tensor | None,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    ignore_index: int,
    scale: float,
) -> None:
    """Add the loss of a chunk `part` to `total` and its share to the `gradients` of rows, weight and bias.

    `made` holds logits, loss and their gradient of the chunk before, each until this chunk's is made.
    """
    rows_gradient, weight_gradient, bias_gradient = gradients
    needed = any(gradient is not None for gradient in gradients)
    made[0] = logits = torch.nn.functional.linear(part, head, None if bias is None else bias.to(part.dtype))
    if part.device.type == "mps" and ordinary(logits) and trial.may_act("cross-entropy"):
        total += losses_in_place(logits, target, ignore_index, scale if needed else None).sum()
        gradient = logits
    else:
        losses, gradient = _chunk_loss(logits.float(), target, ignore_index, needs_gradient=needed)
        made[1:] = losses, None
        total += losses
        gradient = gradient.mul_(scale).to(part.dtype) if part.dtype != torch.float32 else gradient
    made[2] = gradient
    if bias_gradient is not None:
        bias_gradient += gradient.sum(0, dtype=torch.float32)
    if rows_gradient is not None:
        rows_gradient.copy_((gradient @ head)[: len(rows_gradient)])
    if weight_gradient is not None and part.dtype == torch.float32:
        weight_gradient.addmm_(gradient.t(), part)
    elif weight_gradient is not None:  # in float32, without a second tensor of the head's size
        some = max(1, CHUNK_BYTES // (4 * part.shape[1]))
        for word in range(0, len(head), some):
            weight_gradient[word : word + some] += gradient[:, word : word + some].t() @ part


def _chunk_loss(logits: Tensor, target: Tensor, ignore_index: int, needs_gradient: bool) -> tuple[Tensor, Tensor]:
    """Return a chunk's summed loss and its gradient by the logits (rows, words), which replaces them in memory."""
    is_label = target != ignore_index
    column = target.where(is_label, 0).unsqueeze(1)
    logits -= logits.amax(1, keepdim=True)
    label_logits = logits.gather(1, column).squeeze(1)
    logits.exp_()
    sums = logits.sum(1, keepdim=True)
    losses = ((sums.squeeze(1).log() - label_logits) * is_label).sum()
    if needs_gradient:
        logits /= sums
        logits.scatter_add_(1, column, torch.full_like(column, -1, dtype=logits.dtype))
        logits *= is_label.unsqueeze(1)
    return losses, logits
