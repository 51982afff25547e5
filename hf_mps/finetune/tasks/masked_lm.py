"""Masked language modelling: a model learns to fill masked tokens in texts, joined and cut into blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from hf_mps.core import source_digest
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import language
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.tasks.causal_lm import BlockTask
from hf_mps.finetune.text import blocks, lengths, tokens

if TYPE_CHECKING:
    from datasets import Dataset


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


class MaskedLM(BlockTask):
    """Learns to fill masked tokens."""

    name = "masked-lm"
    recipe_class = Recipe
    auto_class = "AutoModelForMaskedLM"
    pipeline_tag = "fill-mask"
    architectures = ("ForMaskedLM",)
    shape = "encoder"
    family = ("bert", "text")
    words = "wordpiece"  # whose tokenizers have a mask
    recipe: Recipe

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe = self.recipe
        chosen = self.measures()
        self.begin()
        loaded = self.loaded
        features = {split: self.blocks(rows[split]) for split in rows}
        counts = {split: tokens.counts(features[split]) for split in features}
        # Every evaluated split is masked from the same seed: its masks do not depend on the length of another.
        inputs = {
            split: self._masked(some, self._drawing(recipe.seed))
            for split, some in features.items()
            if split != "train"
        }
        length, loaded.choices["blocks"] = blocks.decide(recipe, recipe.data, counts, loaded.longest)
        self._load_masked()
        loaded.choices["gaps"] = Choice(
            f"{recipe.mlm_probability:.0%} of the tokens",
            "drawn anew in each training epoch, and once for all evaluations, which stay comparable",
        )
        parts = self.by_token(chosen)
        parts["trainer_settings"] |= self.trainer_settings
        collator = MaskingCollator(self._drawing(), language.Labelled(loaded.tokenizer))
        return self.made(
            splits=features | inputs | {"train": self.streamed(rows["train"], features["train"])},
            collator=length.value.collator(collator, loaded.tokenizer),
            choices={"lengths": length, **loaded.choices},
            token_counts=counts["train"],
            predicted=(rows["validation"], inputs["validation"]),
            **parts,
        )

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        from hf_mps.finetune.models.token_trainer import TokenTrainer

        self.begin()
        loaded = self.loaded
        length = lengths.kept(self.recipe, chosen, loaded.tokenizer, loaded.config)
        self._load_masked()
        self._draw = self._drawing(self.recipe.seed)  # goes on from one lot of rows to the next
        collator = length.value.collator(language.Labelled(loaded.tokenizer), loaded.tokenizer)
        return self.made(collator=collator, trainer=TokenTrainer)

    def inputs(self, rows: Rows) -> Dataset:
        return self._masked(self.blocks(rows), self._draw)

    def begin(self) -> None:
        """Open tokenizer and configuration. Raises UserError for a tokenizer without a mask."""
        super().begin()
        if self.loaded.tokenizer.mask_token is None:
            raise UserError(
                f"model {self.recipe.model}: its tokenizer has no mask token; allowed: a model such as BERT's"
            )

    def _load_masked(self) -> None:
        from hf_mps.finetune.loss import deferred_head

        self.load(self.loaded.config)
        self.choices["loss"] = deferred_head.decide(self.recipe, self.model)
        self.trainer_settings = {"causal": False}

    def _drawing(self, seed: int | None = None) -> Any:
        """Return transformers' masking collator: 80 % become the mask token, 10 % another token, 10 % stay.

        Those shares are BERT's (arXiv 1810.04805, section 3.1) and the collator's defaults.
        """
        from transformers import DataCollatorForLanguageModeling

        probability = self.recipe.mlm_probability
        return DataCollatorForLanguageModeling(self.loaded.tokenizer, mlm_probability=probability, seed=seed)

    def _masked(self, features: Dataset, draw: Any) -> Dataset:
        """Return blocks masked by `draw` from the recipe's seed: equal in every evaluation and run."""
        from datasets.fingerprint import Hasher

        def gaps(batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
            made = [draw([{"input_ids": ids}]) for ids in batch["input_ids"]]
            return {name: [one[name][0].tolist() for one in made] for name in ("input_ids", "labels")}

        said = ("gaps", source_digest.digest(gaps), self.recipe.mlm_probability, self.recipe.seed, self.loaded.content)
        mark = Hasher.hash((features._fingerprint, *said))
        return features.map(gaps, batched=True, features=language.labelled(), new_fingerprint=mark)
