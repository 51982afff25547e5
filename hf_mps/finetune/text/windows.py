"""Questions with their texts, cut into overlapping windows of tokens, and answers found in the windows' logits."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, brief
from hf_mps.finetune.text import tokens

if TYPE_CHECKING:
    from datasets import Dataset

    from hf_mps.finetune.data.rows import Rows

NOWHERE = -1
"""The character offset of a token that does not belong to the text: the question, special tokens, padding."""


@dataclass(frozen=True)
class QAWindowing:
    """Cuts rows into windows of at most `longest` tokens, question included; neighbours share `stride` tokens.

    `content` is the tokenizer's digest; `negative` says whether a question may have no answer.
    """

    tokenizer: Any
    content: str
    longest: int
    stride: int
    negative: bool

    @property
    def columns(self) -> list[str]:
        """The model's inputs: the tokenizer's columns, and the first and last token of the answer."""
        return [*self.inputs, "start_positions", "end_positions"]

    @property
    def inputs(self) -> list[str]:
        """The tokenizer's columns alone, for questions without known answers."""
        return list(self.tokenizer("a", "b"))

    def windows(self, rows: Rows) -> Dataset:
        """A row for each window, those of a question in a row: `columns`, and for the answers `row` (the question's
        number), `starts` and `ends` (the characters of each token in the text, NOWHERE outside) and `null`, the token
        that says "no answer here". Rows without answers are taken for unanswered ones.

        Raises UserError for a row without a text, an answer that is not where it should be, a question too long.
        """
        lists, numbers = (*self.inputs, "starts", "ends"), ("start_positions", "end_positions", "row", "null")
        kinds = dict.fromkeys(lists, ("int32",)) | dict.fromkeys(numbers, "int64")
        key = ("windows", self.longest, self.stride, self.tokenizer.padding_side)
        return tokens.map_cached(rows, partial(self._encode, rows), content=self.content, key=key, features=kinds)

    def _encode(self, rows: Rows, batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
        # Some of SQuAD's questions begin with blanks, enough to fill a window.
        questions = [text.strip() for text in tokens.texts(rows, "question", batch, indices)]
        contexts = tokens.texts(rows, "context", batch, indices)
        capacity = self.longest - self.tokenizer.num_special_tokens_to_add(pair=True)
        question_ids = self.tokenizer(questions, add_special_tokens=False)["input_ids"]
        for question, index in zip(question_ids, indices, strict=True):
            if (left := capacity - len(question)) <= self.stride:
                told = f"has {len(question)} tokens, which leaves {max(0, left)} of {self.longest} for the text"
                allowed = f"allowed: more than doc_stride, {self.stride}"
                way_on = "next: a larger max_length or a smaller doc_stride"
                raise UserError(f"{rows.place(index)}: the question {told}; {allowed}; {way_on}")
        last = self.tokenizer.padding_side == "right"
        pair = (questions, contexts) if last else (contexts, questions)
        how = {"truncation": "only_second" if last else "only_first", "max_length": self.longest, "stride": self.stride}
        encoded = self.tokenizer(*pair, **how, return_overflowing_tokens=True, return_offsets_mapping=True)
        offsets, sources = encoded.pop("offset_mapping"), encoded.pop("overflow_to_sample_mapping")
        names = ("starts", "ends", "null", "row", "start_positions", "end_positions")
        columns: dict[str, list[Any]] = {name: [] for name in names}
        answers = zip(contexts, batch.get("answers", [None] * len(indices)), indices, strict=True)
        spans = [_first_answer(rows, *one) for one in answers]
        for number, source in enumerate(sources):
            inside = [part == int(last) for part in encoded.sequence_ids(number)]
            places = zip(offsets[number], inside, strict=True)
            starts, ends = zip(*(pair if here else (NOWHERE, NOWHERE) for pair, here in places), strict=True)
            # The token that answers "nothing": [CLS], as in BERT, or the first.
            ids = list(encoded["input_ids"][number])
            special = (self.tokenizer.cls_token_id, self.tokenizer.bos_token_id)
            null = next((ids.index(token) for token in special if token is not None and token in ids), 0)
            span_tokens = token_span(starts, ends, spans[source]) or (null, null)
            for name, value in zip(columns, (starts, ends, null, indices[source], *span_tokens), strict=True):
                columns[name].append(value)
        return {**encoded, **columns}


def token_span(starts: Sequence[int], ends: Sequence[int], span: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the first and last token of the characters `span`; None where a window does not hold all of them."""
    if span is None:
        return None
    first = next((number for number, start in enumerate(starts) if start != NOWHERE), len(starts))
    last = next((number for number in reversed(range(len(starts))) if starts[number] != NOWHERE), -1)
    if first > last or starts[first] > span[0] or ends[last] < span[1]:
        return None
    begin = bisect_right(starts, span[0], first, last + 1) - 1
    end = bisect_left(ends, span[1], first, last + 1)
    return (begin, end) if begin <= end else (begin, begin)


def refuse_other_than_squads(rows: Rows) -> None:
    """Raise UserError where questions or texts are no text, or answers do not have SQuAD's form."""
    tokens.refuse_other_than_text(rows, ["context", "question"])
    kind = rows.dataset.features["answers"]
    inside = getattr(kind, "feature", kind)
    if not isinstance(inside, dict) or not {"text", "answer_start"} <= set(inside):
        allowed = 'SQuAD\'s {"text": [...], "answer_start": [...]} or a list of {"text", "answer_start"}'
        raise UserError(f"{rows.where}: data.columns.answers names a column of {kind}; allowed: {allowed}")


def truths(rows: Rows) -> list[list[str]]:
    """Return each question's answers, in the order of the rows."""
    return [_answers(value)[0] for value in rows.dataset["answers"]]


def summary(windows: Mapping[str, Dataset], rows: Mapping[str, Rows], stride: int) -> Choice[str]:
    """Describe how many windows there are."""
    counts = " + ".join(str(len(dataset)) for dataset in windows.values())
    questions = " + ".join(str(len(rows[split].dataset)) for split in windows)
    shared = f"a text too long for one goes on in the next, with {stride} tokens of overlap"
    return Choice(counts, f"of {questions} questions; {shared}")


def _answers(value: Any) -> tuple[list[str], list[int]]:
    """Return texts and positions from either of SQuAD's forms: a dict of lists, or a list of dicts; empty where
    None.
    """
    if isinstance(value, dict):
        return list(value["text"] or ()), list(value["answer_start"] or ())
    return [one["text"] for one in value or ()], [one["answer_start"] for one in value or ()]


def _first_answer(rows: Rows, context: str, value: Any, index: int) -> tuple[int, int] | None:
    """Return the characters of the first answer, None for none. Raises UserError where the text there differs."""
    texts, starts = _answers(value)
    if not texts:
        return None
    start, end = starts[0], starts[0] + len(texts[0])
    if context[start:end] != texts[0] or not texts[0]:
        told = f"the text at answer_start {start} is '{brief(context[start:end])}', not '{brief(texts[0])}'"
        raise UserError(f"{rows.place(index)}: {told}; allowed: the answer's place, in characters from 0")
    return start, end


@dataclass(frozen=True)
class Window:
    """A piece of a text as the model saw it.

    `start_logits` and `end_logits` have shape (width,); `starts` and `ends` are the characters at which each token
    begins and ends in the whole text (NOWHERE outside of it), shape (tokens,) with tokens at most width. `null` is the
    position of the token that means "no answer here".
    """

    start_logits: Any
    end_logits: Any
    starts: Any
    ends: Any
    null: int


@dataclass(frozen=True)
class Span:
    """Characters `start` to `end` (exclusive) of a text; `score` is the sum of its two logits."""

    start: int
    end: int
    score: float


@dataclass(frozen=True)
class Answer:
    """A text's answer: `text` is empty where there is none, and `start` is then -1.

    `probability` is the softmax over the n-best spans (and "no answer" where that is allowed). `null_margin` is the
    score of "no answer" minus that of the best span: above the threshold, the text has no answer.
    """

    text: str
    start: int
    probability: float
    null_margin: float


def best_spans(window: Window, count: int, longest: int) -> list[Span]:
    """Return the `count` best spans of a window, at most `longest` tokens long, best first; every span is scored.

    A span begins and ends in the text. Among equal scores the earlier, then the shorter span comes first.
    """
    starts, ends = numpy.asarray(window.starts), numpy.asarray(window.ends)
    width = len(starts)
    inside = starts != NOWHERE
    first = numpy.where(inside, numpy.asarray(window.start_logits, dtype=numpy.float64)[:width], -numpy.inf)
    last = numpy.where(inside, numpy.asarray(window.end_logits, dtype=numpy.float64)[:width], -numpy.inf)
    # Row `more` holds the spans of `more` further tokens; longest x width sums are all spans.
    sums = numpy.full((min(longest, width), width), -numpy.inf)
    for more in range(len(sums)):
        sums[more, : width - more] = first[: width - more] + last[more:]
    flat = numpy.where(numpy.isnan(sums), -numpy.inf, sums).ravel()
    taken = min(count, flat.size)
    worst = numpy.partition(flat, flat.size - taken)[flat.size - taken]
    # All ties with the worst: which of them a partition keeps is undefined.
    places = numpy.flatnonzero((flat >= worst) & (flat > -numpy.inf)).tolist()
    ranked = sorted((-flat[place], place % width, place // width) for place in places)
    return [Span(int(starts[at]), int(ends[at + more]), float(-score)) for score, at, more in ranked[:count]]


def answer(
    text: str, pieces: Iterable[Window], count: int = 20, longest: int = 30, nothing: bool = False, threshold: float = 0
) -> Answer:
    """Return what `text` answers, from all of its windows, `pieces`: the best of each window's `count` best spans.

    `longest` is in tokens. With `nothing` there may be no answer (SQuAD 2.0): when the null score, the least over the
    windows, exceeds the best span by more than `threshold`. transformers' run_qa.py has the same rule, but combines the
    20 best starts with the 20 best ends; this n-best list is exact.
    """
    seen: dict[tuple[int, int], Span] = {}
    null = math.inf
    for window in pieces:
        null = min(null, float(window.start_logits[window.null]) + float(window.end_logits[window.null]))
        for span in best_spans(window, count, longest):
            place = (span.start, span.end)
            if place not in seen or seen[place].score < span.score:
                seen[place] = span
    ordered = sorted(seen.values(), key=lambda span: (-span.score, span.start, span.end))[:count]
    if not ordered:
        return Answer("", -1, 1.0, math.inf)
    margin = null - ordered[0].score
    scores = numpy.array([span.score for span in ordered] + ([null] if nothing else []))
    powers = numpy.exp(scores - scores.max())
    shares = (powers / powers.sum()).tolist()
    if nothing and margin > threshold:
        return Answer("", -1, shares[-1], margin)
    return Answer(text[ordered[0].start : ordered[0].end], ordered[0].start, shares[0], margin)
