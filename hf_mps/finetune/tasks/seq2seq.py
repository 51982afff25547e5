"""Summarization and translation: the model reads one text, generates another, and is measured on that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks import GENERATES, Dataset, Prepared, R, _language
from hf_mps.finetune.tasks._language import LanguageTask
from hf_mps.finetune.text import lengths, tokens
from hf_mps.metrics.selection import Chosen, choose
from hf_mps.metrics.texts import sentences

SOURCE = ("transformers/training_args_seq2seq.py", "Seq2SeqTrainingArguments")
SETTLED = {
    "predict_with_generate": "the metrics are of generated texts, so it is always on; leave it out",
    "generation_max_length": "it is the recipe's max_target_length",
}
TARGET = 128


class Columns(schema.Columns):
    """The columns of the data by their roles; `translation.en` is a key of a column of dicts."""

    source: str
    """The column of the source text."""
    target: str
    """The column of the target text."""


class Seq2SeqRecipe(_language.Recipe):
    """Adds the prefix of each source, and the longest target in tokens (128 where the model has the positions).

    `source_prefix` defaults to the checkpoint's own for the task (T5's configurations have them).
    """

    source_prefix: str | None = None
    """Words before each source, such as "summarize: "."""
    max_length: int | None = Field(default=None, ge=3)
    """The tokens that a row is cut to."""
    max_target_length: int | None = Field(default=None, ge=3)
    """The tokens that a target is cut to."""


class Seq2SeqTask(LanguageTask[R]):
    """Learns to write a text from another one."""

    auto_class = "AutoModelForSeq2SeqLM"
    pipeline_tag = ""
    metrics: ClassVar[tuple[str, ...] | None] = None
    truth = ("target",)
    shape = "seq2seq"
    family = ("t5", "text")
    shows = "texts"
    arguments_source = SOURCE
    settled = SETTLED
    unsharded = GENERATES
    untrained: ClassVar[tuple[str, Callable[[str], str]]]
    """The baseline in words, and its answer to a source."""

    @property
    def prefix_key(self) -> str:
        """The name of the source's prefix in a checkpoint's configuration (`task_specific_params`)."""
        return self.name

    def settle(self, tokenizer: Any, model: Any) -> None:
        """Change the tokenizer, or once it is loaded the model. Raises UserError for what neither knows."""

    def begin(self) -> None:
        """Open tokenizer and configuration, and settle the longest target and the prefix of each source."""
        from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

        super().begin()
        recipe, config = self.recipe, self.config
        positions = getattr(config, "max_position_embeddings", None) or 2**31  # T5 has no such limit
        self.longest_target = longest_target(recipe.max_target_length, positions, TARGET)
        # Before the features are made: the languages are part of each source.
        self.settle(self.tokenizer, None)
        own = (getattr(config, "task_specific_params", None) or {}).get(self.prefix_key, {}).get("prefix")
        self.prefix, reason = "", "the recipe gives none, and neither does the checkpoint's configuration"
        if recipe.source_prefix is not None:
            self.prefix, reason = recipe.source_prefix, "source_prefix in the recipe"
        elif own:
            self.prefix, reason = own, f"the checkpoint's own for {self.prefix_key}"
        shown = repr(self.prefix) if recipe.source_prefix is not None or own else "none"
        self.choices["source_prefix"] = Choice(shown, reason)
        self.trainer, self.arguments = Seq2SeqTrainer, Seq2SeqTrainingArguments
        self.arguments_defaults = {"predict_with_generate": True, "generation_max_length": self.longest_target}

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        chosen = self.measures()
        measured = metrics.load(chosen.names)
        self.begin()
        tokenizer, (what, untrained) = self.tokenizer, self.untrained
        features = {split: self.inputs(some) for split, some in rows.items()}
        sources = self._lengths(features, "input_ids", self.longest)
        # A batch groups sources by length; its targets have any length.
        targets = self._lengths(features, "labels", self.longest_target, grouped=False, name="target_lengths")
        self._load(sources, labels=targets.value)
        self.choices["target_lengths"] = targets
        # Those that the model's answers are compared with: targets as they were cut and read.
        truths = _language.read(features["validation"]["labels"][:], tokenizer)
        guesses = [untrained(one) for one in rows["validation"].dataset["source"]]
        return self.made(
            splits=features,
            metrics=chosen,
            compute_metrics=lambda evaluated: measured.compute(
                _language.decoded(evaluated.predictions, tokenizer), _language.decoded(evaluated.label_ids, tokenizer)
            ),
            baseline=metrics.Baseline(what, measured.compute(guesses, truths)),
            choices={"lengths": sources, **self.choices},
            token_counts=tokens.counts(features["train"]),
            predicted=(rows["validation"], features["validation"]),
        )

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        self.begin()
        length = lengths.kept(self.recipe, chosen, self.tokenizer, self.config)
        self.longest = length.value.longest
        self._load(length)
        return self.made()

    def _load(self, length: Choice[lengths.Lengths], **labels: Any) -> None:
        from transformers import DataCollatorForSeq2Seq

        tokenizer = self.tokenizer
        self.load_language(chunks=False)
        self.settle(tokenizer, self.model)
        self.collator = length.value.collator(DataCollatorForSeq2Seq(tokenizer, model=self.model), tokenizer, **labels)

    def _lengths(self, features: Mapping[str, Any], column: str, longest: int, **how: Any) -> Choice[lengths.Lengths]:
        counts = {split: tokens.counts(some, column) for split, some in features.items()}
        return lengths.decide(self.recipe, counts, longest, **how)

    def inputs(self, rows: Rows) -> Dataset:
        """Return sources with their prefix as ids and targets as labels, each cut to its longest length."""
        labelled = "target" in rows.dataset.column_names
        tokens.refuse_other_than_text(rows, ("source", "target") if labelled else ("source",))
        tokenizer, longest, longest_target, prefix = self.tokenizer, self.longest, self.longest_target, self.prefix

        def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
            sources = tokens.texts(rows, "source", batch, indices)
            found = tokenizer([prefix + one for one in sources], truncation=True, max_length=longest)
            # Seq2SeqTrainer computes a loss behind each answer, and fails without labels.
            labels = [[tokenizer.pad_token_id]] * len(sources)
            if labelled:
                targets = tokens.texts(rows, "target", batch, indices)
                labels = tokenizer(text_target=targets, truncation=True, max_length=longest_target)["input_ids"]
            return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"], "labels": labels}

        languages = [getattr(tokenizer, name, None) for name in ("src_lang", "tgt_lang")]
        key = ("seq2seq", longest, longest_target, prefix, languages)
        kinds = dict.fromkeys(("input_ids", "attention_mask", "labels"), ("int32",))
        return tokens.map_cached(rows, encode, content=self.content, key=key, features=kinds)

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        """Yield each row's source, its target where it has one, and what the model generates."""
        texts = _language.decoded(trainer.predict(inputs).predictions, self.tokenizer)
        for row, text in zip(rows.dataset, texts, strict=True):
            truth = {"reference": row["target"]} if "target" in row else {}
            yield {"prompt": row["source"], **truth, "generated": text}


