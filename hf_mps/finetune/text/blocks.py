"""Rows for language models: texts are joined and cut into blocks of one length, and no token is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.stream.batches import Making
from hf_mps.finetune.text import lengths, tokens

if TYPE_CHECKING:
    from datasets import Dataset

    from hf_mps.finetune.data.load import Rows
    from hf_mps.finetune.models.language import Loaded

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


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens that begin and end each block."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def special_tokens(tokenizer: Any) -> SpecialTokens:
    """Return what a tokenizer puts around a text: [CLS] and [SEP] for BERT, <s> for Llama, nothing for GPT-2."""
    bare, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    at = next((at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare), 0)
    return SpecialTokens(tuple(whole[:at]), tuple(whole[at + len(bare) :]))


def make(data: Data, rows: Rows, loaded: Loaded, special: SpecialTokens) -> Dataset:
    """Return a split as `input_ids` of at most `longest` tokens. Raises UserError for rows without text or tokens."""
    tokens.refuse_other_than_text(rows, ["text"])
    tokenizer, longest = loaded.tokenizer, loaded.longest
    separator = _separator(data, tokenizer)
    size = longest - len(special.before) - len(special.after)

    def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
        texts = tokens.texts(rows, "text", batch, indices)
        ids = [token for ids_of_text in _ids(tokenizer, separator, texts) for token in ids_of_text]
        cut = (ids[at : at + size] for at in range(0, len(ids), size))
        return {"input_ids": [[*special.before, *block, *special.after] for block in cut]}

    key, kinds = ("blocks", longest, separator, special.before, special.after), {"input_ids": ("int32",)}
    how: dict[str, Any] = {"content": loaded.content, "batch_size": ROWS_AT_A_TIME}
    features = tokens.map_cached(rows, encode, key=key, features=kinds, **how)
    if len(features) == 0:
        raise UserError(f"{rows.where}: the texts hold no token; allowed: at least one row with text")
    return features


def streamed(data: Data, rows: Rows, sample: Dataset, loaded: Loaded, special: SpecialTokens) -> Any:
    """Return the blocks to train on: `sample`, made of the rows at hand, or the stream of all rows where they have one.

    A stream's texts are joined on and on: only whole blocks are trained on, and none ends early.
    """
    if rows.stream is None:
        return sample
    from hf_mps.finetune.stream import loader

    tokenizer, separator = loaded.tokenizer, _separator(data, loaded.tokenizer)

    def encode(some: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [[{"input_ids": ids}] for ids in _ids(tokenizer, separator, [row["text"] for row in some])]

    making = Making(encode, loaded.longest, joined=True, before=special.before, after=special.after)
    return loader.train(rows, sample, making)


def _separator(data: Data, tokenizer: Any) -> str:
    """Return the text between two rows. Raises UserError where the tokenizer has no end token to put there."""
    if data.end_of_text and tokenizer.eos_token is None:
        raise UserError("data.end_of_text: the model's tokenizer has no end token; leave it out")
    return str(tokenizer.eos_token) if data.end_of_text else "\n"


def _ids(tokenizer: Any, separator: str, texts: Sequence[str]) -> list[list[int]]:
    """Return each text's tokens, the separator's behind them."""
    whole = [text if text.endswith(separator) else text + separator for text in texts]
    # verbose=False: the tokenizer would warn of texts longer than the model's positions, and they are cut later.
    return list(tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"])


def decide(
    recipe: lengths.Padded, data: Data, counts: Mapping[str, Sequence[int]], longest: int
) -> tuple[Choice[lengths.Lengths], Choice[str]]:
    """Choose what batches are padded to, and describe the blocks; `counts` are their lengths by split."""
    length = lengths.decide(recipe, counts, longest)
    shown = " + ".join(f"{len(lengths_of):,}" for lengths_of in counts.values())
    joined = "each row ended with the end token" if data.end_of_text else "rows joined by line breaks"
    if data.streaming:
        reason = f"{joined} as they are read, cut every {longest} tokens; the first rows made {len(counts['train']):,}"
        return length, Choice(f"streamed + {len(counts['validation']):,} blocks", reason)
    reason = f"{joined}, then cut every {longest} tokens, {sum(counts['train']):,} to train on; nothing is dropped"
    return length, Choice(f"{shown} blocks", reason)
