"""SPLADE by sentence-transformers: an embedding has a weight for each word of the vocabulary, nearly all of them 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.models import embeddings, in_batch
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.metrics.table import METRICS

SHOWN = 5
"""Words of an embedding that predictions.csv shows."""
INNER = "SparseMultipleNegativesRankingLoss"
COST = "FlopsLoss"
"""SpladeLoss's own regularizer."""


def load(checkpoint: Checkpoint, device: str) -> tuple[Any, Choice[str]]:
    """Load the checkpoint as a SparseEncoder in float32. Raises UserError where it has no head that predicts words."""
    model = checkpoint.sparse_encoder(device)
    parts = [type(part).__name__ for part in model]
    if parts[-1] != "SpladePooling":
        allowed = "allowed: masked language models, such as distilbert/distilbert-base-uncased"
        raise UserError(f"model {checkpoint.name}: it has no head that predicts masked words; {allowed}")
    count = sum(parameter.numel() for parameter in model.parameters())
    return model, Choice(checkpoint.name, f"{' + '.join(parts)}, {count / 1e6:.1f} M parameters")


def loss(losses: Any, model: Any, document_weight: float, query_weight: float) -> Any:
    """Return SpladeLoss of sentence-transformers' module `losses`: in-batch negatives, and what dimensions cost."""
    return losses.SpladeLoss(
        model,
        loss=in_batch.make(losses, INNER, model),
        document_regularizer=in_batch.regularizer(losses, COST, model),
        query_regularizer=in_batch.regularizer(losses, COST, model),
        document_regularizer_weight=document_weight,
        query_regularizer_weight=query_weight,
    )


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


def answers(model: Any, collator: Any, texts: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Any]]:
    """Yield what a model says of texts by their roles: of pairs the score, of texts alone the words' weights."""
    found = [matrix(model, collator, some, embeddings.NAMES[role]) for role, some in texts.items()]
    scores = embeddings.products(found[0], found[-1]).tolist()
    for number, score in enumerate(scores):
        line: dict[str, Any] = {role: some[number] for role, some in texts.items()}
        yield line | ({"score": round(score, 4)} if len(found) > 1 else {"words": heaviest(model, found[0][number])})


class SparseEvaluator(embeddings.EmbeddingEvaluator):
    """Measures a model on the validation rows by the inner products of its embeddings, and how sparse these are."""

    SIMILARITY = "score"

    def _embedded(self, model: Any, texts: list[str], column: str) -> Any:
        return matrix(model, self._collator, texts, column)

    def _metrics(self, embed: Callable[[list[str], str], Any]) -> dict[str, float]:
        queries, corpus = embed(self._texts["anchor"], "anchor"), embed(list(self._corpus), "positive")
        ranks, _ = self._ranks(queries, corpus)
        values = {"active_dims": (queries.nnz + corpus.nnz) / (queries.shape[0] + corpus.shape[0])}
        for name in self._measured.names:
            if (compute := METRICS[name].compute) is not None:
                values |= compute(ranks, [1] * len(ranks))
        return {name: float(values[name]) for name in self._measured.reported}

    def rows(self, model: Any) -> Iterator[dict[str, Any]]:
        """Yield the rows of predictions.csv, each with the words that its query is found by."""
        weights = self._embedded(model, self._texts["anchor"], "anchor")
        for number, line in enumerate(super().rows(model)):
            yield {**line, "active_dims": int(weights[number].nnz), "words": heaviest(model, weights[number], SHOWN)}