def longest_target(asked: int | None, positions: int, usual: int) -> int:
    """Return the tokens of a target, the recipe's or the `usual` ones. Raises UserError for more than `positions`."""
    if asked is not None and asked > positions:
        raise UserError(f"max_target_length is {asked}; allowed: at most {positions}, the positions of this model")
    return asked or min(usual, positions)


LEAD = 3


class SummarizationColumns(Columns):
    """The document and its summary."""

    source: str = "document"
    """The column of the source text."""
    target: str = "summary"
    """The column of the target text."""


class SummarizationData(schema.Data):
    """Adds the columns."""

    columns: SummarizationColumns = SummarizationColumns()


class SummarizationRecipe(Seq2SeqRecipe):
    """`source_prefix` is `summarize: ` for the first T5 models."""

    data: SummarizationData


class Summarization(Seq2SeqTask[SummarizationRecipe]):
    """Learns to write a short text that says what a document says."""

    architectures = ("ForConditionalGeneration",)
    metrics = ("rouge",)
    untrained = (
        f"answers with the first {LEAD} sentences of the document",
        lambda text: " ".join(sentences(text)[:LEAD]),
    )

    def measures(self) -> Chosen:
        # ROUGE reads nothing of most writings.
        return choose(self.recipe.metrics or self.metrics, (*self.metrics, "chrf"), self.name)

    @staticmethod
    def smoke_row(recipe: SummarizationRecipe, made: synthetic.MadeUp) -> dict[str, Any]:
        """Return a made-up document of eight sentences, the first of which is the summary."""
        written = synthetic.sentences(made.draw, 8)
        return {"source": " ".join(written), "target": written[0]}


