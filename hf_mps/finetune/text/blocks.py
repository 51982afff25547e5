"""Texts joined and cut into blocks of one length, with no token left out: rows for language models."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.recipe import schema as recipes
from hf_mps.finetune.text import lengths, tokens

if TYPE_CHECKING:
    from datasets import Dataset

    from hf_mps.finetune.data.load import Rows
    from hf_mps.finetune.models.language import Loaded
    from hf_mps.finetune.text.lengths import Lengths

# Rows joined at a time. Each such piece ends in one short block, so nothing of a text is left out.
JOINED = 10_000


class Columns(recipes.Columns):
    """The column that holds the texts."""

    text: str = "text"


class Data(recipes.Data):
    """Adds the column, and `end_of_text`: the tokenizer's end token after each row, for rows that are whole texts.

    Without it rows are lines of one text, joined by line breaks.
    """

    columns: Columns = Columns()
    end_of_text: bool = False


@dataclass(frozen=True)
class Frame:
    """The special tokens that each block begins and ends with."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def frame(tokenizer: Any) -> Frame:
    """What a tokenizer puts around a text of its own: BERT's [CLS] and [SEP], Llama's <s>, nothing of GPT-2's."""
    bare, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    at = next((at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare), 0)
    return Frame(tuple(whole[:at]), tuple(whole[at + len(bare) :]))


def make(data: Data, rows: Rows, loaded: Loaded, around: Frame) -> Dataset:
    """One split as `input_ids` of at most `longest` tokens. Raises UserError for rows without a text or a token."""
    tokens.refuse_other_than_text(rows, ["text"])
    tokenizer, longest = loaded.tokenizer, loaded.longest
    if data.end_of_text and tokenizer.eos_token is None:
        raise UserError("data.end_of_text: the model's tokenizer has no end token; leave it out")
    between = tokenizer.eos_token if data.end_of_text else "\n"
    size = longest - len(around.before) - len(around.after)

    def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
        texts = tokens.texts(rows, "text", batch, indices)
        whole = [text if text.endswith(between) else text + between for text in texts]
        # verbose=False: a warning of texts longer than the model's positions, which are about to be cut.
        found = tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]
        ids = [token for one in found for token in one]
        return {"input_ids": [[*around.before, *ids[at : at + size], *around.after] for at in range(0, len(ids), size)]}

    from datasets import Features, List, Value

    features = tokens.mapped(
        rows,
        encode,
        content=loaded.content,
        key=("blocks", longest, between, around.before, around.after),
        features=Features({"input_ids": List(Value("int32"))}),
        batch_size=JOINED,
    )
    if len(features) == 0:
        raise UserError(f"{rows.where}: the texts hold no token; allowed: at least one row with text")
    return features


def decide(
    recipe: lengths.Padded, data: Data, counts: Mapping[str, Sequence[int]], longest: int
) -> tuple[Choice[Lengths], Choice[str]]:
    """What batches are padded to, and in words how many blocks there are; `counts` are the blocks' lengths by split."""
    length = lengths.decide(recipe, counts["train"], longest, others=[n for some in counts.values() for n in some])
    shown = " + ".join(f"{len(some):,}" for some in counts.values())
    joined = "each row ended with the end token" if data.end_of_text else "rows joined by line breaks"
    told = (
        f"{joined}, then cut every {longest} tokens, {sum(counts['train']):,} of them to train on; nothing is left out"
    )
    return length, Choice(f"{shown} blocks", told)


def smoke_rows(data: Data, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Made-up sentences under the recipe's own column, eight to a row."""
    draw = random.Random(seed)
    return {
        split: [{data.columns.text: " ".join(synthetic.sentences(draw, 8))} for _ in range(count)]
        for split, count in synthetic.splits().items()
    }
