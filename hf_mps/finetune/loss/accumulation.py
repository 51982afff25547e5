"""Gradient accumulation with models whose loss knows nothing of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch._subclasses.fake_tensor import FakeTensor
from transformers import Trainer

# Two numbers of items in a step, far enough apart that a loss which reads them cannot come out equal.
ITEM_COUNTS = (1, 1000)
TRIAL_ROWS = 2


def fix_accumulation_scaling(trainer: Any) -> bool:
    """Let `trainer` divide the loss by the accumulation steps where the model's loss does not; return whether it does.

    Trainer hands a model the number of labels in a whole step (`num_items_in_batch`) and divides by nothing itself
    where `forward` takes keyword arguments. Many heads take that number and drop it (BERT's, RoBERTa's, BART's, T5's):
    their loss and gradients come out as many times too large as there are accumulation steps (transformers#47688). Two
    training rows tell whether the number makes a difference to this model. A trainer with its own loss is left alone,
    and so is a model without numbers, as `hf-mps plan` has it. With several processes it is the same: Trainer
    multiplies such a loss by their number, for the mean over them to be over all of the step's labels. There a loss
    that is the mean over a batch's tokens is replaced by that over the step's (`over_all_labels`), or processes whose
    rows have fewer labels would count too much.
    """
    from hf_mps.finetune.loss.deferred_head import ChunkedLoss

    has_own_loss = type(trainer).compute_loss is not Trainer.compute_loss or trainer.compute_loss_func is not None
    model, weight = trainer.model, next(trainer.model.parameters())
    without_numbers = weight.is_meta or isinstance(weight, FakeTensor)
    if has_own_loss or without_numbers or not trainer.model_accepts_loss_kwargs:
        return False
    dataset = getattr(trainer.train_dataset, "sample", trainer.train_dataset)  # of a stream its first rows
    rows = range(min(TRIAL_ROWS, len(dataset)))
    training, rng_state = model.training, torch.get_rng_state()
    with torch.device("cpu"):  # whatever the default is
        inputs = trainer.data_collator([dataset[row] for row in rows])
    # Under FSDP the weights are on the CPU still: the model is divided when the training begins.
    inputs = send_to_device(trainer._prepare_inputs(inputs), weight.device)
    torch.set_rng_state(rng_state)  # the collator may have drawn masks, and a run depends on its seed alone
    model.eval()
    try:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        divides = isinstance(getattr(inner, "loss_function", None), ChunkedLoss)
        reads_count = divides or _loss_depends_on_count(model, inputs)
        shared = not reads_count and trainer.args.world_size > 1 and trainer.label_smoother is None
        by_tokens = shared and _is_mean_over_tokens(model, inputs)
    finally:
        model.train(training)
    if not reads_count:
        trainer.model_accepts_loss_kwargs = False
    if by_tokens:
        trainer.compute_loss_func = over_all_labels
    return not reads_count


def over_all_labels(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """Return the cross-entropy of the labels, shape (rows, tokens), over the number of those of the whole step.

    It is Trainer's `compute_loss_func`; without a number (an evaluation) it is the mean.
    """
    from transformers.loss.loss_utils import fixed_cross_entropy

    logits = outputs["logits"].flatten(0, 1).float()
    loss: torch.Tensor = fixed_cross_entropy(logits, labels.to(logits.device).flatten(), num_items_in_batch)
    return loss


def _loss_depends_on_count(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether the loss of a batch changes with the number of items in the step."""
    with torch.no_grad(), torch.device(next(model.parameters()).device):
        few, many = (model(**inputs, num_items_in_batch=torch.tensor(count)).loss for count in ITEM_COUNTS)
    return not torch.equal(few, many)


def _is_mean_over_tokens(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether the model's loss is the mean of the cross-entropy over its labels, one for each token."""
    labels = inputs.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2:  # a detector's are a list of boxes
        return False
    given = {name: value for name, value in inputs.items() if name != "labels"}
    with torch.no_grad(), torch.device(next(model.parameters()).device):
        own = model(**inputs).loss
        try:
            outputs = model(**given)
        except (ValueError, TypeError, RuntimeError):  # a decoder that makes its inputs of the labels
            return False
        if outputs.get("logits") is None or outputs["logits"].shape[:-1] != labels.shape:
            return False
        return torch.allclose(own.float(), over_all_labels(outputs, labels), rtol=1e-4)