class TranslationData(schema.Data):
    """Adds the columns: `translation.en` and `translation.ro` where a row is {"translation": {"en": …, "ro": …}}."""

    columns: Columns


class TranslationRecipe(Seq2SeqRecipe):
    """Adds languages as the tokenizers of multilingual models name them (`en_XX`, `ron_Latn`)."""

    data: TranslationData
    src_lang: str | None = None
    """The source's language, for a model that knows many."""
    tgt_lang: str | None = None
    """The target's language, for a model that knows many."""

    def wrong(self) -> Iterator[str]:
        if (self.src_lang is None) != (self.tgt_lang is None):
            yield "has one of src_lang and tgt_lang; give both, or neither"


class Translation(Seq2SeqTask[TranslationRecipe]):
    """Learns to write a text in another language."""

    architectures = ("MTModel", "M2M100ForConditionalGeneration")
    default_columns: ClassVar[Mapping[str, str]] = {"source": "source", "target": "target"}
    metrics = ("sacrebleu", "chrf", "bleu")
    untrained = ("answers with the source itself", str)

    @property
    def prefix_key(self) -> str:
        """The name of the source's prefix in T5's configurations: languages as the columns are called."""
        source, target = (name.rpartition(".")[2] for name in self.recipe.data.columns.roles().values())
        return f"translation_{source}_to_{target}"

    def settle(self, tokenizer: Any, model: Any) -> None:
        """Set a multilingual tokenizer's languages, and the token with which the model begins its translations."""
        recipe, name, keys = self.recipe, self.recipe.model, "src_lang and tgt_lang"
        multilingual = hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")
        if recipe.tgt_lang is None:
            if multilingual:
                raise UserError(f"model {name} knows many languages; give {keys}, as its tokenizer has them")
            return
        if not multilingual:
            raise UserError(f"src_lang: model {name} has no languages to choose from; leave {keys} out")
        codes = getattr(tokenizer, "lang_code_to_token", None)  # M2M100 writes `ro` as __ro__; the others as it is
        known = codes if codes is not None else {token: token for token in tokenizer.all_special_tokens}
        for key in ("src_lang", "tgt_lang"):
            name = getattr(recipe, key)
            if name not in known:
                raise UserError(f"{key} is '{name}', which the tokenizer does not know{nearest(name, known)}")
            setattr(tokenizer, key, name)
        if model is not None:
            model.generation_config.forced_bos_token_id = tokenizer.convert_tokens_to_ids(known[recipe.tgt_lang])

    @staticmethod
    def smoke_row(recipe: TranslationRecipe, made: synthetic.MadeUp) -> dict[str, Any]:
        """Return a made-up sentence; the target has the words in reverse order."""
        source = synthetic.sentences(made.draw, 1)[0]
        return {"source": source, "target": " ".join(reversed(source.split()))}
