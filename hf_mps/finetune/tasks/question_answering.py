"""Question answering: for a question and a text, the piece of the text that answers it, or none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, brief
from hf_mps.core.text import counted
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import SPLITS, Rows
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks import Dataset, Prepared
from hf_mps.finetune.tasks._text import TextTask
from hf_mps.finetune.text import buckets, lengths, tokens, windows
from hf_mps.finetune.text.windows import NOWHERE, token_span
from hf_mps.metrics.selection import choose
from hf_mps.metrics.squad import exact_match, f1

SQUAD = "data.paragraphs.qas"
"""The path to the questions in a file of SQuAD's own format."""
PLACES = ("start_positions", "end_positions")
"""The first and the last token of an answer, as models read them."""


class Columns(schema.Columns):
    """The columns of the data by their roles; `answers` holds SQuAD's text and answer_start, `id` may be left out."""

    context: str = "context"
    """The column of the text that the question or choice is about."""
    question: str = "question"
    """The column of the question."""
    answers: str = "answers"
    """The column of answers as SQuAD has them."""
    id: str | None = None
    """The column of ids, kept in predictions.csv."""


class Data(schema.Data):
    """Adds the columns. Of held-out rows, all questions about one text are on the same side."""

    KEPT_TOGETHER: ClassVar[str | None] = "context"
    columns: Columns = Columns()

    def of_file(self, path: Path) -> Data:
        """Know a file in SQuAD's own format, questions within paragraphs within articles, by its beginning."""
        if self.field is None and _is_squads_own(path):
            return self.model_copy(update={"field": SQUAD})
        return self.model_copy(update={"field": None}) if self.field == SQUAD and path.suffix != ".json" else self


def _is_squads_own(path: Path) -> bool:
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return b'"paragraphs"' in file.read(4096)


class Recipe(lengths.Padded):
    """Adds settings of transformers' run_qa.py under its names, but `max_length` for its max_seq_length.

    A text too long for one window is cut into several. Where `version_2_with_negative` (SQuAD 2.0) is not set, the
    training rows decide.
    """

    data: Data
    doc_stride: int = Field(default=128, ge=0)
    """The tokens that neighbouring windows of a long text share."""
    max_answer_length: int = Field(default=30, ge=1)
    """The most tokens of an answer."""
    n_best_size: int = Field(default=20, ge=1)
    """How many answers are compared."""
    version_2_with_negative: bool | None = None
    """true where questions may have no answer."""
    null_score_diff_threshold: float = 0.0
    """How much likelier "no answer" has to be than the best answer."""


