"""Gradient accumulation with models whose loss knows nothing of it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer

# Two numbers of items in a step that no loss takes for one another.
FEW, MANY = 1, 1000
ROWS = 2


def settle(trainer: Any) -> bool:
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
    model, rows = trainer.model, range(min(ROWS, len(trainer.train_dataset)))
    training, drawn = model.training, torch.get_rng_state()
    with torch.device("cpu"):  # whatever the default is
        inputs = trainer.data_collator([trainer.train_dataset[row] for row in rows])
    if next(model.parameters()).is_meta:  # without numbers (`hf-mps plan`): a small one of its class is asked
        from hf_mps.finetune.smoke.model import twin

        model = twin(model)
    else:
        inputs = trainer._prepare_inputs(inputs)
    torch.set_rng_state(drawn)  # a collator may have drawn from it (masks), and a run is its seed's alone
    model.eval()
    try:
        with torch.no_grad(), torch.device(next(model.parameters()).device):
            few, many = (model(**inputs, num_items_in_batch=torch.tensor(count)).loss for count in (FEW, MANY))
    finally:
        model.train(training)
    if torch.equal(few, many):
        trainer.model_accepts_loss_kwargs = False
        return True
    return False
