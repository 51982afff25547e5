"""What cheap tricks reach on pairs: models that look at words, lengths and overlap, and never at what a pair says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Any

from hf_mps.finetune.pairs import Row
from hf_mps.finetune.pairs.words import tokens

Score = dict[str, float]


def score(labels: Sequence[int], answers: Sequence[int]) -> Score:
    """Return accuracy and the F1 of label 1."""
    pairs = Counter(zip(labels, map(int, answers), strict=True))
    hits, wrong = pairs[1, 1], pairs[0, 1] + pairs[1, 0]
    return {"accuracy": 1 - wrong / len(labels), "f1": 2 * hits / (2 * hits + wrong) if hits else 0.0}


def _labels(rows: Sequence[Row]) -> list[int]:
    return [row["label"] for row in rows]


def words_of(*columns: str, binary: bool = False) -> Callable[[Sequence[Row], Sequence[Row]], Score]:
    """Return an oracle: logistic regression on the words of the columns, counted or only present."""

    def oracle(train: Sequence[Row], held_out: Sequence[Row]) -> Score:
        from sklearn.feature_extraction.text import CountVectorizer

        def texts(rows: Sequence[Row]) -> list[list[str]]:
            return [[word for column in columns for word in tokens(str(row[column]))] for row in rows]

        bag = CountVectorizer(analyzer=lambda words: words, binary=binary, min_df=2)
        return _regression(bag.fit_transform(texts(train)), train, bag.transform(texts(held_out)), held_out)

    return oracle


def different_words(train: Sequence[Row], held_out: Sequence[Row]) -> Score:
    """Logistic regression on the words that stand in one sentence of the pair only."""
    from sklearn.feature_extraction.text import CountVectorizer

    def texts(rows: Sequence[Row]) -> list[list[str]]:
        return [sorted(set(tokens(row["sentence1"])) ^ set(tokens(row["sentence2"]))) for row in rows]

    bag = CountVectorizer(analyzer=lambda words: words, min_df=2)
    return _regression(bag.fit_transform(texts(train)), train, bag.transform(texts(held_out)), held_out)


def _regression(train_x: Any, train: Sequence[Row], held_out_x: Any, held_out: Sequence[Row]) -> Score:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=2000).fit(train_x, _labels(train))
    return score(_labels(held_out), model.predict(held_out_x))


def _grams(words: Sequence[str], length: int) -> set[tuple[str, ...]]:
    return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}


def _share(one: set[Any], other: set[Any]) -> float:
    return len(one & other) / max(1, len(one | other))


def surface(row: Row) -> list[float]:
    """Return overlap of words, word pairs and figures, order of the shared words, lengths and their difference."""
    return _surface(row["sentence1"], row["sentence2"])


@lru_cache(maxsize=20_000)
def _surface(sentence1: str, sentence2: str) -> list[float]:
    one, other = tokens(sentence1), tokens(sentence2)
    figures = [{word for word in words if word[0].isdigit()} for words in (one, other)]
    return [
        _share(set(one), set(other)),
        len(set(one) & set(other)) / min(len(set(one)), len(set(other))),
        _share(_grams(one, 2), _grams(other, 2)),
        _share(*figures) if figures[0] | figures[1] else 1.0,
        SequenceMatcher(None, one, other, autojunk=False).ratio(),
        len(one) - len(other),
        abs(len(one) - len(other)),
        len(one) + len(other),
        abs(len(sentence1) - len(sentence2)),
    ]


def surface_linear(train: Sequence[Row], held_out: Sequence[Row]) -> Score:
    """Logistic regression on the overlap and length features."""
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit([surface(row) for row in train])
    return _regression(
        scaler.transform([surface(row) for row in train]), train, scaler.transform([*map(surface, held_out)]), held_out
    )


def surface_trees(train: Sequence[Row], held_out: Sequence[Row]) -> Score:
    """Boosted trees on the overlap and length features: thresholds and their combinations."""
    from sklearn.ensemble import GradientBoostingClassifier

    model = GradientBoostingClassifier(max_depth=3, n_estimators=60, random_state=0)
    model.fit([surface(row) for row in train], _labels(train))
    return score(_labels(held_out), model.predict([surface(row) for row in held_out]))


def _cues(row: Row) -> set[tuple[str, str]]:
    one, other = set(tokens(row["sentence1"])), set(tokens(row["sentence2"]))
    return (
        {("first", word) for word in one}
        | {("second", word) for word in other}
        | {("both", word) for word in one & other}
        | {("either", word) for word in one | other}
        | {("one only", word) for word in one ^ other}
    )


def single_word(train: Sequence[Row], held_out: Sequence[Row]) -> Score:
    """The best rule on one word: a pair that has it (in the first, in both, in one only, …) is no paraphrase."""
    balance: Counter[tuple[str, str]] = Counter()
    for row in train:
        balance.update(dict.fromkeys(_cues(row), 1 if row["label"] == 0 else -1))
    best = max(sorted(balance), key=lambda cue: balance[cue])
    return score(_labels(held_out), [int(best not in _cues(row)) for row in held_out])


ORACLES: dict[str, Callable[[Sequence[Row], Sequence[Row]], Score]] = {
    "words of both, counted": words_of("sentence1", "sentence2"),
    "words of both, present": words_of("sentence1", "sentence2", binary=True),
    "words of sentence 1": words_of("sentence1"),
    "words of sentence 2": words_of("sentence2"),
    "overlap and length, linear": surface_linear,
    "overlap and length, trees": surface_trees,
    "best single word": single_word,
    "words in one only": different_words,
}