class QuestionAnswering(TextTask[Recipe]):
    """Learns the piece of a text that answers a question."""

    truth = ("answers",)
    optional = ("id",)
    architectures = ("ForQuestionAnswering",)
    shape = "encoder"
    outputs = ("start_logits", "end_logits")
    longest_default = 384
    """As many as transformers' run_qa.py has."""
    measured: metrics.Metrics | None

    @property
    def stride(self) -> int:
        """The tokens that windows share: a third of one, as 128 are of 384, where the file's stride is too long.

        Raises UserError for one that was typed.
        """
        said, longest = self.recipe.doc_stride, self.longest
        if said >= longest and "doc_stride" in self.recipe._typed:
            raise UserError(f"doc_stride is {said}; allowed: less than a window's {longest} tokens")
        return said if said < longest else longest // 3

    @staticmethod
    def keep(logits: Any, labels: Any) -> Any:
        """Keep start and end logits: the hidden states that models with a decoder return behind them fill memory."""
        return tuple(logits[:2])

    def tokenizer_of(self) -> Any:
        """Return the checkpoint's tokenizer, which must tell the place of each token in the text."""
        tokenizer = self.checkpoint.tokenizer()
        if not getattr(tokenizer, "is_fast", False):
            told = "its tokenizer gives no character offsets; allowed: one with a tokenizer.json"
            raise UserError(f"model {self.checkpoint.name}: {told}")
        return tokenizer

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe = self.recipe
        for split in SPLITS:
            refuse_other_than_squads(rows[split])
        negative = _negative(recipe, rows)
        self.negative = negative.value
        own = ["squad_v2", "squad"] if negative.value else ["squad"]
        measured = self.measured = metrics.load(choose(recipe.metrics or own[:1], own, recipe.task).names)
        self.begin(self.checkpoint.config())
        found = {split: self._windows(rows[split]) for split in SPLITS}
        counts = {split: tokens.counts(found[split]) for split in found}
        questions = " + ".join(str(len(rows[split].dataset)) for split in SPLITS)
        shared = f"with {self.stride} tokens of overlap"
        told = f"of {questions} questions; a text too long for one goes on in the next, {shared}"
        shown = Choice(" + ".join(str(len(some)) for some in found.values()), told)
        self.choices |= {"windows": shown, "questions_without_answer": negative}
        if buckets.KEY not in recipe.training:
            # Measured on XQuAD with two seeds: after 3 epochs F1 4.5 points below the stock Trainer's random batches.
            reason = "the questions of one text are of one length: batches of one length would be batches of one text"
            self.choices["sampling"] = Choice(buckets.RANDOM, reason)
        grouped = False if "sampling" in self.choices else None
        self.length = lengths.decide(recipe, counts, self.longest, grouped=grouped)
        self.finish()
        validation = rows["validation"]
        return self.made(
            splits={split: found[split].select_columns([*self._read(), *PLACES]) for split in SPLITS},
            metrics=measured,
            compute_metrics=lambda evaluated: self._score(
                validation, [one.text for one in self._answers(validation, found["validation"], evaluated.predictions)]
            ),
            baseline=self._baseline(validation),
            token_counts=counts["train"],
            predicted=(validation, found["validation"]),
            figures=pictures.answers,
        )

    def recall(self, config: Any, chosen: Mapping[str, Any]) -> None:
        self.measured = None
        self.negative = bool(chosen.get("questions_without_answer", self.recipe.version_2_with_negative))

    def inputs(self, rows: Rows) -> Dataset:
        tokens.refuse_other_than_text(rows, ["context", "question"])
        return self._windows(rows)

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        """Yield each question and its answer, beside the truth where it is known."""
        known = self.measured is not None
        # The loss that `predict` computes wants the answers' places, where they are known.
        logits = trainer.predict(inputs.select_columns([*self._read(), *(PLACES if known else ())])).predictions
        truths = _truths(rows) if known else []
        for number, predicted in enumerate(self._answers(rows, inputs, logits)):
            row = rows.dataset[number]
            judged: dict[str, Any] = {}
            if known:
                text, right = predicted.text, truths[number]
                judged = {"truth": " | ".join(dict.fromkeys(right)), "exact_match": exact_match(text, right)}
                judged["f1"] = round(f1(text, right), 4)
            yield {
                "id": str(row.get("id", rows.number(number))),
                "question": row["question"],
                "prediction": predicted.text,
                **judged,
                "probability": round(predicted.probability, 4),
                "start": predicted.start,
                **({"null_score_diff": round(predicted.null_margin, 4)} if self.negative else {}),
            }

    def _answers(self, rows: Rows, features: Any, logits: Sequence[Any]) -> Iterator[windows.Answer]:
        """Yield the answer to each question from its windows' `logits`: start and end, each (windows, width)."""
        contexts, recipe = rows.dataset["context"][:], self.recipe
        places = features.select_columns(["row", "starts", "ends", "null"]).with_format("numpy")
        found = (
            (int(place["row"]), windows.Window(start, end, place["starts"], place["ends"], int(place["null"])))
            for place, start, end in zip(places, *logits, strict=True)
        )
        how: dict[str, Any] = {"count": recipe.n_best_size, "longest": recipe.max_answer_length}
        how |= {"nothing": self.negative, "threshold": recipe.null_score_diff_threshold}
        for row, pieces in itertools.groupby(found, key=lambda pair: pair[0]):
            yield windows.answer(contexts[row], (window for _, window in pieces), **how)

    def _score(self, rows: Rows, texts: Sequence[str]) -> dict[str, float]:
        """Return the metrics of the texts that answer every question."""
        assert self.measured is not None
        # Numbered here: ids in a user's rows may repeat.
        predictions = [{"id": str(number), "prediction_text": text} for number, text in enumerate(texts)]
        # The metrics compare texts alone, but their interface, which is evaluate's, has places too.
        truths = [{"text": right, "answer_start": [0] * len(right)} for right in _truths(rows)]
        references = [{"id": str(number), "answers": truth} for number, truth in enumerate(truths)]
        return self.measured.compute(predictions, references)

    def _baseline(self, rows: Rows) -> metrics.Baseline:
        """Return the score of the text's first sentence, or of no answer where that is allowed."""
        contexts = rows.dataset["context"][:]
        what, texts = "always answers that there is no answer", [""] * len(contexts)
        if not self.negative:
            what = "always answers with the first sentence of the text"
            texts = [context.partition(". ")[0] for context in contexts]
        return metrics.Baseline(what, self._score(rows, texts))

    def _read(self) -> list[str]:
        """Return the tokenizer's columns."""
        return list(self.tokenizer("a", "b"))

    def _windows(self, rows: Rows) -> Dataset:
        """Return a row for each window of at most `longest` tokens, question included, those of a question in a row.

        They have the columns that the model reads, PLACES, and for the answers `row` (the question's
        number), `starts` and `ends` (the characters of each token in the text, NOWHERE outside) and `null`, the token
        that says "no answer here". Rows without answers are taken for unanswered ones.

        Raises UserError for a row without a text, an answer that is not where it should be, a question too long.
        """
        lists, numbers = (*self._read(), "starts", "ends"), (*PLACES, "row", "null")
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
        columns: dict[str, list[Any]] = {name: [] for name in ("starts", "ends", "null", "row", *PLACES)}
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

    @staticmethod
    def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Return questions about short generated texts; some have no answer where the recipe allows that."""
        rows: list[dict[str, Any]] = []
        for person, place, thing in itertools.product(
            ("Ada", "Kofi", "Mina", "Ravi"), ("Lagos", "Oslo", "Lima", "Kyoto"), ("kite", "drum", "map")
        ):
            text = f"{person} lives in {place}. {person} bought a {thing} there. The {thing} was old."
            truth = {"text": [place], "answer_start": [text.index(place)]}
            if recipe.version_2_with_negative and thing == "map":
                truth = {"text": [], "answer_start": []}
            question = f"Where does {person} live?" if truth["text"] else f"Who sold the {thing}?"
            values = {"context": text, "question": question, "answers": truth, "id": f"q{len(rows) + 1}"}
            rows.append(synthetic.named(recipe, values))
        return {"train": rows[:32], "validation": rows[32:]}


def refuse_other_than_squads(rows: Rows) -> None:
    """Raise UserError where questions or texts are no text, or answers do not have SQuAD's form."""
    tokens.refuse_other_than_text(rows, ["context", "question"])
    kind = rows.dataset.features["answers"]
    inside = getattr(kind, "feature", kind)
    texts = inside.get("text") if isinstance(inside, dict) and "answer_start" in inside else None
    if getattr(getattr(texts, "feature", texts), "dtype", None) not in (*tokens.TEXT, "null"):
        allowed = 'SQuAD\'s {"text": [...], "answer_start": [...]} or a list of {"text", "answer_start"}'
        raise UserError(f"{rows.where}: data.columns.answers names a column of {kind}; allowed: {allowed}")


