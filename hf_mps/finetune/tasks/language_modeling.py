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
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.stream.batches import Making
from hf_mps.finetune.tasks import Dataset, Prepared, R, _language
from hf_mps.finetune.tasks._language import LanguageTask
from hf_mps.finetune.text import lengths, tokens

# Rows joined at a time. Each batch ends in one short block, so that no token is dropped.
ROWS_AT_A_TIME = 10_000


class Columns(schema.Columns):
    """The column that holds the texts."""

    text: str = "text"
    """The column of the text."""


class Data(schema.Data):
    """Adds the column, and `end_of_text`: the tokenizer's end token after each row, for rows that are whole texts.

    Without it rows are lines of one text, joined by line breaks.
    """

    STREAMS = True

    columns: Columns = Columns()
    end_of_text: bool = False
    """true ends each row with the tokenizer's end token, for rows that are whole texts."""


class CausalRecipe(_language.Decoder):
    """`max_length` is the length of a block in tokens."""

    data: Data


class BlockTask(LanguageTask[R]):
    """A task that learns from texts, joined and cut into blocks."""

    at_a_time = ROWS_AT_A_TIME

    @property
    def around(self) -> tokens.SpecialTokens:
        """The special tokens at the beginning and the end of each block."""
        return tokens.special_tokens(self.tokenizer)

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe, data, chosen = self.recipe, self.recipe.data, self.measures()
        self.begin()
        features = {split: self.blocks(some) for split, some in rows.items()}
        counts = {split: tokens.counts(some) for split, some in features.items()}
        inputs = {split: self.evaluated(some) for split, some in features.items() if split != "train"}
        length = lengths.decide(recipe, counts, self.longest)
        joined = "each row ended with the end token" if data.end_of_text else "rows joined by line breaks"
        shown = " + ".join(f"{len(lengths_of):,}" for lengths_of in counts.values())
        reason = f"{joined}, then cut every {self.longest} tokens, {sum(counts['train']):,} to train on"
        told = Choice(f"{shown} blocks", f"{reason}; nothing is dropped")
        if data.streaming:
            reason = f"{joined} as they are read, cut every {self.longest} tokens"
            reason += f"; the first rows made {len(counts['train']):,}"
            told = Choice(f"streamed + {len(counts['validation']):,} blocks", reason)
        self.choices["blocks"] = told
        self.load_model()
        parts = self.by_token(chosen)
        parts["trainer_settings"] |= self.trainer_settings
        return self.made(
            splits=features | inputs | {"train": self.streamed(rows["train"], features["train"])},
            collator=length.value.collator(self.labelling(), self.tokenizer),
            choices={"lengths": length, **self.choices},
            token_counts=counts["train"],
            predicted=(rows["validation"], inputs["validation"]),
            **parts,
        )

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        from hf_mps.finetune.models.token_trainer import TokenTrainer

        self.begin()
        length = lengths.kept(self.recipe, chosen, self.tokenizer, self.config)
        self.load_model()
        return self.made(collator=length.value.collator(self.labelling(), self.tokenizer), trainer=TokenTrainer)

    def load_model(self) -> None:
        """Load the model."""
        self.load_language()

    def labelling(self) -> Any:
        """Return what gives the rows of a batch their labels."""
        return _language.Labelled(self.tokenizer)

    def evaluated(self, features: Dataset) -> Dataset:
        """Return the blocks of an evaluated split with what is to be predicted in them."""
        return features

    def blocks(self, rows: Rows) -> Dataset:
        """Return rows of `input_ids`, at most `longest` each. Raises UserError for rows without text or tokens."""
        tokens.refuse_other_than_text(rows, ["text"])
        tokenizer, longest, separator, around = self.tokenizer, self.longest, self.separator(), self.around
        size = longest - len(around.before) - len(around.after)

        def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
            texts = tokens.texts(rows, "text", batch, indices)
            ids = [token for ids_of_text in _ids(tokenizer, separator, texts) for token in ids_of_text]
            cut = (ids[at : at + size] for at in range(0, len(ids), size))
            return {"input_ids": [[*around.before, *block, *around.after] for block in cut]}

        key, kinds = ("blocks", longest, separator, *around), {"input_ids": ("int32",)}
        how: dict[str, Any] = {"content": self.content, "batch_size": ROWS_AT_A_TIME}
        features = tokens.map_cached(rows, encode, key=key, features=kinds, **how)
        if len(features) == 0:
            raise UserError(f"{rows.where}: the texts hold no token; allowed: at least one row with text")
        return features

    def streamed(self, rows: Rows, sample: Dataset) -> Any:
        """Return the blocks to train on: `sample`, of the rows at hand, or the stream of all rows where they have one.

        A stream's texts are joined on and on: only whole blocks are trained on, and none ends early.
        """
        if rows.stream is None:
            return sample
        from hf_mps.finetune.stream import loader

        tokenizer, separator, around = self.tokenizer, self.separator(), self.around

        def encode(some: Sequence[Mapping[str, Any]]) -> list[Any]:
            return [[{"input_ids": ids}] for ids in _ids(tokenizer, separator, [row["text"] for row in some])]

        making = Making(encode, self.longest, joined=True, before=around.before, after=around.after)
        return loader.train(rows, sample, making)

    def separator(self) -> str:
        """Return the text between two rows. Raises UserError where the tokenizer has no end token to put there."""
        if not self.recipe.data.end_of_text:
            return "\n"
        if self.tokenizer.eos_token is None:
            raise UserError("data.end_of_text: the model's tokenizer has no end token; leave it out")
        return str(self.tokenizer.eos_token)

    def inputs(self, rows: Rows) -> Dataset:
        return self.blocks(rows)

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        """Yield each block with the number of its predicted tokens, their mean loss, perplexity and accuracy."""
        from hf_mps.finetune.models.token_trainer import perplexity

        for row, (total, count, right) in zip(inputs, trainer.predict(inputs).predictions.tolist(), strict=True):
            line = {"text": self.tokenizer.decode(row["input_ids"]), "tokens": int(count)}
            if count:  # nothing is predicted in a last block of one token, or in one without a masked token
                loss = total / count
                line |= {"loss": loss, "perplexity": perplexity(loss), "accuracy": right / count}
            yield line

    @staticmethod
    def smoke_row(recipe: Any, made: synthetic.MadeUp) -> dict[str, Any]:
        """Return eight made-up sentences."""
        return {"text": " ".join(synthetic.sentences(made.draw, 8))}


