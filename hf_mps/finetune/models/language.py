"""What the tasks of decoder language models share: the recipe's keys, and the model with its adapters and its loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.finetune.metrics import Baseline
from hf_mps.finetune.models.lora import Lora, apply, save, snippet
from hf_mps.finetune.recipe import training_section
from hf_mps.finetune.text import lengths, tokens

if TYPE_CHECKING:
    from datasets import Features

    from hf_mps.finetune.models.checkpoint import Checkpoint

AUTO_CLASS = "AutoModelForCausalLM"
# peft's task types of the two auto classes.
TASK_TYPES = {AUTO_CLASS: "CAUSAL_LM", "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM"}
# Longer than a classifier's rows: a model learns long context only from long rows.
MAX_LENGTH = 512


class Recipe(lengths.Padded):
    """Adds `lora`: adapters in place of all weights (`lora: {}` takes their defaults)."""

    lora: Lora | None = None


@dataclass
class Loaded:
    """An opened checkpoint: its tokenizer and configuration; the weights are loaded later."""

    tokenizer: Any
    config: Any
    longest: int
    content: str
    choices: dict[str, Choice[Any]] = field(default_factory=dict)


def load(recipe: lengths.Padded, checkpoint: Checkpoint) -> Loaded:
    """Open tokenizer and configuration, with a padding token. Raises UserError where there is none, or for the
    length.
    """
    tokenizer, config = checkpoint.tokenizer(), checkpoint.config()
    longest = lengths.limit(recipe, tokenizer, config, MAX_LENGTH)
    lent = tokens.set_pad_token(tokenizer, config)
    return Loaded(tokenizer, config, longest, tokens.digest(tokenizer), dict(lent))


def model(
    recipe: Recipe, checkpoint: Checkpoint, loaded: Loaded, auto_class: str = AUTO_CLASS, chunks: bool = True
) -> Any:
    """Load the model, with adapters where the recipe says `lora`, and with its loss in chunks where `chunks` and it
    allow.

    Adds to the choices what was loaded, what trains, and how the loss is computed. Raises UserError for a checkpoint
    that cannot be used and for layers that it does not have.
    """
    import transformers

    from hf_mps.finetune.loss import deferred_head

    model_, loaded.choices["model"] = checkpoint.model(getattr(transformers, auto_class), config=loaded.config)
    if recipe.lora is not None:
        checkpointed = bool(recipe.training.get(training_section.checkpointing()))
        model_, loaded.choices["lora"] = apply(model_, recipe.lora, TASK_TYPES[auto_class], checkpointed=checkpointed)
    if chunks:
        loaded.choices["loss"] = deferred_head.decide(recipe, model_)
    return model_


def saved(recipe: Recipe, auto_class: str = AUTO_CLASS) -> dict[str, Any]:
    """Return `save` and `snippet` of Prepared where adapters need others than Trainer's."""
    adapters = recipe.lora
    if adapters is None:
        return {}

    def write(trainer: Any, folder: Path) -> None:
        save(trainer, folder, adapters)

    return {"save": write, "snippet": snippet(adapters, auto_class)}


def untrained(recipe: lengths.Padded) -> tuple[dict[str, Any], Baseline | None]:
    """Return the arguments that evaluate the model before its first step, and the baseline that this fills.

    The baseline is None where the recipe's `training` says `eval_on_start: false`.
    """
    if recipe.training.get("eval_on_start") is False:
        return {}, None
    return {"eval_on_start": True}, Baseline("the model before its first step", {})


def labelled() -> Features:
    """Return the columns of rows that carry their labels, as `datasets` stores them."""
    from datasets import Features, List, Value

    return Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})


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
