"""Masked language modelling: a model learns to fill masked tokens in texts, joined and cut into blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data.cache import code_digest
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import language
from hf_mps.finetune.tasks._base import Dataset, Prepared
from hf_mps.finetune.tasks.causal_lm import BlockTask
from hf_mps.finetune.text import blocks, lengths


class Recipe(lengths.Padded):
    """Adds the share of tokens that are to be predicted."""

    task: Literal["masked-lm"]
    """What the model learns to do."""
    data: blocks.Data
    mlm_probability: float = Field(default=0.15, gt=0, lt=1)
    """The share of tokens that are masked."""


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

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        made = super().open(chosen)
        self._draw = self._drawing(self.recipe.seed)  # goes on from one lot of rows to the next
        return made

    def load_model(self) -> None:
        """Load the model."""
        from hf_mps.finetune.loss import deferred_head

        self.load(self.loaded.config)
        self.choices["loss"] = deferred_head.decide(self.recipe, self.model)
        self.choices["gaps"] = Choice(
            f"{self.recipe.mlm_probability:.0%} of the tokens",
            "drawn anew in each training epoch, and once for all evaluations, which stay comparable",
        )
        self.trainer_settings = {"causal": False}

    def labelling(self) -> MaskingCollator:
        """Return what masks the rows of a training batch."""
        return MaskingCollator(self._drawing(), language.Labelled(self.loaded.tokenizer))

    def evaluated(self, features: Dataset) -> Dataset:
        """Return the blocks masked from the recipe's seed: its masks do not depend on the length of another split."""
        return self._masked(features, self._drawing(self.recipe.seed))

    def inputs(self, rows: Rows) -> Dataset:
        return self._masked(self.blocks(rows), self._draw)

    def begin(self) -> None:
        """Open tokenizer and configuration. Raises UserError for a tokenizer without a mask."""
        super().begin()
        if self.loaded.tokenizer.mask_token is None:
            raise UserError(
                f"model {self.recipe.model}: its tokenizer has no mask token; allowed: a model such as BERT's"
            )

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

        said = ("gaps", code_digest(gaps), self.recipe.mlm_probability, self.recipe.seed, self.loaded.content)
        mark = Hasher.hash((features._fingerprint, *said))
        return features.map(gaps, batched=True, features=language.labelled(), new_fingerprint=mark)
