"""Metrics of generated texts against one reference each: ROUGE by rouge-score, BLEU and chrF by SacreBLEU."""

from __future__ import annotations

import re
from collections.abc import Sequence

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_END = re.compile(r"(?<=[.!?])\s+|\n+")


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """The mean F-measure of each kind, 0 to 1, with Porter's stemmer as transformers' run_summarization has it.

    A plain mean over the rows: `evaluate` takes the median of bootstrap samples, another number in every run. For
    ROUGE-Lsum a text is split into sentences behind a full stop, question or exclamation mark and at line breaks.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(KINDS), use_stemmer=True)
    totals = dict.fromkeys(KINDS, 0.0)
    for answer, truth in zip(predictions, references, strict=True):
        found = scorer.score("\n".join(sentences(truth)), "\n".join(sentences(answer)))
        for kind in KINDS:
            totals[kind] += found[kind].fmeasure
    return {kind: total / len(predictions) for kind, total in totals.items()}


def sacrebleu(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Corpus BLEU, 0 to 100, with SacreBLEU's defaults (tokens of mteval-v13a, exponential smoothing)."""
    from sacrebleu import corpus_bleu

    return {"sacrebleu": float(corpus_bleu(list(predictions), [list(references)]).score)}


def bleu(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Corpus BLEU, 0 to 1, over tokens of mteval-v13a without smoothing: 0 where no four words in a row are right."""
    from sacrebleu import corpus_bleu

    found = corpus_bleu(list(predictions), [list(references)], smooth_method="none")
    return {"bleu": float(found.score) / 100}


def chrf(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Corpus chrF2, 0 to 100: the F-score of character n-grams up to six, recall counted twice."""
    from sacrebleu import corpus_chrf

    return {"chrf": float(corpus_chrf(list(predictions), [list(references)]).score)}


def sentences(text: str) -> list[str]:
    """The sentences of a text, by punctuation and line breaks alone: no model of a language is downloaded for it."""
    return [part.strip() for part in _END.split(text) if part.strip()]
