"""Metrics of texts: ROUGE by rouge-score, BLEU and chrF by SacreBLEU, error rates by jiwer.

Those of recipes, against one reference each, come first; the others have evaluate's keywords.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from hf_mps.core import notices

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_END = re.compile(r"(?<=[.!?])\s+|\n+")
References = Sequence[Any]
"""For each row its references in a list, or its only one."""


def mean_rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the mean F-measure of each kind, 0 to 1, with Porter's stemmer as transformers' run_summarization has it.

    A plain mean over the rows: `evaluate` takes the median of bootstrap samples, another number in every run. For
    ROUGE-Lsum a text is split into sentences behind a full stop, question or exclamation mark and at line breaks. Warns
    of references that rouge-score sees nothing of.
    """
    from rouge_score.rouge_scorer import RougeScorer

    if blank := sum(not re.search("[a-zA-Z0-9]", truth) for truth in references):
        told = f"{blank} of {len(references)} references score 0: ROUGE reads the letters a to z and digits alone"
        notices.warn_user(f"{told}; next: metrics=chrf")
    scorer = RougeScorer(list(KINDS), use_stemmer=True)
    pairs = zip(predictions, references, strict=True)
    rows = [scorer.score("\n".join(sentences(truth)), "\n".join(sentences(answer))) for answer, truth in pairs]
    return {kind: sum(row[kind].fmeasure for row in rows) / len(rows) for kind in KINDS}


