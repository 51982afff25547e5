"""transformers' Trainer with an evaluation over tokens: losses are summed, never averaged by batches, no logits are
kept. And the trainer of speech that is written by generation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy
import torch
from transformers import Seq2SeqTrainer, Trainer

from hf_mps.finetune.loss import chunked, deferred_head
from hf_mps.finetune.models.trainer_mixins import MeasuredBefore
from hf_mps.finetune.run.logging import errors_only
from hf_mps.finetune.text.lengths import IGNORED
from hf_mps.metrics.selection import Chosen


class TokenTrainer(MeasuredBefore, Trainer):  # type: ignore[misc]
    """Trainer for models that predict tokens; its evaluations return sums for each row instead of logits.

    `causal` says that the logits at one position are for the next token.
    """

    def __init__(self, *arguments: Any, causal: bool = True, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._causal = causal

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Return the batch's loss a token, and for each row (summed loss, tokens, correct ones), float32 (B, 3)."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            sums = row_sums(model, inputs, causal=self._causal)
        loss = sums[:, 0].sum() / sums[:, 1].sum().clamp(min=1)
        # Trainer computes metrics only where there are labels; nobody reads these.
        return (loss, None, None) if prediction_loss_only else (loss, sums, sums[:, 1])


def row_sums(model: Any, inputs: Mapping[str, Any], *, causal: bool) -> Any:
    """Return for each row of a batch: (loss summed over its labelled tokens, their number, the correctly predicted
    ones).

    `inputs` are the model's own on its device, with `labels` of shape (B, T), -100 where nothing is to be predicted.
    The result is float32 (B, 3). Where the model computes its loss in chunks, the sums are too, and whole logits never
    exist.
    """
    # With adapters peft wraps the model, and the loss is set on what it wraps.
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    loss = getattr(inner, "loss_function", None)
    if not isinstance(loss, deferred_head.ChunkedLoss):
        logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
        return _sums(*_tokens(logits, None, None, _targets(inputs["labels"], causal)))
    recorder = RowSumLoss(**{field.name: getattr(loss, field.name) for field in fields(loss)})
    inner.loss_function = recorder
    try:
        model(**inputs)
    finally:
        inner.loss_function = loss
    return recorder.sums


@dataclass
class RowSumLoss(deferred_head.ChunkedLoss):
    """Replaces a model's loss for one pass without gradients, and keeps the sums of each row."""

    sums: Any = None

    def __call__(self, logits: Any, labels: Any, *others: Any, **more: Any) -> Any:
        weight, bias = (self.head.weight, self.head.bias) if self.head.deferred else (None, None)
        self.sums = _sums(*_tokens(logits, weight, bias, _targets(labels, self.shifted)))
        return self.sums[:, 0].sum()


def _targets(labels: Any, causal: bool) -> Any:
    """Return what each position predicts: the next position's label for a causal model, nothing at the last one."""
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:] if causal else labels


def _tokens(logits_or_hidden: Any, weight: Any, bias: Any, targets: Any) -> tuple[Any, Any, Any]:
    """Return each position's loss (float32, 0 without a label), whether it is correct, whether it has a label; (B, T).

    `logits_or_hidden` are logits, or hidden states where the head's `weight` is given. Only one chunk's logits exist in
    float32 at a time.
    """
    flat, flat_targets = logits_or_hidden.flatten(0, -2), targets.flatten()
    losses, correct = [], []
    size = max(1, chunked.CHUNK_BYTES // (4 * len(weight if weight is not None else logits_or_hidden[0, 0])))
    # Positions without a label are computed too: Metal compiles a graph for each shape (pytorch#181485).
    for start in range(0, len(flat_targets), size):
        part, target = flat[start : start + size], flat_targets[start : start + size]
        logits = part if weight is None else torch.nn.functional.linear(part, weight, bias)
        losses.append(torch.nn.functional.cross_entropy(logits.float(), target, ignore_index=IGNORED, reduction="none"))
        correct.append(logits.argmax(-1) == target)  # -100 is no token: a position without a label is never correct
    return torch.cat(losses).view_as(targets), torch.cat(correct).view_as(targets), targets != IGNORED


def _sums(losses: Any, correct: Any, labelled: Any) -> Any:
    return torch.stack([values.float().sum(-1) for values in (losses, labelled, correct)], dim=-1)


def measured(sums: Any, chosen: Chosen) -> dict[str, float]:
    """Return a split's metrics from its rows' sums, shape (rows, 3), as `row_sums` returns them.

    The loss is the mean over tokens and replaces Trainer's mean over batches; perplexity is its exponential.
    """
    total, tokens, correct = numpy.asarray(sums, dtype=numpy.float64).sum(axis=0)
    tokens = max(tokens, 1.0)
    loss = total / tokens
    return {"loss": float(loss), **chosen.of({"perplexity": perplexity(loss), "accuracy": correct / tokens})}


def perplexity(loss: float) -> float:
    """Return the exponential of a mean loss a token in nats; infinite where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class SpeechTrainer(MeasuredBefore, Seq2SeqTrainer):  # type: ignore[misc]
    """Seq2SeqTrainer without the warnings that Whisper's generation draws from transformers' own."""

    def prediction_step(self, *arguments: Any, **settings: Any) -> Any:
        # Whisper's own generate hands transformers' a configuration and settings beside it, which is warned of.
        with errors_only():
            return super().prediction_step(*arguments, **settings)
