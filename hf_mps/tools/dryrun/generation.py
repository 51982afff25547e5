"""What a trainer generates within a step (GRPO's completions), looked at: its first pass and its last one.

A trace has no numbers to draw tokens by. The last pass has the longest cache of keys and values, which is what
generation needs most memory for; all passes between are like it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from hf_mps.core.choice import Choice


def told(trainer: Any) -> dict[str, Choice[str]]:
    """Return what is said of a step in which `trainer` generates; empty where it does not."""
    if not generates(trainer):
        return {}
    reason = "of each completion the first and the last are looked at; those between are like the last"
    return {"generation": Choice(f"2 of {trainer.args.max_completion_length} passes", reason)}


def generates(trainer: Any) -> bool:
    """Whether a step of `trainer` begins with completions of its prompts: GRPO's do, every so many batches."""
    return getattr(trainer.args, "steps_per_generation", None) is not None


@torch.no_grad()
def first_and_last_pass(trainer: Any, batch: Mapping[str, Any]) -> None:
    """Run the prompts of `batch` (input_ids, attention_mask) and a completion's last token, with all that is cached.

    The batch's last tokens count as the completion. All batches that a generation is for are run together.
    """
    from transformers import DynamicCache
    from trl.models.utils import disable_gradient_checkpointing

    args, model = trainer.args, trainer.model
    ids, mask = (batch[name].repeat(args.steps_per_generation, 1) for name in ("input_ids", "attention_mask"))
    said = min(args.max_completion_length, ids.shape[1] - 1)
    cache = DynamicCache(config=model.config)
    with disable_gradient_checkpointing(model, args.gradient_checkpointing_kwargs):
        prompt = {"input_ids": ids[:, :-said], "attention_mask": mask[:, :-said]}
        model(**prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        for layer in cache.layers:
            if said > 1 and getattr(layer, "keys", None) is not None:
                layer.update(*(_of_length(states, said - 1) for states in (layer.keys, layer.values)))
        last = {"input_ids": ids[:, -1:], "attention_mask": mask}
        logits = model(**last, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        scores = logits.to(copy=True, dtype=torch.float32) / args.temperature
        torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), num_samples=1)


@contextmanager
def without_extremes(trainer: Any) -> Iterator[None]:
    """Let TRL log the extremes of its measures with NaN among them: what it leaves out of them a trace does not know.

    No number of a step that is looked at is logged.
    """
    with ExitStack() as stack:
        if generates(trainer):
            for name, function in (("nanmin", torch.min), ("nanmax", torch.max)):
                stack.enter_context(patch(f"trl.trainer.grpo_trainer.{name}", function))
        yield


def _of_length(states: torch.Tensor, length: int) -> torch.Tensor:
    """Keys or values of so many tokens, (rows, heads, length, width)."""
    return states.new_zeros((*states.shape[:-2], length, states.shape[-1]))