def unsmoothed_bleu(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Corpus BLEU, 0 to 1, over tokens of mteval-v13a without smoothing: 0 where no four words in a row are right."""
    from sacrebleu import corpus_bleu

    found = corpus_bleu(list(predictions), [list(references)], smooth_method="none")
    return {"bleu": float(found.score) / 100}


def sentences(text: str) -> list[str]:
    """The sentences of a text, by punctuation and line breaks alone: no model of a language is downloaded for it."""
    return [part.strip() for part in _END.split(text) if part.strip()]


class Fmeasure(float):
    """An F-measure of ROUGE, as `evaluate` gives it, that knows its precision and recall, as `datasets` gave it."""

    precision: float
    recall: float

    def __new__(cls, precision: float, recall: float, fmeasure: float) -> Fmeasure:
        made = super().__new__(cls, fmeasure)
        made.precision, made.recall = float(precision), float(recall)
        return made

    @property
    def fmeasure(self) -> float:
        """Itself, as a plain float."""
        return float(self)

    def __getnewargs__(self) -> tuple[float, float, float]:  # type: ignore[override]
        return self.precision, self.recall, float(self)


class Aggregate(float):
    """ROUGE over all rows: a float, the F-measure of `mid`; with `low`, `mid` and `high` of the confidence interval.

    Scripts for datasets 1 and 2 read `.mid.fmeasure`, those for `evaluate` the float.
    """

    low: Fmeasure
    mid: Fmeasure
    high: Fmeasure

    def __new__(cls, low: Fmeasure, mid: Fmeasure, high: Fmeasure) -> Aggregate:
        made = super().__new__(cls, mid)
        made.low, made.mid, made.high = low, mid, high
        return made

    def __getnewargs__(self) -> tuple[Fmeasure, Fmeasure, Fmeasure]:  # type: ignore[override]
        return self.low, self.mid, self.high


def rouge(
    predictions: Sequence[str],
    references: References,
    rouge_types: Sequence[str] | None = None,
    use_aggregator: bool = True,
    use_stemmer: bool = False,
    tokenizer: Callable[[str], list[str]] | None = None,
    use_agregator: bool | None = None,
) -> dict[str, Any]:
    """ROUGE, 0 to 1, by its kind: over all rows (the median of bootstrap samples), or a list without aggregator.

    `use_agregator` is how datasets 1.0 to 1.16 spelled it.
    """
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.scoring import BootstrapAggregator

    kinds = list(rouge_types or KINDS)
    split = SimpleNamespace(tokenize=tokenizer) if tokenizer else None
    scorer = RougeScorer(kinds, use_stemmer=use_stemmer, tokenizer=split)
    rows = [
        scorer.score(truth, answer) if isinstance(truth, str) else scorer.score_multi(truth, answer)
        for answer, truth in zip(predictions, references, strict=True)
    ]
    if not (use_aggregator if use_agregator is None else use_agregator):
        return {kind: [Fmeasure(*row[kind]) for row in rows] for kind in kinds}
    total = BootstrapAggregator()
    for row in rows:
        total.add_scores(row)
    return {kind: Aggregate(*(Fmeasure(*score) for score in found)) for kind, found in total.aggregate().items()}


def sacrebleu(
    predictions: Sequence[str], references: References, tokenize: str | None = None, **keywords: Any
) -> dict[str, Any]:
    """Corpus BLEU, 0 to 100, as `score`, with SacreBLEU's counts and keywords; as many references for each row."""
    from sacrebleu import corpus_bleu

    keywords |= {"tokenize": tokenize} if tokenize else {}
    bleu = corpus_bleu(list(predictions), _streams(references, "sacrebleu"), **keywords)
    numbers = ("score", "counts", "totals", "precisions", "bp", "sys_len", "ref_len")
    return {name: getattr(bleu, name) for name in numbers}


def chrf(predictions: Sequence[str], references: References, **keywords: Any) -> dict[str, Any]:
    """Corpus chrF, 0 to 100, as `score`, with SacreBLEU's keywords: word_order=2 makes it chrF++.

    There are as many references for each row.
    """
    from sacrebleu import CHRF

    found = CHRF(**keywords).corpus_score(list(predictions), _streams(references, "chrf"))
    return {name: getattr(found, name) for name in ("score", "char_order", "word_order", "beta")}


def bleu(
    predictions: Sequence[Any],
    references: References,
    tokenizer: Callable[[str], list[str]] | None = None,
    max_order: int = 4,
    smooth: bool = False,
) -> dict[str, Any]:
    """Corpus BLEU, 0 to 1, over tokens of mteval-v13a or `tokenizer`'s; `smooth` adds one to each count.

    Its brevity penalty compares with a row's shortest reference, where SacreBLEU takes the nearest in length: that of
    https://github.com/tensorflow/nmt/blob/master/nmt/scripts/bleu.py, whose figures `evaluate` gives.
    """
    if tokenizer is None:
        from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

        mteval = Tokenizer13a()
    split = tokenizer or (lambda text: mteval(text).split())
    right, total = [0] * max_order, [0] * max_order
    length = reference_length = 0
    for prediction, row in zip(predictions, references, strict=True):
        answer = split(prediction) if isinstance(prediction, str) else list(prediction)
        truths = [split(text) if isinstance(text, str) else text for text in ([row] if isinstance(row, str) else row)]
        length, reference_length = length + len(answer), reference_length + min(map(len, truths))
        for order in range(max_order):
            reference_ngrams: Counter[Any] = Counter()
            for truth in truths:
                reference_ngrams |= _ngrams(truth, order + 1)
            right[order] += (_ngrams(answer, order + 1) & reference_ngrams).total()
            total[order] += max(0, len(answer) - order)
    extra = int(smooth)
    shares = [(one + extra) / (all_ + extra) if all_ + extra else 0.0 for one, all_ in zip(right, total, strict=True)]
    mean = math.exp(sum(map(math.log, shares)) / max_order) if min(shares) > 0 else 0.0
    penalty = 0.0 if not length or not reference_length else min(1.0, math.exp(1 - reference_length / length))
    return {
        "bleu": mean * penalty,
        "precisions": shares,
        "brevity_penalty": penalty,
        "length_ratio": length / reference_length if reference_length else 0.0,
        "translation_length": length,
        "reference_length": reference_length,
    }


def wer(predictions: Sequence[str], references: Sequence[str], concatenate_texts: bool = False) -> float:
    """The word error rate: edits of words over the words of the references, 0 where nothing is wrong, perhaps above 1.

    White space of any kind separates words; texts in one give the same. Raises ValueError where the references hold
    no word.
    """
    from jiwer import process_words

    return _rate(process_words, predictions, references, "word")


def cer(predictions: Sequence[str], references: Sequence[str], concatenate_texts: bool = False) -> float:
    """Return the character error rate: as `wer`, over characters, each run of white space counting as one space.

    With concatenate_texts edits may reach from one row into the next. Raises ValueError where the references hold no
    character.
    """
    from jiwer import process_characters

    if concatenate_texts:
        predictions, references = (["".join(map(_spaced, texts))] for texts in (predictions, references))
    return _rate(process_characters, predictions, references, "character")


def _spaced(text: str) -> str:
    """`text` with one space for each run of white space, and none around it."""
    return " ".join(text.split())


def _rate(count: Any, predictions: Sequence[str], references: Sequence[str], unit: str) -> float:
    answers, truths = (list(map(_spaced, texts)) for texts in (predictions, references))
    found = count(truths, answers)
    wrong = found.substitutions + found.deletions
    if found.hits + wrong == 0:
        raise ValueError(f"the references hold no {unit}, so there is no rate of errors")
    return float((wrong + found.insertions) / (found.hits + wrong))


def _streams(references: References, name: str) -> list[list[str]]:
    """Return the first reference of each row, the second, …, as SacreBLEU takes them.

    Raises ValueError where some rows have fewer.
    """
    rows = [[row] if isinstance(row, str) else list(row) for row in references]
    counts = {len(row) for row in rows}
    if len(counts) > 1:
        raise ValueError(f"{name} takes as many references for each row, not {', '.join(map(str, sorted(counts)))}")
    return [list(stream) for stream in zip(*rows, strict=True)]


def _ngrams(words: Sequence[str], order: int) -> Counter[Any]:
    return Counter(tuple(words[place : place + order]) for place in range(len(words) - order + 1))
