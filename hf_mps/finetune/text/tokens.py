"""Tokenisation: `datasets` caches what a tokenizer makes of a split, and the next run finds it there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data.rows import code_digest

if TYPE_CHECKING:
    from datasets import Dataset, Features

    from hf_mps.finetune.data.load import Rows
    from hf_mps.finetune.tasks import Prepared

TEXT = ("string", "large_string")
# The columns of tokens that tasks and TRL make.
IDS = ("input_ids", "prompt_ids", "chosen_ids", "rejected_ids", "completion_ids")
# In how many rows unknown tokens are counted, and from which share on they are reported.
SAMPLED_ROWS = 1000
REPORTED_SHARE = 0.1


class SpecialTokens(NamedTuple):
    """The special tokens before and after a text."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def special_tokens(tokenizer: Any) -> SpecialTokens:
    """Return what a tokenizer puts around a text: [CLS] and [SEP] for BERT, <s> for Llama, nothing for GPT-2."""
    bare, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    at = next((at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare), 0)
    return SpecialTokens(tuple(whole[:at]), tuple(whole[at + len(bare) :]))


def digest(tokenizer: Any) -> str:
    """Return a digest of all that a tokenizer does, to be taken before its first call and handed to `map_cached`.

    Padding and truncation, which a tokenizer remembers from its last call, are part of it: hence before the first.
    """
    from datasets.fingerprint import Hasher

    # A fast tokenizer tells all of itself as JSON; of a slow one there are the words and what it was made with.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    own = backend.to_str() if backend is not None else (tokenizer.get_vocab(), tokenizer.init_kwargs)
    return str(Hasher.hash((type(tokenizer).__name__, own, getattr(tokenizer, "chat_template", None))))


def map_cached(
    rows: Rows,
    encode: Callable[..., Mapping[str, Any]],
    *,
    content: str,
    key: Sequence[Any],
    features: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Dataset:
    """`encode(batch, indices)` over the rows, by batches, in place of their columns; made once and then found again.

    What `encode` returns must depend on nothing but the rows with the files that they name, the tokenizer (`content`,
    from `digest`), its own code, which is looked at here, and `key`, which holds the task's name and every setting that
    `encode` reads, as plain values. `features` says the columns' types outright, as `typed` reads them (or they are
    guessed from the first batch, where a column without a value has none). `settings` are further arguments of
    `datasets.Dataset.map`.
    """
    from datasets.fingerprint import Hasher

    # A table of datasets knows itself by it: the rows and all that was done to them.
    mark = Hasher.hash((rows.dataset._fingerprint, content, code_digest(encode), *key, *rows.stamps()))
    settings |= {"features": None if features is None else typed(features), "new_fingerprint": mark}
    left_out = rows.dataset.column_names
    return rows.dataset.map(encode, batched=True, with_indices=True, remove_columns=left_out, **settings)


def typed(columns: Mapping[str, Any]) -> Features:
    """Return the types of columns for `datasets`: "int32" for a number in each row, ("int32",) for a list of them.

    A type of `datasets` stays as it is.
    """
    from datasets import Features, List, Value

    def kind(said: Any) -> Any:
        if isinstance(said, Mapping):
            return {name: kind(one) for name, one in said.items()}
        return List(kind(said[0])) if isinstance(said, tuple) else Value(said) if isinstance(said, str) else said

    return Features(kind(columns))


def refuse_other_than_text(rows: Rows, roles: Sequence[str]) -> None:
    """Raise UserError where the column of one of `roles` holds no text."""
    for role in roles:
        feature = rows.dataset.features[role]
        kind = getattr(feature, "dtype", type(feature).__name__.lower())
        if kind not in TEXT:
            raise UserError(f"{rows.where}: data.columns.{role} names a column of type {kind}; allowed: text")


def texts(rows: Rows, role: str, batch: Mapping[str, list[Any]], indices: Sequence[int]) -> list[str]:
    """Return the column of `role` in a batch of `encode`. Raises UserError, with the row's number, for a row without
    text.
    """
    column = batch[role]
    if None in column:
        number = rows.number(indices[column.index(None)])
        raise UserError(f"{rows.where}: row {number} has no {role}; allowed: a text in every row")
    return column


def counts(features: Dataset, column: str = "input_ids") -> list[int]:
    """Return the length of each row's list in `column`."""
    import pyarrow.compute

    # Arrow counts without making a Python list of each row.
    table = features.with_format("arrow")[:]
    return [int(number) for number in pyarrow.compute.list_value_length(table[column]).to_pylist()]


def unknown_tokens(prepared: Prepared) -> dict[str, Choice[str]]:
    """Return a warning where a large share of the texts is unknown to the tokenizer: Hebrew for an English vocabulary.

    Counts the rows as they are trained on, without special tokens. Empty where rows are no tokens, and where the
    unknown token doubles as another special one (GPT-2's ends a text; its tokens are bytes, and none is unknown).
    """
    tokenizer = prepared.processing_class
    unknown_id = getattr(tokenizer, "unk_token_id", None)
    special = set(getattr(tokenizer, "all_special_ids", ()))
    if unknown_id is None or unknown_id in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        return {}
    # Packed training rows are no table: then those of validation.
    split = next((name for name, rows in prepared.splits.items() if hasattr(rows, "column_names")), None)
    unknown, total = 0, 0
    for ids in _sampled_ids(prepared.splits[split], tokenizer) if split else ():
        unknown += sum(1 for one in ids if one == unknown_id)
        total += sum(1 for one in ids if one == unknown_id or one not in special)
    if unknown <= REPORTED_SHARE * total:
        return {}
    reason = f"each is {tokenizer.unk_token} to the model, whatever it says; next: a model of the texts' language"
    return {"unknown_tokens": Choice(f"{unknown / total:.0%} of the {split} tokens", reason)}


def _sampled_ids(rows: Dataset, tokenizer: Any) -> Iterator[list[int]]:
    """Yield the tokens of the first SAMPLED_ROWS rows; rows of text are tokenised."""
    some = rows.select(range(min(SAMPLED_ROWS, len(rows))))
    for column in some.column_names:
        if column in IDS:
            for value in some[column]:
                yield from value if value and isinstance(value[0], list) else [value]
        elif not set(IDS) & set(some.column_names) and getattr(some.features[column], "dtype", None) in TEXT:
            yield from tokenizer(list(some[column]), truncation=True, verbose=False)["input_ids"]


def set_pad_token(tokenizer: Any, config: Any) -> dict[str, Choice[str]]:
    """Give a tokenizer without padding token its end token, as decoder checkpoints need; return the choice to be shown.

    Raises UserError where it has neither.
    """
    if tokenizer.pad_token is not None:
        return {}
    if tokenizer.eos_token is None:
        raise UserError("the model's tokenizer has neither a padding nor an end token, so rows cannot be batched")
    tokenizer.pad_token = tokenizer.eos_token
    config.pad_token_id = tokenizer.pad_token_id
    return {"pad_token": Choice(tokenizer.pad_token, "the tokenizer has none; the end token takes its place")}
