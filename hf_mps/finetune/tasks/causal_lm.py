"""Causal language modelling: a model learns to continue texts, joined and cut into blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import language
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.text import blocks, lengths, tokens
from hf_mps.metrics.selection import choose

if TYPE_CHECKING:
    from datasets import Dataset

METRICS = ("perplexity", "accuracy")


class Recipe(language.Decoder):
    """`max_length` is the length of a block in tokens."""

    task: Literal["causal-lm"]
    data: blocks.Data


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make blocks, model, collator and metrics. Raises UserError for rows or a checkpoint that cannot be used."""
    from hf_mps.finetune.models.token_trainer import TokenTrainer, measured

    chosen = choose(recipe.metrics, METRICS, recipe.task)
    loaded = language.load(recipe, checkpoint)
    # The end token of a single text has no place within a longer one.
    around = blocks.SpecialTokens(blocks.special_tokens(loaded.tokenizer).before, ())
    features = {split: blocks.make(recipe.data, rows[split], loaded, around) for split in rows}
    counts = {split: tokens.counts(features[split]) for split in features}
    length, loaded.choices["blocks"] = blocks.decide(recipe, recipe.data, counts, loaded.longest)
    model = language.model(recipe, checkpoint, loaded, device=device)
    defaults, baseline = language.untrained(recipe)
    return Prepared(
        splits=features | {"train": blocks.streamed(recipe.data, rows["train"], features["train"], loaded, around)},
        model=model,
        processing_class=loaded.tokenizer,
        collator=length.value.collator(language.Labelled(loaded.tokenizer), loaded.tokenizer),
        metrics=chosen,
        compute_metrics=lambda evaluated: measured(evaluated.predictions, chosen),
        baseline=baseline,
        auto_class=language.AUTO_CLASS,
        pipeline_tag="text-generation",
        choices={"lengths": length, **loaded.choices},
        trainer=TokenTrainer,
        arguments_defaults=defaults,
        trainer_settings={"untrained": baseline},
        token_counts=counts["train"],
        predict=lambda trainer: predicted(trainer, features["validation"], loaded.tokenizer),
        **language.saved(recipe),
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved model measures texts, joined and cut into blocks. Raises UserError for a checkpoint that
    cannot be used.
    """
    from hf_mps.finetune.models.token_trainer import TokenTrainer

    loaded = language.load(recipe, checkpoint)
    around = blocks.SpecialTokens(blocks.special_tokens(loaded.tokenizer).before, ())
    length = lengths.kept(recipe, chosen, loaded.tokenizer, loaded.config)
    model = language.model(recipe, checkpoint, loaded, device=device)
    return Answering(
        model=model,
        processing_class=loaded.tokenizer,
        collator=length.value.collator(language.Labelled(loaded.tokenizer), loaded.tokenizer),
        answers=lambda trainer, rows: predicted(
            trainer, blocks.make(recipe.data, rows, loaded, around), loaded.tokenizer
        ),
        choices={"lengths": length, **loaded.choices},
        trainer=TokenTrainer,
        at_a_time=blocks.ROWS_AT_A_TIME,
    )


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return generated sentences, four to a row."""
    return blocks.smoke_rows(recipe.data, recipe.seed)


def predicted(trainer: Any, features: Dataset, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield each validation block with the number of its predicted tokens, their mean loss, perplexity and accuracy."""
    from hf_mps.finetune.models.token_trainer import perplexity

    for row, (total, count, right) in zip(features, trainer.predict(features).predictions.tolist(), strict=True):
        count = max(count, 1.0)
        yield {
            "text": tokenizer.decode(row["input_ids"]),
            "tokens": int(count),
            "loss": total / count,
            "perplexity": perplexity(total / count),
            "accuracy": right / count,
        }
