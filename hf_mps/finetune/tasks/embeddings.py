"""Embeddings: texts become vectors, trained by sentence-transformers, that are alike where the texts are.

Sentence embeddings are compared by their cosine: pairs with a score learn the score; pairs without one learn that the
second text is the batch's nearest to the first, and that a third, the hard negative, is not. Sparse embeddings (SPLADE)
are weights of words, by which an inverted index finds texts: a query's right document is to have the largest inner
product with it among those of the batch, while few words keep a weight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, brief
from hf_mps.finetune.data import labels, synthetic
from hf_mps.finetune.data.load import SPLITS, Rows
from hf_mps.finetune.models import embeddings
from hf_mps.finetune.models.embeddings import NAMES, WHOLE, Span
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks import CALLS_PARTS, SENTENCE_TRANSFORMERS, Dataset, Prepared, R
from hf_mps.finetune.tasks._text import TokenTask
from hf_mps.finetune.text import buckets, lengths, tokens
from hf_mps.metrics.selection import choose

Loss = Literal["CosineSimilarityLoss", "CoSENTLoss", "MultipleNegativesRankingLoss"]
SCORED: tuple[Loss, ...] = ("CosineSimilarityLoss", "CoSENTLoss")
RANKED: tuple[Loss, ...] = ("MultipleNegativesRankingLoss",)
SHOWN = 5
"""Words of an embedding that predictions.csv shows."""
DRAWN = Choice(buckets.RANDOM, "sentence-transformers draws its batches itself")
INNER, COST = "SparseMultipleNegativesRankingLoss", "FlopsLoss"
"""The loss inside SpladeLoss, and its own regularizer."""


class SentenceTask(TokenTask[R]):
    """A task that sentence-transformers trains."""

    library = SENTENCE_TRANSFORMERS
    arguments_source = embeddings.ARGUMENTS
    settled: ClassVar[Mapping[str, str]] = embeddings.SETTLED
    unsharded = CALLS_PARTS
    # Of a saved model: `prepare` names the trainer that trains. Static, or Python would bind the function to the task.
    trainer = staticmethod(embeddings.apart)

    def opened(self) -> tuple[Any, str]:
        """Return the model, and what it is made of in words. Raises UserError for one that cannot be used."""
        raise NotImplementedError

    def padding(self) -> Any:
        """Return the collator of what a saved model reads."""
        raise NotImplementedError

    def begin(self, chosen: Mapping[str, Any] | None = None) -> None:
        """Load and describe the model, and settle the longest length: that of `chosen` where saved."""
        self.model, parts = self.opened()
        count = sum(parameter.numel() for parameter in self.model.parameters())
        self.choices["model"] = Choice(self.checkpoint.name, f"{parts}, {count / 1e6:.1f} M parameters")
        self.read_by(self.model.tokenizer, self.checkpoint.config(), chosen)
        self.model.max_seq_length = self.longest  # what sentence-transformers itself cuts texts to

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        embeddings.library(self.name)
        self.begin(chosen)
        self.collator = self.padding()
        return self.made()

    def choose_lengths(self, counts: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Choose what batches are padded to, from the tokens of each text of each row."""
        flat = {split: list(itertools.chain(*some)) for split, some in counts.items()}
        self.length = lengths.decide(self.recipe, flat, self.longest, grouped=False)


