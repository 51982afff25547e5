"""Masked language modelling: a model learns to fill masked tokens in texts, joined and cut into blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from hf_mps.core import source_digest
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import language
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.tasks.causal_lm import METRICS, predicted
from hf_mps.finetune.text import blocks, lengths, tokens
from hf_mps.metrics.selection import choose

if TYPE_CHECKING:
    from datasets import Dataset

AUTO_CLASS = "AutoModelForMaskedLM"


class Recipe(lengths.Padded):
    """Adds the share of tokens that are to be predicted."""

    task: Literal["masked-lm"]
    data: blocks.Data
    mlm_probability: float = Field(default=0.15, gt=0, lt=1)


@dataclass
class MaskingCollator:
    """Draws new masks for training rows; rows that carry labels keep the masks that they have."""

    drawn: Any
    kept: Any

    def __call__(self, features: list[Any]) -> Any:
        return self.kept(features) if "labels" in features[0] else self.drawn(features)


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make blocks, model, collator and metrics. Raises UserError for rows or a checkpoint that cannot be used."""
    from transformers import AutoModelForMaskedLM

    from hf_mps.finetune.loss import deferred_head
    from hf_mps.finetune.models.token_trainer import TokenTrainer, measured

    chosen = choose(recipe.metrics, METRICS, recipe.task)
    loaded = language.load(recipe, checkpoint)
    _refuse_without_mask(recipe, loaded)
    around = blocks.special_tokens(loaded.tokenizer)
    features = {split: blocks.make(recipe.data, rows[split], loaded, around) for split in rows}
    counts = {split: tokens.counts(features[split]) for split in features}
    for split in features:
        if split != "train":
            draw = _drawing(recipe, loaded.tokenizer, recipe.seed)
            features[split] = _masked_once(recipe, features[split], loaded, draw)
    length, loaded.choices["blocks"] = blocks.decide(recipe, recipe.data, counts, loaded.longest)
    model, loaded.choices["model"] = checkpoint.model(AutoModelForMaskedLM, config=loaded.config)
    loaded.choices["loss"] = deferred_head.decide(recipe, model)
    loaded.choices["gaps"] = Choice(
        f"{recipe.mlm_probability:.0%} of the tokens",
        "drawn anew in each training epoch, and once for all evaluations, which stay comparable",
    )
    defaults, baseline = language.untrained(recipe)
    return Prepared(
        splits=features | {"train": blocks.streamed(recipe.data, rows["train"], features["train"], loaded, around)},
        model=model,
        processing_class=loaded.tokenizer,
        collator=length.value.collator(
            MaskingCollator(_drawing(recipe, loaded.tokenizer), language.Labelled(loaded.tokenizer)), loaded.tokenizer
        ),
        metrics=chosen,
        compute_metrics=lambda evaluated: measured(evaluated.predictions, chosen),
        baseline=baseline,
        auto_class=AUTO_CLASS,
        pipeline_tag="fill-mask",
        choices={"lengths": length, **loaded.choices},
        trainer=TokenTrainer,
        arguments_defaults=defaults,
        trainer_settings={"untrained": baseline, "causal": False},
        token_counts=counts["train"],
        predict=lambda trainer: predicted(trainer, features["validation"], loaded.tokenizer),
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved model measures texts, joined, cut into blocks and masked from the recipe's seed.

    Raises UserError for a checkpoint that cannot be used.
    """
    from transformers import AutoModelForMaskedLM

    from hf_mps.finetune.loss import deferred_head
    from hf_mps.finetune.models.token_trainer import TokenTrainer

    loaded = language.load(recipe, checkpoint)
    _refuse_without_mask(recipe, loaded)
    around = blocks.special_tokens(loaded.tokenizer)
    length = lengths.kept(recipe, chosen, loaded.tokenizer, loaded.config)
    model, loaded.choices["model"] = checkpoint.model(AutoModelForMaskedLM, config=loaded.config)
    loaded.choices["loss"] = deferred_head.decide(recipe, model)
    draw = _drawing(recipe, loaded.tokenizer, recipe.seed)  # goes on from one lot of rows to the next

    def answers(trainer: Any, rows: Rows) -> Iterator[dict[str, Any]]:
        made = blocks.make(recipe.data, rows, loaded, around)
        return predicted(trainer, _masked_once(recipe, made, loaded, draw), loaded.tokenizer)

    return Answering(
        model=model,
        processing_class=loaded.tokenizer,
        collator=length.value.collator(language.Labelled(loaded.tokenizer), loaded.tokenizer),
        answers=answers,
        choices={"lengths": length, **loaded.choices},
        trainer=TokenTrainer,
        trainer_settings={"causal": False},
        at_a_time=blocks.ROWS_AT_A_TIME,
    )


def _refuse_without_mask(recipe: Recipe, loaded: language.Loaded) -> None:
    if loaded.tokenizer.mask_token is None:
        raise UserError(f"model {recipe.model}: its tokenizer has no mask token; allowed: a model such as BERT's")


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return generated sentences, four to a row."""
    return blocks.smoke_rows(recipe.data, recipe.seed)


def _drawing(recipe: Recipe, tokenizer: Any, seed: int | None = None) -> Any:
    """Return transformers' masking collator: 80 % become the mask token, 10 % another token, 10 % stay.

    Those shares are BERT's (arXiv 1810.04805, section 3.1) and the collator's defaults.
    """
    from transformers import DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=recipe.mlm_probability, seed=seed)


def _masked_once(recipe: Recipe, features: Dataset, loaded: language.Loaded, draw: Any) -> Dataset:
    """Return an evaluated split's blocks, masked by `draw` from the recipe's seed: equal in every evaluation and
    run.
    """
    from datasets.fingerprint import Hasher

    def gaps(batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        made = [draw([{"input_ids": ids}]) for ids in batch["input_ids"]]
        return {name: [one[name][0].tolist() for one in made] for name in ("input_ids", "labels")}

    said = ("gaps", source_digest.digest(gaps), recipe.mlm_probability, recipe.seed, loaded.content)
    return features.map(
        gaps,
        batched=True,
        features=language.labelled(),
        new_fingerprint=Hasher.hash((features._fingerprint, *said)),
    )