def _truths(rows: Rows) -> list[list[str]]:
    """Return each question's answers, in the order of the rows."""
    return [_both(value)[0] for value in rows.dataset["answers"]]


def _both(value: Any) -> tuple[list[str], list[int]]:
    """Return texts and positions from SQuAD's forms: a dict of lists, a list of dicts, or a dict; empty where None."""
    if isinstance(value, dict) and isinstance(value["text"], str):
        value = [value]
    if isinstance(value, dict):
        return list(value["text"] or ()), list(value["answer_start"] or ())
    return [one["text"] for one in value or ()], [one["answer_start"] for one in value or ()]


def _first_answer(rows: Rows, context: str, value: Any, index: int) -> tuple[int, int] | None:
    """Return the characters of the first answer, without blanks at its ends; None for none.

    Raises UserError for an empty answer, and where the text at its place differs.
    """
    texts, starts = _both(value)
    if len(texts) != len(starts):
        told = f"has {counted(len(texts), 'answer')} and {len(starts)} in answer_start"
        raise UserError(f"{rows.place(index)} {told}; allowed: a place for each")
    if not texts:
        return None
    start, text = starts[0], texts[0]
    if not (text or "").strip():
        allowed = "allowed: a text, or an empty list where there is none"
        raise UserError(f"{rows.place(index)} has an empty answer; {allowed}")
    there = context[start : start + len(text)] if isinstance(start, int) and start >= 0 else ""
    if there != text:
        told = f"the text at answer_start {start} is '{brief(there)}', not '{brief(text)}'"
        raise UserError(f"{rows.place(index)}: {told}; allowed: the answer's place, in characters from 0")
    start += len(text) - len(text.lstrip())
    return start, start + len(text.strip())


def _negative(recipe: Recipe, rows: Mapping[str, Rows]) -> Choice[bool]:
    """Whether a question may have no answer."""
    empty = {split: [at for at, texts in enumerate(_truths(rows[split])) if not texts] for split in SPLITS}
    if recipe.version_2_with_negative is None:
        some = len(empty["train"])
        return Choice(bool(some), f"{some} of {len(rows['train'].dataset)} training rows have no answer")
    for split, numbers in empty.items():
        if numbers and not recipe.version_2_with_negative:
            place = rows[split].place(numbers[0])
            raise UserError(f"{place} has no answer; next: version_2_with_negative=true")
    return Choice(recipe.version_2_with_negative, "version_2_with_negative in the recipe")
