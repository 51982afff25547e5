"""Greedy answers of a decoder model to prompts, after training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from hf_mps.finetune.recipe import schema
from hf_mps.finetune.run.logging import errors_only

BATCH = 8


class Generate(schema.Section):
    """For predictions.csv: to how many validation rows the model answers, and with at most how many tokens."""

    rows: int = Field(default=16, ge=0)
    max_new_tokens: int = Field(default=128, ge=1)


def answers(trainer: Any, tokenizer: Any, prompts: Sequence[str], settings: Generate) -> Iterator[str]:
    """Yield the answer to each prompt, without special tokens; greedy, so that equal weights answer equally.

    Prompts are cut on their left so that prompt and answer fit the model's positions.
    """
    model = trainer.model
    positions = getattr(model.config, "max_position_embeddings", None) or 2**31
    longest_prompt = max(1, positions - settings.max_new_tokens)
    model.eval()
    for start in range(0, len(prompts), BATCH):
        # verbose=False: the tokenizer would warn of prompts longer than the model's positions, and they are cut here.
        prompts_ids = tokenizer(list(prompts[start : start + BATCH]), add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        ids = [prompt_ids[-longest_prompt:] for prompt_ids in prompts_ids]
        # The answer follows the last token of each prompt, so padding is on the left.
        batch = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt").to(model.device)
        with errors_only():
            generated = model.generate(
                **batch,
                max_new_tokens=min(settings.max_new_tokens, positions - batch["input_ids"].shape[1]) or 1,
                do_sample=False,
                num_beams=1,
                pad_token_id=tokenizer.pad_token_id,
                use_cache=True,
            )
        yield from tokenizer.batch_decode(generated[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
