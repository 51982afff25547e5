"""Language modelling, causal and masked: a model learns to continue texts, or to fill gaps in them, in blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.data.rows import code_digest
from hf_mps.finetune.models import language
from hf_mps.finetune.tasks import Dataset, Prepared, R
from hf_mps.finetune.tasks._language import LanguageTask
from hf_mps.finetune.text import blocks, lengths, tokens


class CausalRecipe(language.Decoder):
    """`max_length` is the length of a block in tokens."""

    data: blocks.Data


class BlockTask(LanguageTask[R]):
    """A task that learns from texts, joined and cut into blocks."""

    at_a_time = blocks.ROWS_AT_A_TIME

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
    def smoke_row(recipe: Any, made: synthetic.MadeUp) -> dict[str, Any]:
        """Return eight made-up sentences."""
        return {recipe.data.columns.text: " ".join(synthetic.sentences(made.draw, 8))}


class CausalLM(BlockTask[CausalRecipe]):
    """Learns to continue texts."""

    name = "causal-lm"
    architectures = ("ForCausalLM", "LMHeadModel")
    family = ("gpt2", "text")

    @property
    def around(self) -> blocks.SpecialTokens:
        """The special tokens at the beginning of each block: a single text's end has no place within a longer one."""
        return blocks.SpecialTokens(super().around.before, ())


class MaskedRecipe(lengths.Padded):
    """Adds the share of tokens that are masked."""

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


class MaskedLM(BlockTask[MaskedRecipe]):
    """Learns to fill masked tokens."""

    name = "masked-lm"
    auto_class = "AutoModelForMaskedLM"
    pipeline_tag = "fill-mask"
    architectures = ("ForMaskedLM",)
    shape = "encoder"
    family = ("bert", "text")
    words = "wordpiece"  # whose tokenizers have a mask

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        made = super().open(chosen)
        self._draw = self._drawing(self.recipe.seed)  # goes on from one lot of rows to the next
        return made

    def load_model(self) -> None:
        """Load the model."""
        from hf_mps.finetune.loss import deferred_head

        self.load(self.loaded.config)
        self.choices["loss"] = deferred_head.decide(self.recipe, self.model)
        reason = "drawn anew in each training epoch, and once for all evaluations, which stay comparable"
        self.choices["gaps"] = Choice(f"{self.recipe.mlm_probability:.0%} of the tokens", reason)
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
            told = "its tokenizer has no mask token; allowed: a model such as BERT's"
            raise UserError(f"model {self.recipe.model}: {told}")

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
            # One at a time: the collator would pad blocks of several lengths.
            made = [draw([{"input_ids": ids}]) for ids in batch["input_ids"]]
            return {name: [one[name][0].tolist() for one in made] for name in ("input_ids", "labels")}

        said = ("gaps", code_digest(gaps), self.recipe.mlm_probability, self.recipe.seed, self.loaded.content)
        mark = Hasher.hash((features._fingerprint, *said))
        return features.map(gaps, batched=True, features=tokens.typed(language.LABELLED), new_fingerprint=mark)