class EmbeddingTask(SentenceTask[R]):
    """A task whose model makes a vector of each text."""

    batch = embeddings.BATCH
    optional = ("text_pair",)

    def opened(self) -> tuple[Any, str]:
        """Return the model, with its own pooling or else sentence-transformers' default, and its parts."""
        model = self.checkpoint.of_sentence_transformers(self.auto_class, self.device)
        return model, " + ".join(type(part).__name__ for part in model)

    def padding(self) -> Any:
        """Return the collator."""
        return embeddings.collator(self.model, self.length.value, self.recipe.training.get("prompts"))

    def encoded(self, rows: Mapping[str, Rows], span: Span = WHOLE) -> tuple[dict[str, Any], list[int]]:
        """Return the texts of each split with their scores, and the tokens of each training row's longest text."""
        made = {split: self._encoded(rows[split], span) for split in rows}
        counts = {split: made[split]["lengths"][:] for split in made}
        self.choose_lengths(counts)
        self.collator = self.padding()
        return {split: made[split].remove_columns("lengths") for split in SPLITS}, [max(row) for row in counts["train"]]

    def _encoded(self, rows: Rows, span: Span) -> Dataset:
        """Return the rows' texts, the score brought from `span` to 0 to 1, and `lengths`: the tokens of each text."""
        roles = [role for role in self.recipe.data.columns.roles() if role != "score"]
        has_score, tokenizer, longest = "score" in rows.dataset.column_names, self.tokenizer, self.longest
        tokens.refuse_other_than_text(rows, roles)

        def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
            texts = {NAMES[role]: tokens.texts(rows, role, batch, indices) for role in roles}
            cut = [tokenizer(column, truncation=True, max_length=longest)["input_ids"] for column in texts.values()]
            made: dict[str, Any] = {**texts, "lengths": [[len(ids) for ids in row] for row in zip(*cut, strict=True)]}
            if has_score:
                low, high = span
                made["score"] = [(float(raw) - low) / (high - low) for raw in batch["score"]]
            return made

        kinds = {**{NAMES[role]: "string" for role in roles}, "lengths": ("int32",)}
        # Metal refuses the float64 that a plain Python float would become.
        kinds |= {"score": "float32"} if has_score else {}
        key = ("embedded texts", longest, roles, span)
        return tokens.map_cached(rows, encode, content=tokens.digest(tokenizer), key=key, features=kinds)

    def trained(
        self, rows: Rows, evaluator: Any, choices: Mapping[str, Choice[Any]], scored: bool = False, **parts: Any
    ) -> Prepared:
        """Return `made` for a training that `evaluator` measures on `rows`, of pairs with a score or without."""
        sampling = Choice("random, no text twice", "a text that comes twice in a batch would be its own wrong answer")
        if asked := self.recipe.training.get("batch_sampler"):
            sampling = Choice(str(asked), "the recipe says so")
        elif scored:
            sampling = DRAWN
        parts["choices"] = {"lengths": self.length, **choices, "sampling": sampling, **self.choices}
        defaults = embeddings.arguments(ranked=not scored)
        return self.made((rows, evaluator), baseline=evaluator.baseline(), arguments_defaults=defaults, **parts)

    def inputs(self, rows: Rows) -> dict[str, list[str]]:
        """Return the texts of `rows` by their roles: alone, or in pairs."""
        roles = [role for role in ("text", "text_pair") if role in rows.dataset.column_names]
        tokens.refuse_other_than_text(rows, roles)
        every = range(len(rows.dataset))
        return {role: tokens.texts(rows, role, {role: rows.dataset[role][:]}, every) for role in roles}

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Any:
        """Yield what the model makes of each row; after a training `inputs` are the evaluator of all rows."""
        if isinstance(inputs, embeddings.EmbeddingEvaluator):
            return inputs.rows(trainer.model)
        return self.compared(trainer, inputs)

    def compared(self, trainer: Any, texts: Mapping[str, Sequence[str]]) -> Any:
        """Yield an answer for each text alone or each pair of texts."""
        raise NotImplementedError

    @classmethod
    def smoke_rows(cls, recipe: Any, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Return pairs of short texts about one thing, with a score or a negative where the recipe has them."""
        scored, rows = "score" in recipe.data.columns.roles(), []
        for number, (text, other) in enumerate(synthetic.about_things()):
            row: dict[str, Any] = {"text": text, "text_pair": other, "negative": synthetic.about_another(number)}
            if scored:
                low, high = recipe.data.score_range or (0.0, 5.0)
                row["score"] = float(high) if number % 2 else low + (high - low) / 10 * (number % 5)
                if number % 2 == 0:
                    row["text_pair"] = f"Kofi sleeps near the {synthetic.THINGS[number % 6]}."
            rows.append(synthetic.named(recipe, row))
        return {"train": rows[:16], "validation": rows[16:]}


class Columns(schema.Columns):
    """The columns of the data by their roles: `score` for pairs with a score, `negative` only without one."""

    text: str = "text"
    """The column of the text."""
    text_pair: str = "text_pair"
    """The column of the second text."""
    negative: str | None = None
    """The column of a wrong text."""
    score: str | None = None
    """The column of how alike two texts are."""

    def wrong(self) -> Iterator[str]:
        if self.negative and self.score:
            yield "has negative beside score; leave one of them out"


class Data(schema.Data):
    """Adds the columns, and `score_range`: the scores of no similarity and of identity."""

    columns: Columns = Columns()
    score_range: list[float] | None = Field(default=None, min_length=2, max_length=2)
    """The lowest and the highest score of the data."""

    def wrong(self) -> Iterator[str]:
        if self.score_range is not None and self.score_range[0] >= self.score_range[1]:
            yield f"has score_range {self.score_range}; allowed: [low, high]"


class Recipe(lengths.Padded):
    """Adds the loss."""

    data: Data
    loss: Loss | None = None
    """sentence-transformers' loss; by default the one that suits the columns."""

    def wrong(self) -> Iterator[str]:
        allowed = SCORED if self.data.columns.score else RANKED
        if self.loss is not None and self.loss not in allowed:
            said = "with" if self.data.columns.score else "without"
            yield f"has loss {self.loss}, and the pairs are {said} a score; allowed: {', '.join(allowed)}"


class SentenceEmbeddings(EmbeddingTask[Recipe]):
    """Learns vectors whose cosine is the similarity of texts. A saved model compares pairs, and embeds texts alone."""

    auto_class = "SentenceTransformer"
    pipeline_tag = "sentence-similarity"
    truth = ("negative", "score")

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe, library = self.recipe, embeddings.library(self.name)
        scored = recipe.data.columns.score is not None
        measured = metrics.load(choose(recipe.metrics, ["sts" if scored else "retrieval"], recipe.task).names)
        self.begin()
        span = _span(recipe, rows) if scored else Choice(WHOLE, "")
        data, counts = self.encoded(rows, span.value)
        loss = recipe.loss or (SCORED if scored else RANKED)[0]
        why = "the other pairs of a batch are what a text is not about: a larger batch is a harder lesson"
        why = "the pairs have a score, which the cosine is to equal" if scored else why
        evaluator = embeddings.EmbeddingEvaluator(rows["validation"], data["validation"], measured, self.collator)
        choices: dict[str, Choice[Any]] = {"loss": Choice(loss, "loss in the recipe" if recipe.loss else why)}
        choices |= {"scores": Choice(f"{span.value[0]:g} to {span.value[1]:g}", span.reason)} if scored else {}
        return self.trained(
            rows["validation"],
            evaluator,
            choices,
            scored=scored,
            splits=data,
            metrics=measured,
            trainer=embeddings.trainer(evaluator),
            arguments=library.SentenceTransformerTrainingArguments,
            trainer_settings={"loss": embeddings.make(library.sentence_transformer.losses, loss, self.model)},
            token_counts=counts,
            figures=pictures.similarities if scored else pictures.ranks,
        )

    def compared(self, trainer: Any, texts: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Any]]:
        """Yield the cosine of each pair of texts, or the embedding of each text alone."""
        embed = partial(embeddings.embedded, trainer.model, self.collator, at_once=trainer.args.eval_batch_size)
        found = [embed(some, NAMES[role]) for role, some in texts.items()]
        for number, cosine in enumerate((found[0] * found[-1]).sum(axis=1).tolist()):
            line = {role: some[number] for role, some in texts.items()}
            yield line | ({"embedding": found[0][number]} if len(texts) == 1 else {"cosine": round(cosine, 4)})


