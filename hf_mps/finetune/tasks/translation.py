"""Translation: the model reads a text in one language and writes it in another."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from hf_mps.core.errors import UserError, nearest
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import seq2seq
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.models.seq2seq import ARGUMENTS, SETTLED, TRUTH
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared

__all__ = ["ARGUMENTS", "SETTLED", "TRUTH", "Recipe", "answer", "prepare", "smoke_rows"]


class Data(schema.Data):
    """Adds the columns: `translation.en` and `translation.ro` where a row is {"translation": {"en": …, "ro": …}}."""

    columns: seq2seq.Columns


class Recipe(seq2seq.Recipe):
    """Adds `src_lang` and `tgt_lang`, as the tokenizers of multilingual models name languages (`en_XX`, `ron_Latn`)."""

    task: Literal["translation"]
    data: Data
    src_lang: str | None = None
    tgt_lang: str | None = None

    @model_validator(mode="after")
    def _both_languages(self) -> Recipe:
        if (self.src_lang is None) != (self.tgt_lang is None):
            raise ValueError("has one of src_lang and tgt_lang; give both, or neither")
        return self


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make features, model, collator and metrics. Raises UserError for what cannot be used."""
    return seq2seq.prepare(
        recipe, rows, checkpoint, _kind(recipe), lambda tokenizer, model: _set_languages(recipe, tokenizer, model)
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved model translates. Raises UserError for a checkpoint or languages that cannot be used."""
    return seq2seq.answer(
        recipe, checkpoint, chosen, _kind(recipe), lambda tokenizer, model: _set_languages(recipe, tokenizer, model)
    )


def _kind(recipe: Recipe) -> seq2seq.Seq2SeqTask:
    """Return what is a translation's own, named by the languages that the columns are called."""
    source, target = (name.rpartition(".")[2] for name in recipe.data.columns.roles().values())
    return seq2seq.Seq2SeqTask(
        pipeline_tag="translation",
        metrics=("sacrebleu", "chrf", "bleu"),
        what="answers with the source itself",
        untrained=str,
        prefix=f"translation_{source}_to_{target}",
    )


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return made-up sentences; the target has the words in reverse order."""
    draw = random.Random(recipe.seed)
    return {
        split: [_nested(recipe, text, " ".join(reversed(text.split()))) for text in synthetic.sentences(draw, count)]
        for split, count in synthetic.splits().items()
    }


def _set_languages(recipe: Recipe, tokenizer: Any, model: Any) -> None:
    """Set a multilingual tokenizer's languages, and the token with which the model begins its translations."""
    multilingual = hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")
    if recipe.tgt_lang is None:
        if multilingual:
            raise UserError(
                f"model {recipe.model} knows many languages; give src_lang and tgt_lang, as its tokenizer has them"
            )
        return
    if not multilingual:
        raise UserError(
            f"src_lang: model {recipe.model} has no languages to choose from; leave src_lang and tgt_lang out"
        )
    numbers = {key: _language_token(tokenizer, key, getattr(recipe, key)) for key in ("src_lang", "tgt_lang")}
    tokenizer.src_lang, tokenizer.tgt_lang = recipe.src_lang, recipe.tgt_lang
    if model is not None:
        model.generation_config.forced_bos_token_id = numbers["tgt_lang"]


def _language_token(tokenizer: Any, key: str, name: str) -> int:
    """Return the token of a language. Raises UserError for a name that the tokenizer does not know."""
    codes = getattr(tokenizer, "lang_code_to_token", None)  # M2M100 writes `ro` as __ro__; the others as it is
    known = codes if codes is not None else {token: token for token in tokenizer.all_special_tokens}
    if name not in known:
        raise UserError(f"{key} is '{name}', which the tokenizer does not know{nearest(name, known)}")
    number: int = tokenizer.convert_tokens_to_ids(known[name])
    return number


def _nested(recipe: Recipe, source: str, target: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for column, text in zip(recipe.data.columns.roles().values(), (source, target), strict=True):
        *outer, last = column.split(".")
        here = row
        for name in outer:
            here = here.setdefault(name, {})
        here[last] = text
    return row
