"""Causal language modelling: a model learns to continue texts, joined and cut into blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import language
from hf_mps.finetune.tasks._base import Dataset, Prepared
from hf_mps.finetune.tasks._language import LanguageTask
from hf_mps.finetune.text import blocks, lengths, tokens


class Recipe(language.Decoder):
    """`max_length` is the length of a block in tokens."""

    task: Literal["causal-lm"]
    """What the model learns to do."""
    data: blocks.Data


class BlockTask(LanguageTask):
    """A task that learns from texts, joined and cut into blocks."""

    at_a_time = blocks.ROWS_AT_A_TIME
    recipe: Any

    @property
    def around(self) -> blocks.SpecialTokens:
        """The special tokens at the beginning and the end of each block."""
        return blocks.special_tokens(self.loaded.tokenizer)

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe, chosen = self.recipe, self.measures()
        self.begin()
        loaded = self.loaded
        features = {split: self.blocks(rows[split]) for split in rows}
        counts = {split: tokens.counts(features[split]) for split in features}
        inputs = {split: self.evaluated(some) for split, some in features.items() if split != "train"}
        length, loaded.choices["blocks"] = blocks.decide(recipe, recipe.data, counts, loaded.longest)
        self.load_model()
        parts = self.by_token(chosen)
        parts["trainer_settings"] |= self.trainer_settings
        train = blocks.streamed(recipe.data, rows["train"], features["train"], loaded, self.around)
        return self.made(
            splits=features | inputs | {"train": train},
            collator=length.value.collator(self.labelling(), loaded.tokenizer),
            choices={"lengths": length, **loaded.choices},
            token_counts=counts["train"],
            predicted=(rows["validation"], inputs["validation"]),
            **parts,
        )

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        from hf_mps.finetune.models.token_trainer import TokenTrainer

        self.begin()
        tokenizer = self.loaded.tokenizer
        length = lengths.kept(self.recipe, chosen, tokenizer, self.loaded.config)
        self.load_model()
        return self.made(collator=length.value.collator(self.labelling(), tokenizer), trainer=TokenTrainer)

    def load_model(self) -> None:
        """Load the model."""
        self.load_language()

    def labelling(self) -> Any:
        """Return what gives the rows of a batch their labels."""
        return language.Labelled(self.loaded.tokenizer)

    def evaluated(self, features: Dataset) -> Dataset:
        """Return the blocks of an evaluated split with what is to be predicted in them."""
        return features

    def blocks(self, rows: Rows) -> Dataset:
        """Return the blocks of `rows`."""
        return blocks.make(self.recipe.data, rows, self.loaded, self.around)

    def inputs(self, rows: Rows) -> Dataset:
        return self.blocks(rows)

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        """Yield each block with the number of its predicted tokens, their mean loss, perplexity and accuracy."""
        from hf_mps.finetune.models.token_trainer import perplexity

        for row, (total, count, right) in zip(inputs, trainer.predict(inputs).predictions.tolist(), strict=True):
            count = max(count, 1.0)
            yield {
                "text": self.loaded.tokenizer.decode(row["input_ids"]),
                "tokens": int(count),
                "loss": total / count,
                "perplexity": perplexity(total / count),
                "accuracy": right / count,
            }

    @staticmethod
    def smoke_rows(recipe: Any, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Return generated sentences, eight to a row."""
        return blocks.smoke_rows(recipe.data, recipe.seed)


class CausalLM(BlockTask):
    """Learns to continue texts."""

    name = "causal-lm"
    recipe_class = Recipe
    architectures = ("ForCausalLM", "LMHeadModel")
    family = ("gpt2", "text")
    recipe: Recipe

    @property
    def around(self) -> blocks.SpecialTokens:
        """The special tokens at the beginning of each block: a single text's end has no place within a longer one."""
        return blocks.SpecialTokens(super().around.before, ())