def _span(recipe: Recipe, rows: Mapping[str, Rows]) -> Choice[Span]:
    """Return the lowest and highest score. Raises UserError, naming the row, for a score outside of them or not
    finite.
    """
    found = {split: _numbers(some) for split, some in rows.items()}
    low, high = min(found["train"]), max(found["train"])
    if recipe.data.score_range is not None:
        span, reason = (recipe.data.score_range[0], recipe.data.score_range[1]), "data.score_range in the recipe"
    elif low >= 0 and high <= 1:
        span, reason = (0.0, 1.0), "the training scores are between 0 and 1"
    else:
        span, reason = (min(0.0, low), high), "the training scores' own span; data.score_range names another"
    for split, values in found.items():
        for at, value in enumerate(values):
            if not span[0] <= value <= span[1]:
                told = f"{rows[split].place(at)} has the score {value:g}"
                raise UserError(f"{told}; allowed: {span[0]:g} to {span[1]:g}, {reason}")
    return Choice(span, f"{reason}; brought to 0 to 1")


def _numbers(rows: Rows) -> list[float]:
    raw = rows.dataset["score"][:]
    found = list(map(labels.number, raw))
    for at, value in enumerate(found):
        if not math.isfinite(value):
            raise UserError(f"{rows.place(at)} has the score {brief(repr(raw[at]))}; allowed: a number in every row")
    return found


