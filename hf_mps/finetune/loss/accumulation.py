"""Gradient accumulation with models whose loss knows nothing of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Trainer

# Two numbers of items in a step that no loss takes for one another.
FEW, MANY = 1, 1000
TRIAL_ROWS = 2


def fix_accumulation_scaling(trainer: Any) -> bool:
    """Let `trainer` divide the loss by the accumulation steps itself where the model's loss does not; whether it does.

    Trainer hands a model the number of labels in a whole step (`num_items_in_batch`) and divides by nothing itself
    wherever `forward` takes keyword arguments. Many heads take them and drop them (BERT's, RoBERTa's, BART's, T5's):
    their loss and gradients come out larger by as many times as there are accumulation steps (transformers#47688).
    Found by asking the model, with two training rows, whether that number makes a difference. A trainer with a loss of
    its own is left alone.
    """
    own = type(trainer).compute_loss is not Trainer.compute_loss or trainer.compute_loss_func is not None
    if own or not trainer.model_accepts_loss_kwargs:
        return False
    model, rows = trainer.model, range(min(TRIAL_ROWS, len(trainer.train_dataset)))
    training, drawn = model.training, torch.get_rng_state()
    with torch.device("cpu"):  # whatever the default is
        inputs = trainer.data_collator([trainer.train_dataset[row] for row in rows])
    weightless = next(model.parameters()).is_meta  # `hf-mps plan`: there are no numbers to compare
    if not weightless:
        inputs = trainer._prepare_inputs(inputs)
    torch.set_rng_state(drawn)  # a collator may have drawn from it (masks), and a run is its seed's alone
    model.eval()
    try:
        counted = _reads_count(model, inputs) if weightless else _loss_depends_on_count(model, inputs)
    finally:
        model.train(training)
    if not counted:
        trainer.model_accepts_loss_kwargs = False
    return not counted


def _loss_depends_on_count(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether the loss of a batch is another with another number of items in the step."""
    with torch.no_grad(), torch.device(next(model.parameters()).device):
        few, many = (model(**inputs, num_items_in_batch=torch.tensor(count)).loss for count in (FEW, MANY))
    return not torch.equal(few, many)


def _reads_count(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether a model on meta computes anything with the number of items.

    A forward pass that reads numbers cannot be followed there: then the loss is taken for one that looks, as the loss
    functions of transformers itself do (loss/loss_utils.py).
    """
    from hf_mps.finetune.loss.deferred_head import ChunkedLoss
    from hf_mps.finetune.smoke.fake import FakeScalars, needs_numbers

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if isinstance(getattr(inner, "loss_function", None), ChunkedLoss):
        return True  # chunked.cross_entropy divides by it
    items = torch.tensor(FEW, device="meta")
    moved = {name: one.to("meta") if isinstance(one, torch.Tensor) else one for name, one in inputs.items()}
    numbers = [(one, inputs[name]) for name, one in moved.items() if isinstance(one, torch.Tensor)]
    with torch.no_grad(), torch.device("meta"), FakeScalars(numbers), _UseOf(items) as seen:
        try:
            model(**moved, num_items_in_batch=items)
        except Exception as error:
            if not needs_numbers(error):
                raise
            return True
    return bool(seen.used)


class _UseOf(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operator is given `wanted`."""

    def __init__(self, wanted: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wanted = wanted
        self.used = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.used = self.used or any(leaf is self._wanted for leaf in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))
