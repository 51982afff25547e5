"""What the tasks of language models share: the recipe's keys, labels and how answers are generated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from hf_mps.finetune.models.checkpoint import resolve, text_config
from hf_mps.finetune.models.lora import Lora
from hf_mps.finetune.models.quantization import Kind
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.run.logging import errors_only
from hf_mps.finetune.text import chat, lengths
from hf_mps.metrics import Baseline

AUTO_CLASS = "AutoModelForCausalLM"
# peft's task types of the auto classes.
TASK_TYPES = dict.fromkeys((AUTO_CLASS, "AutoModelForImageTextToText"), "CAUSAL_LM")
TASK_TYPES["AutoModelForSeq2SeqLM"] = "SEQ_2_SEQ_LM"
# Longer than a classifier's rows: a model learns long context only from long rows.
MAX_LENGTH = 512

LABELLED = {"input_ids": ("int32",), "labels": ("int32",)}
"""The columns of rows that carry their labels, as `tokens.typed` reads them."""
# Prompts that are answered at once.
PROMPTS = 8


class Recipe(lengths.Padded):
    """Adds `lora`: adapters in place of all weights (`lora: {}` takes their defaults)."""

    lora: Lora | None = None


class Decoder(Recipe):
    """Adds `quantization`: the model's linear layers in 4 bits (nf4, fp4) or 8 (int8) below the adapters of `lora`."""

    quantization: Kind | None = None
    """Keeps the frozen weights below the adapters in 4 bits (nf4, fp4) or 8 (int8)."""

    def wrong(self) -> Iterator[str]:
        if self.quantization is None:
            return
        if self.lora is None:
            told = "without lora, and rounded weights cannot be trained; give lora: {}, or leave quantization out"
            yield f"has quantization: {self.quantization} {told}"
        if self.training.get("fsdp"):
            yield "has quantization and training.fsdp, which divides whole weights; leave one of them out"


class Chat(Decoder):
    """Adds the chat template: `plain`, or a Jinja file."""

    chat_template: str | None = None
    """plain, or a Jinja file; by default the tokenizer's own."""


class Generate(schema.Section):
    """For predictions.csv: to how many validation rows the model answers, and with at most how many tokens."""

    rows: int = Field(default=16, ge=0)
    """How many validation rows the model answers in predictions.csv."""
    max_new_tokens: int = Field(default=128, ge=1)
    """The most tokens of an answer."""


def untrained(recipe: schema.Recipe) -> tuple[dict[str, Any], Baseline | None]:
    """Return the arguments that evaluate the model before its first step, and the baseline that this fills.

    The baseline is None where the recipe's `training` says `eval_on_start: false`.
    """
    if recipe.training.get("eval_on_start") is False:
        return {}, None
    return {"eval_on_start": True}, Baseline("is the model before its first step", {})


@dataclass
class Labelled:
    """Pads rows of `input_ids` and a label for each token (the token itself where the row has none); padding is
    -100.
    """

    tokenizer: Any

    def __call__(self, features: list[Any]) -> Any:
        from transformers import DataCollatorForTokenClassification

        # Its name aside, this is the collator for one label a token.
        rows = [{"input_ids": row["input_ids"], "labels": row.get("labels", row["input_ids"])} for row in features]
        return DataCollatorForTokenClassification(self.tokenizer)(rows)


def started_from(recipe: Recipe) -> Any:
    """Return the model that a run started from, against which a saved one is measured.

    Raises UserError where it is not there any more.
    """
    return replace(resolve(recipe.model), dtype=recipe.weights).model(AUTO_CLASS)[0]


def answers(trainer: Any, tokenizer: Any, prompts: Sequence[str], how: Generate, at_once: int) -> Iterator[str]:
    """Yield the answer to each prompt, without special tokens; greedy, so that equal weights answer equally.

    Prompts are cut on their left so that prompt and answer fit the model's positions.
    """
    model = trainer.model
    longest_prompt = max(1, positions(model) - how.max_new_tokens)
    model.eval()
    for start in range(0, len(prompts), at_once):
        # verbose=False: the tokenizer would warn of prompts longer than the model's positions, and they are cut here.
        made = tokenizer(list(prompts[start : start + at_once]), add_special_tokens=False, verbose=False)
        ids = [prompt_ids[-longest_prompt:] for prompt_ids in made["input_ids"]]
        yield from generated(model, tokenizer, ids, how.max_new_tokens)


def positions(model_: Any) -> int:
    """Return how many tokens a model has positions for."""
    return getattr(text_config(model_), "max_position_embeddings", None) or lengths.UNLIMITED


def generated(model_: Any, tokenizer: Any, ids: list[list[int]], max_new_tokens: int, **how: Any) -> list[str]:
    """Return what a model says behind each prompt's `ids`, without special tokens; greedy unless `how` says otherwise.

    It ends at the tokens of its generation configuration, and where the chat template ends a turn.
    """
    # The answer follows the last token of each prompt, so padding is on the left.
    batch = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt").to(model_.device)
    width = batch["input_ids"].shape[1]
    settings = {"do_sample": False, "num_beams": 1, "pad_token_id": tokenizer.pad_token_id, "use_cache": True}
    settings["max_new_tokens"] = max(1, min(max_new_tokens, positions(model_) - width))
    # Where a chat template was learned, its end of a turn may be missing in the model's configuration.
    known = model_.generation_config.eos_token_id
    ends = [] if known is None else list(known) if isinstance(known, (list, tuple)) else [known]
    turn = chat.end_of_turn(tokenizer) if tokenizer.chat_template else None
    if turn is not None and turn not in ends:
        settings["eos_token_id"] = [*ends, turn]
    with errors_only():
        made = model_.generate(**batch, **(settings | how))
    return list(tokenizer.batch_decode(made[:, width:], skip_special_tokens=True))


def decoded(ids: Any, tokenizer: Any) -> list[str]:
    """Return texts for ids of shape (rows, tokens), -100 behind a row's end."""
    import numpy

    ids = ids[0] if isinstance(ids, tuple) else ids
    whole = numpy.where(ids < 0, tokenizer.pad_token_id, ids)
    return [text.strip() for text in tokenizer.batch_decode(whole, skip_special_tokens=True)]