class SparseColumns(schema.Columns):
    """The columns of the data by their roles: a query, the document that answers it, and one that does not."""

    text: str = "query"
    """The column of the text."""
    text_pair: str = "document"
    """The column of the second text."""
    negative: str | None = None
    """The column of a wrong text."""


class SparseData(schema.Data):
    """Adds the columns."""

    columns: SparseColumns = SparseColumns()


class SparseRecipe(lengths.Padded):
    """Adds what a dimension costs in the loss: more makes sparser embeddings."""

    data: SparseData
    document_regularizer: float = Field(default=3e-5, gt=0)
    """How much each dimension of a document costs."""
    query_regularizer: float = Field(default=5e-5, gt=0)
    """How much each dimension of a query costs."""


class SparseEmbeddings(EmbeddingTask[SparseRecipe]):
    """Learns weights of words by which texts are found. A saved model scores pairs, and weighs the words of texts."""

    auto_class = "SparseEncoder"
    pipeline_tag = "feature-extraction"
    metrics = ("sparse_retrieval", "active_dims")
    truth = ("negative",)

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe, library = self.recipe, embeddings.library(self.name)
        measured = self.measures()
        self.begin()
        data, counts = self.encoded(rows)
        evaluator = SparseEvaluator(rows["validation"], data["validation"], measured, self.collator)
        losses, documents, asked = library.sparse_encoder.losses, recipe.document_regularizer, recipe.query_regularizer
        inner = embeddings.make(losses, INNER, self.model)
        costs = {of: embeddings.make(losses, COST, self.model) for of in ("document_regularizer", "query_regularizer")}
        weights = {"document_regularizer_weight": documents, "query_regularizer_weight": asked}
        loss = losses.SpladeLoss(self.model, loss=inner, **costs, **weights)
        said = f"{INNER}, a dimension costs {documents:g} in documents and {asked:g} in queries"
        reason = "the other pairs of a batch are what a query is not about; the costs rise over a third of the steps"
        return self.trained(
            rows["validation"],
            evaluator,
            {"loss": Choice(said, reason)},
            splits=data,
            metrics=measured,
            trainer=trainer(evaluator),
            arguments=library.SparseEncoderTrainingArguments,
            trainer_settings={"loss": loss},
            token_counts=counts,
            figures=pictures.ranks,
        )

    def opened(self) -> tuple[Any, str]:
        """Return the sparse encoder and its parts. Raises UserError for a checkpoint without a head for words."""
        model, parts = super().opened()
        if type(model[-1]).__name__ != "SpladePooling":
            allowed = "allowed: masked language models, such as distilbert/distilbert-base-uncased"
            raise UserError(f"model {self.checkpoint.name}: it has no head that predicts masked words; {allowed}")
        return model, parts

    def compared(self, trainer: Any, texts: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Any]]:
        """Yield the score of each pair of texts, or the words' weights of each text alone."""
        model = trainer.model
        found = [matrix(model, self.collator, some, NAMES[role]) for role, some in texts.items()]
        for number, score in enumerate(embeddings.products(found[0], found[-1]).tolist()):
            line: dict[str, Any] = {role: some[number] for role, some in texts.items()}
            said = {"score": round(score, 4)} if len(found) > 1 else {"words": heaviest(model, found[0][number])}
            yield line | said