class CausalLM(BlockTask[CausalRecipe]):
    """Learns to continue texts."""

    architectures = ("ForCausalLM", "LMHeadModel")
    family = ("gpt2", "text")

    @property
    def around(self) -> tokens.SpecialTokens:
        """The special tokens at the beginning of each block: a single text's end has no place within a longer one."""
        return tokens.SpecialTokens(super().around.before, ())


class MaskedRecipe(lengths.Padded):
    """Adds the share of tokens that are masked."""

    data: Data
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

        self.load(self.config)
        self.choices["loss"] = deferred_head.decide(self.recipe, self.model)
        reason = "drawn anew in each training epoch, and once for all evaluations, which stay comparable"
        self.choices["gaps"] = Choice(f"{self.recipe.mlm_probability:.0%} of the tokens", reason)
        self.trainer_settings = {"causal": False}

    def labelling(self) -> MaskingCollator:
        """Return what masks the rows of a training batch."""
        return MaskingCollator(self._drawing(), _language.Labelled(self.tokenizer))

    def evaluated(self, features: Dataset) -> Dataset:
        """Return the blocks masked from the recipe's seed: its masks do not depend on the length of another split."""
        return self._masked(features, self._drawing(self.recipe.seed))

    def inputs(self, rows: Rows) -> Dataset:
        return self._masked(self.blocks(rows), self._draw)

    def begin(self) -> None:
        """Open tokenizer and configuration. Raises UserError for a tokenizer without a mask."""
        super().begin()
        if self.tokenizer.mask_token is None:
            told = "its tokenizer has no mask token; allowed: a model such as BERT's"
            raise UserError(f"model {self.recipe.model}: {told}")

    def _drawing(self, seed: int | None = None) -> Any:
        """Return transformers' masking collator: 80 % become the mask token, 10 % another token, 10 % stay.

        Those shares are BERT's (arXiv 1810.04805, section 3.1) and the collator's defaults.
        """
        from transformers import DataCollatorForLanguageModeling

        probability = self.recipe.mlm_probability
        return DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=probability, seed=seed)

    def _masked(self, features: Dataset, draw: Any) -> Dataset:
        """Return blocks masked by `draw` from the recipe's seed: equal in every evaluation and run."""
        from datasets.fingerprint import Hasher

        def gaps(batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
            # One at a time: the collator would pad blocks of several lengths.
            made = [draw([{"input_ids": ids}]) for ids in batch["input_ids"]]
            return {name: [one[name][0].tolist() for one in made] for name in ("input_ids", "labels")}

        said = ("gaps", code_digest(gaps), self.recipe.mlm_probability, self.recipe.seed, self.content)
        mark = Hasher.hash((features._fingerprint, *said))
        return features.map(gaps, batched=True, features=tokens.typed(_language.LABELLED), new_fingerprint=mark)


def _ids(tokenizer: Any, separator: str, texts: Sequence[str]) -> list[list[int]]:
    """Return each text's tokens, the separator's behind them."""
    whole = [text if text.endswith(separator) else text + separator for text in texts]
    # verbose=False: the tokenizer would warn of texts longer than the model's positions, and they are cut later.
    return list(tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"])
