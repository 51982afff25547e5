"""Trainer for a model that learns a larger one's next-token probabilities: TRL's generalized distillation (GKD).

TRL's own GKDTrainer (trl/experimental/gkd) selects the answers' tokens by a mask, which waits for Metal and compiles a
graph for each number of tokens, and holds several tensors as wide as the vocabulary. This takes TRL's divergence of all
tokens, some at a time, and leaves the others out by a product: the same loss to rounding.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig
from trl.import_utils import TRLExperimentalWarning
from trl.models import unwrap_model_for_generation

from hf_mps.core import notices
from hf_mps.finetune.loss import chunked
from hf_mps.finetune.models.token_trainer import TokenTrainer
from hf_mps.finetune.run.logging import errors_only
from hf_mps.finetune.text.lengths import IGNORED

with notices.ignoring(TRLExperimentalWarning):  # the recipe asks for it by its task
    from trl.experimental.gkd import GKDTrainer


class DistillTrainer(TokenTrainer):
    """`ref_model` is the teacher, `distillation` the recipe's section; evaluations are those of TokenTrainer."""

    def __init__(self, *arguments: Any, ref_model: Any, distillation: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.ref_model = self.accelerator.prepare_model(ref_model.eval().requires_grad_(False), evaluation_mode=True)
        self.distillation = distillation
        self.own_answers: float = distillation.lmbda

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Take a step on the batch, or as often as `lmbda` says on the model's own answers to its prompts."""
        # One draw a batch, as TRL has it, from Python's generator, which checkpoints hold. A step that is traced has no
        # numbers to answer by (`hf-mps plan`).
        answers = self.own_answers and type(inputs["input_ids"]) is Tensor
        if answers and random.random() <= self.own_answers:
            inputs = self._own_answers(model, self._prepare_inputs(inputs))
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: Any, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the divergence summed over the labelled tokens, over their number or `num_items_in_batch`."""
        given = {name: value for name, value in inputs.items() if name != "labels"}
        outputs = model(**given)
        with torch.no_grad():
            taught = self.ref_model(**given).logits
        labelled = inputs["labels"][:, 1:] != IGNORED
        total = divergence(outputs.logits[:, :-1], taught[:, :-1], labelled, self.distillation.beta)
        loss = total / (labelled.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _own_answers(self, model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch of what the model says behind each row's tokens before the last of its answers."""
        tokenizer: Any = self.processing_class
        model.eval()  # it answers without dropout, in a run's first step as in all others; a step trains it again
        rows = zip(inputs["input_ids"].tolist(), inputs["labels"].tolist(), strict=True)
        # Where the answer begins the row, its first token is given: a model needs one to go on from.
        prompts = [ids[: _last_answer(labels)] or ids[:1] for ids, labels in rows]
        padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(self.args.device)
        how = {  # as TRL has it (gkd_trainer.py)
            "max_new_tokens": self.distillation.max_new_tokens,
            "temperature": self.distillation.temperature,
            "do_sample": True,
            "top_k": 0,
            "top_p": 1.0,
            "use_cache": not getattr(self.args, "gradient_checkpointing", False),
            "pad_token_id": tokenizer.pad_token_id,
        }
        settings = GenerationConfig(**how)
        known = self.accelerator.unwrap_model(model).generation_config.eos_token_id
        settings.eos_token_id = tokenizer.eos_token_id if known is None else known
        asked = {"prompts": padded["input_ids"], "prompt_attention_mask": padded["attention_mask"]}
        generating = unwrap_model_for_generation(model, self.accelerator, generation_kwargs=how)
        with torch.no_grad(), errors_only(), generating as inner:
            ids, mask, labels = GKDTrainer.generate_on_policy_outputs(inner, asked, settings)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def divergence(student: Tensor, teacher: Tensor, labelled: Tensor, beta: float) -> Tensor:
    """Return TRL's generalized Jensen-Shannon divergence, summed over the labelled positions.

    Logits are (rows, places, words), of words that both know; `labelled` is (rows, places).
    """
    words = min(student.shape[-1], teacher.shape[-1])
    ours, theirs, counts = student[..., :words].flatten(0, 1), teacher[..., :words].flatten(0, 1), labelled.flatten()
    total = torch.zeros((), dtype=torch.float32, device=ours.device)
    size = max(1, chunked.CHUNK_BYTES // (4 * words))
    for start in range(0, len(counts), size):
        part = slice(start, start + size)
        # Computed again in the backward pass: what a piece makes on its way is six times its logits.
        of_part: Tensor = checkpoint(_divergence, ours[part], theirs[part], counts[part], beta, use_reentrant=False)
        total = total + of_part
    return total


def _divergence(student: Tensor, teacher: Tensor, labelled: Tensor, beta: float) -> Any:
    each = GKDTrainer.generalized_jsd_loss(student.float(), teacher.float(), beta=beta, reduction="none")
    return (each.sum(-1) * labelled).sum()


def _last_answer(labels: list[int]) -> int:
    """Return where the last run of labelled tokens begins."""
    end = next((at + 1 for at in range(len(labels) - 1, -1, -1) if labels[at] != IGNORED), 0)
    return next((at + 1 for at in range(end - 1, -1, -1) if labels[at] == IGNORED), 0)