def trainer(evaluator: Any) -> type[Any]:
    """Return sentence-transformers' SparseEncoderTrainer with what `evaluator` measures.

    The regularizers' weights rise from 0 over the first third of the steps, as its own default has it.
    """
    from sentence_transformers.sparse_encoder.callbacks.splade_callbacks import SpladeRegularizerWeightSchedulerCallback

    measuring: Any = embeddings.trainer(evaluator, "SparseEncoderTrainer")

    class Sparse(measuring):  # type: ignore[misc]
        def __init__(self, *arguments: Any, loss: Any, callbacks: list[Any], **settings: Any) -> None:
            rising = SpladeRegularizerWeightSchedulerCallback(loss=loss)
            super().__init__(*arguments, loss=loss, callbacks=[rising, *callbacks], **settings)

    return Sparse


def matrix(model: Any, collator: Any, texts: Sequence[str], column: str) -> Any:
    """Return the embeddings of `texts` as a scipy matrix of shape (texts, words of the vocabulary)."""
    from scipy.sparse import csr_matrix, vstack

    return vstack([csr_matrix(row) for row in embeddings.vectors(model, collator, texts, column)], format="csr")


def heaviest(model: Any, row: Any, most: int | None = None) -> dict[str, float]:
    """Return the words of one embedding with their weights, by falling weight, `most` of them."""
    ordered = sorted(zip(row.data, row.indices, strict=True), reverse=True)[:most]
    words = model.tokenizer.convert_ids_to_tokens([int(place) for _, place in ordered])
    return {word: round(float(weight), 4) for word, (weight, _) in zip(words, ordered, strict=True)}


class SparseEvaluator(embeddings.EmbeddingEvaluator):
    """Measures a model on the validation rows by the inner products of its embeddings, and how sparse these are."""

    SIMILARITY = "score"

    def _embedded(self, model: Any, texts: list[str], column: str) -> Any:
        return matrix(model, self._collator, texts, column)

    def _metrics(self, embed: Callable[[list[str], str], Any]) -> dict[str, float]:
        queries, corpus = embed(self._texts["anchor"], "anchor"), embed(list(self._corpus), "positive")
        ranks, _ = self._ranks(queries, corpus)
        values = {"active_dims": (queries.nnz + corpus.nnz) / (queries.shape[0] + corpus.shape[0])}
        values |= self._measured.computed(ranks, [1] * len(ranks))
        return dict(self._measured.of(values))

    def rows(self, model: Any) -> Iterator[dict[str, Any]]:
        """Yield the rows of predictions.csv, each with the words that its query is found by."""
        weights = self._embedded(model, self._texts["anchor"], "anchor")
        for number, line in enumerate(super().rows(model)):
            yield {**line, "active_dims": int(weights[number].nnz), "words": heaviest(model, weights[number], SHOWN)}
