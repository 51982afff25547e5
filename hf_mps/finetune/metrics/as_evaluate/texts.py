"""Metrics of texts: ROUGE by rouge-score, BLEU and chrF by SacreBLEU, error rates by jiwer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hf_mps.finetune.metrics import edits

References = Sequence[Any]
"""For each row its references in a list, or its only one."""


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


class _Words:
    """A tokenizer as rouge-score asks for one."""

    def __init__(self, tokenize: Callable[[str], list[str]]) -> None:
        self.tokenize = tokenize


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

    kinds = list(rouge_types or ("rouge1", "rouge2", "rougeL", "rougeLsum"))
    scorer = RougeScorer(kinds, use_stemmer=use_stemmer, tokenizer=_Words(tokenizer) if tokenizer else None)
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
    predictions: Sequence[str],
    references: References,
    smooth_method: str = "exp",
    smooth_value: float | None = None,
    force: bool = False,
    lowercase: bool = False,
    tokenize: str | None = None,
    use_effective_order: bool = False,
) -> dict[str, Any]:
    """Corpus BLEU, 0 to 100, as `score`, with SacreBLEU's counts; as many references for each row."""
    from sacrebleu import corpus_bleu

    found = corpus_bleu(
        list(predictions),
        _streams(references, "sacrebleu"),
        smooth_method=smooth_method,
        smooth_value=smooth_value,
        force=force,
        lowercase=lowercase,
        use_effective_order=use_effective_order,
        **({"tokenize": tokenize} if tokenize else {}),
    )
    numbers = ("score", "counts", "totals", "precisions", "bp", "sys_len", "ref_len")
    return {name: getattr(found, name) for name in numbers}


def chrf(
    predictions: Sequence[str],
    references: References,
    char_order: int = 6,
    word_order: int = 0,
    beta: int = 2,
    lowercase: bool = False,
    whitespace: bool = False,
    eps_smoothing: bool = False,
) -> dict[str, Any]:
    """Corpus chrF, 0 to 100, as `score`; word_order=2 makes it chrF++; as many references for each row."""
    from sacrebleu import CHRF

    formula = CHRF(char_order, word_order, beta, lowercase, whitespace, eps_smoothing)
    found = formula.corpus_score(list(predictions), _streams(references, "chrf"))
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
    split = tokenizer or _mteval()
    right, asked = [0] * max_order, [0] * max_order
    length = wanted = 0
    for prediction, given in zip(predictions, references, strict=True):
        answer = split(prediction) if isinstance(prediction, str) else list(prediction)
        truths = [
            split(each) if isinstance(each, str) else each for each in ([given] if isinstance(given, str) else given)
        ]
        length, wanted = length + len(answer), wanted + min(map(len, truths))
        for order in range(max_order):
            there: Counter[Any] = Counter()
            for truth in truths:
                there |= _ngrams(truth, order + 1)
            right[order] += (_ngrams(answer, order + 1) & there).total()
            asked[order] += max(0, len(answer) - order)
    extra = int(smooth)
    shares = [(one + extra) / (all_ + extra) if all_ + extra else 0.0 for one, all_ in zip(right, asked, strict=True)]
    mean = math.exp(sum(map(math.log, shares)) / max_order) if min(shares) > 0 else 0.0
    penalty = 0.0 if not length or not wanted else min(1.0, math.exp(1 - wanted / length))
    return {
        "bleu": mean * penalty,
        "precisions": shares,
        "brevity_penalty": penalty,
        "length_ratio": length / wanted if wanted else 0.0,
        "translation_length": length,
        "reference_length": wanted,
    }


def wer(predictions: Sequence[str], references: Sequence[str], concatenate_texts: bool = False) -> float:
    """The word error rate over all rows, 0 where nothing is wrong, perhaps above 1; texts in one give the same.

    Raises ValueError where the references hold no word.
    """
    return edits.wer(predictions, references)


def cer(predictions: Sequence[str], references: Sequence[str], concatenate_texts: bool = False) -> float:
    """The character error rate over all rows; with concatenate_texts edits may reach from one row into the next.

    Raises ValueError where the references hold no character.
    """
    if concatenate_texts:
        predictions, references = (["".join(map(edits.spaced, texts))] for texts in (predictions, references))
    return edits.cer(predictions, references)


def _streams(references: References, name: str) -> list[list[str]]:
    """The first reference of each row, the second, …, as SacreBLEU takes them.

    Raises ValueError where some rows have fewer.
    """
    rows = [[row] if isinstance(row, str) else list(row) for row in references]
    counts = {len(row) for row in rows}
    if len(counts) > 1:
        raise ValueError(f"{name} takes as many references for each row, not {', '.join(map(str, sorted(counts)))}")
    return [list(stream) for stream in zip(*rows, strict=True)]


def _mteval() -> Callable[[str], list[str]]:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    tokens = Tokenizer13a()
    return lambda text: tokens(text).split()


def _ngrams(words: Sequence[str], order: int) -> Counter[Any]:
    return Counter(tuple(words[place : place + order]) for place in range(len(words) - order + 1))
