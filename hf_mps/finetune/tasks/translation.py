"""Translation: the model reads a text in one language and writes it in another."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from hf_mps.core.errors import UserError, nearest
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks import _seq2seq


class Data(schema.Data):
    """Adds the columns: `translation.en` and `translation.ro` where a row is {"translation": {"en": …, "ro": …}}."""

    columns: _seq2seq.Columns


class Recipe(_seq2seq.Recipe):
    """Adds `src_lang` and `tgt_lang`, as the tokenizers of multilingual models name languages (`en_XX`, `ron_Latn`)."""

    task: Literal["translation"]
    """What the model learns to do."""
    data: Data
    src_lang: str | None = None
    """The source's language, for a model that knows many."""
    tgt_lang: str | None = None
    """The target's language, for a model that knows many."""

    @model_validator(mode="after")
    def _both_languages(self) -> Recipe:
        if (self.src_lang is None) != (self.tgt_lang is None):
            raise ValueError("has one of src_lang and tgt_lang; give both, or neither")
        return self


class Translation(_seq2seq.Seq2SeqTask):
    """Learns to write a text in another language."""

    name = "translation"
    recipe_class = Recipe
    architectures = ("MTModel", "M2M100ForConditionalGeneration")
    default_columns: ClassVar[Mapping[str, str]] = {"source": "source", "target": "target"}
    metrics = ("sacrebleu", "chrf", "bleu")
    untrained = ("answers with the source itself", str)
    recipe: Recipe

    @property
    def prefix_key(self) -> str:
        """The name of the source's prefix in T5's configurations: languages as the columns are called."""
        source, target = (name.rpartition(".")[2] for name in self.recipe.data.columns.roles().values())
        return f"translation_{source}_to_{target}"

    def settle(self, tokenizer: Any, model: Any) -> None:
        """Set a multilingual tokenizer's languages, and the token with which the model begins its translations."""
        recipe = self.recipe
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
        codes = getattr(tokenizer, "lang_code_to_token", None)  # M2M100 writes `ro` as __ro__; the others as it is
        known = codes if codes is not None else {token: token for token in tokenizer.all_special_tokens}
        for key in ("src_lang", "tgt_lang"):
            name = getattr(recipe, key)
            if name not in known:
                raise UserError(f"{key} is '{name}', which the tokenizer does not know{nearest(name, known)}")
            setattr(tokenizer, key, name)
        if model is not None:
            first = tokenizer.convert_tokens_to_ids(known[recipe.tgt_lang])
            model.generation_config.forced_bos_token_id = first

    @staticmethod
    def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Return made-up sentences; the target has the words in reverse order."""
        draw, columns = random.Random(recipe.seed), recipe.data.columns.roles().values()

        def row(source: str) -> dict[str, Any]:
            made: dict[str, Any] = {}
            for column, text in zip(columns, (source, " ".join(reversed(source.split()))), strict=True):
                *outer, last = column.split(".")
                here = made
                for name in outer:
                    here = here.setdefault(name, {})
                here[last] = text
            return made

        return {
            split: [row(text) for text in synthetic.sentences(draw, count)]
            for split, count in synthetic.splits().items()
        }
