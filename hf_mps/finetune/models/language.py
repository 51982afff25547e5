"""What the tasks of decoder language models share: the recipe's keys, the model with its adapters, what is measured."""

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
# peft's names for what the two classes are trained to do.
TASK_TYPES = {AUTO_CLASS: "CAUSAL_LM", "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM"}
# Longer than what a classifier reads: what a model learns of the far context it needs in one row.
MAX_LENGTH = 512


class Recipe(lengths.Padded):
    """Adds `lora`: adapters in place of all weights (`lora: {}` takes their defaults)."""

    lora: Lora | None = None


@dataclass
class Loaded:
    """A checkpoint opened: tokenizer and configuration at once, the weights when asked for."""

    tokenizer: Any
    config: Any
    longest: int
    content: str
    choices: dict[str, Choice[Any]] = field(default_factory=dict)


def load(recipe: lengths.Padded, checkpoint: Checkpoint) -> Loaded:
    """Open tokenizer and configuration, with a padding token. Raises UserError where that or the length cannot be."""
    tokenizer, config = checkpoint.tokenizer(), checkpoint.config()
    longest = lengths.limit(recipe, tokenizer, config, MAX_LENGTH)
    lent = tokens.set_pad_token(tokenizer, config)
    return Loaded(tokenizer, config, longest, tokens.digest(tokenizer), dict(lent))


def model(
    recipe: Recipe, checkpoint: Checkpoint, loaded: Loaded, auto_class: str = AUTO_CLASS, chunks: bool = True
) -> Any:
    """The model, adapted where the recipe says `lora`, its loss taken in chunks where `chunks` asks and it can be.

    What was loaded, what trains and how the loss is taken is added to the choices.

    Raises UserError for a checkpoint that cannot be used and for layers that it does not have.
    """
    import transformers

    from hf_mps.finetune.loss import deferred_head

    found, loaded.choices["model"] = checkpoint.model(getattr(transformers, auto_class), config=loaded.config)
    if recipe.lora is not None:
        checkpointed = bool(recipe.training.get(training_section.checkpointing()))
        found, loaded.choices["lora"] = apply(found, recipe.lora, TASK_TYPES[auto_class], checkpointed=checkpointed)
    if chunks:
        loaded.choices["loss"] = deferred_head.decide(recipe, found)
    return found


def saved(recipe: Recipe, auto_class: str = AUTO_CLASS) -> dict[str, Any]:
    """`save` and `snippet` of Prepared, where adapters ask for others than Trainer's."""
    said = recipe.lora
    if said is None:
        return {}

    def write(trainer: Any, folder: Path) -> None:
        save(trainer, folder, said)

    return {"save": write, "snippet": snippet(said, auto_class)}


def untrained(recipe: lengths.Padded) -> tuple[dict[str, Any], Baseline | None]:
    """The arguments that measure the model before its first step, and the baseline that this evaluation fills.

    None where the recipe's `training` says `eval_on_start: false`.
    """
    if recipe.training.get("eval_on_start") is False:
        return {}, None
    return {"eval_on_start": True}, Baseline("the model before its first step", {})


def labelled() -> Features:
    """The columns of rows that carry their labels, as `datasets` keeps them."""
    from datasets import Features, List, Value

    return Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})


@dataclass
class Labelled:
    """Pads rows of `input_ids` with labels for each token, or with the tokens themselves as labels; padding: -100."""

    tokenizer: Any

    def __call__(self, features: list[Any]) -> Any:
        from transformers import DataCollatorForTokenClassification

        # The plain collator of a label for each token, whatever its name.
        rows = [{"input_ids": row["input_ids"], "labels": row.get("labels", row["input_ids"])} for row in features]
        return DataCollatorForTokenClassification(self.tokenizer)(rows)
