"""Question answering: for a question and a text, the piece of the text that answers it, or none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data.load import SPLITS, Rows
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.text import buckets, lengths, spans, tokens, windows
from hf_mps.finetune.text.spans import Answer, Window
from hf_mps.finetune.text.windows import QAWindowing
from hf_mps.metrics.selection import choose
from hf_mps.metrics.squad import exact_match, f1

AUTO_CLASS = "AutoModelForQuestionAnswering"
TRUTH = ("answers",)
OPTIONAL = ("id",)
SQUAD = "data.paragraphs.qas"
"""Where the questions stand in a file of SQuAD's own format."""
LONGEST = 384
"""Tokens of a window where the recipe does not say: transformers' run_qa.py has as many."""


class Columns(schema.Columns):
    """The columns of the data by their roles; `answers` holds SQuAD's text and answer_start, `id` may be left out."""

    context: str = "context"
    question: str = "question"
    answers: str = "answers"
    id: str | None = None


class Data(schema.Data):
    """Adds the columns. Of held-out rows, all questions about one text stand on the same side."""

    KEPT_TOGETHER: ClassVar[str | None] = "context"
    columns: Columns = Columns()

    @model_validator(mode="before")
    @classmethod
    def _squads_own(cls, values: Any) -> Any:
        """Know a file in SQuAD's own format, questions within paragraphs within articles, by its beginning."""
        files = values.get("files") if isinstance(values, dict) else None
        if not isinstance(files, dict) or values.get("field") is not None:
            return values
        nested = any(isinstance(name, str) and _is_squad(Path(name).expanduser()) for name in files.values())
        return {**values, "field": SQUAD} if nested else values


class Recipe(lengths.Padded):
    """Adds settings of transformers' run_qa.py under its names, but `max_length` for its max_seq_length.

    A text too long for one window is cut into several that share `doc_stride` tokens. `version_2_with_negative` allows
    questions without an answer (SQuAD 2.0); without it the training rows decide. `null_score_diff_threshold`: by how
    much the score of no answer must exceed the best answer's.
    """

    task: Literal["question-answering"]
    data: Data
    doc_stride: int = Field(default=128, ge=0)
    max_answer_length: int = Field(default=30, ge=1)
    n_best_size: int = Field(default=20, ge=1)
    version_2_with_negative: bool | None = None
    null_score_diff_threshold: float = 0.0

    def stride_of(self, longest: int) -> int:
        """Return the tokens that windows share: a third of one, as 128 are of 384, where the file's stride is too long.

        Raises UserError for one that was typed.
        """
        if self.doc_stride >= longest and "doc_stride" in self._typed:
            raise UserError(f"doc_stride is {self.doc_stride}; allowed: less than a window's {longest} tokens")
        return self.doc_stride if self.doc_stride < longest else longest // 3


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make windows, model, collator and metrics from the rows of both splits.

    Raises UserError for answers, lengths or a checkpoint that cannot be used.
    """
    import transformers

    windows.check({split: rows[split] for split in ("train", "validation")})
    negative = _negative(recipe, rows)
    own = ["squad_v2", "squad"] if negative.value else ["squad"]
    measured = metrics.load(choose(recipe.metrics or own[:1], own, recipe.task).names)
    tokenizer, config = checkpoint.tokenizer(), checkpoint.config()
    windows.refuse_slow(tokenizer, checkpoint.name)
    longest = lengths.limit(recipe, tokenizer, config, default=LONGEST)
    lent = tokens.set_pad_token(tokenizer, config)
    stride = recipe.stride_of(longest)
    cut = QAWindowing(tokenizer, tokens.digest(tokenizer), longest, stride, negative.value)
    windows_by_split = {split: cut.windows(rows[split]) for split in ("train", "validation")}
    counts = {split: tokens.counts(windows_by_split[split]) for split in windows_by_split}
    drawn = _sampling(recipe)
    length = lengths.decide(
        recipe, counts["train"], longest, others=counts["validation"], grouped=False if drawn else None
    )
    choices: dict[str, Choice[Any]] = {
        "lengths": length,
        "windows": windows.summary(windows_by_split, rows, stride),
        "questions_without_answer": negative,
        **drawn,
        **lent,
    }
    model, choices["model"] = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)
    evaluator = QAEvaluator(recipe, rows["validation"], windows_by_split["validation"], measured, negative.value)
    return Prepared(
        splits={split: windows_by_split[split].select_columns(cut.columns) for split in SPLITS},
        model=model,
        processing_class=tokenizer,
        collator=length.value.collator(transformers.DataCollatorWithPadding(tokenizer), tokenizer),
        metrics=measured,
        compute_metrics=lambda evaluated: evaluator.score(evaluator.answers(evaluated.predictions)),
        baseline=evaluator.baseline(),
        auto_class=AUTO_CLASS,
        pipeline_tag="question-answering",
        choices=choices,
        trainer_settings={"preprocess_logits_for_metrics": _two_logits},
        token_counts=counts["train"],
        predict=lambda trainer: evaluator.rows(evaluator.answers(trainer.predict(trainer.eval_dataset).predictions)),
        figures=pictures.answers,
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved model answers questions. Raises UserError for a tokenizer or checkpoint that cannot be
    used.
    """
    import transformers

    tokenizer, config = checkpoint.tokenizer(), checkpoint.config()
    windows.refuse_slow(tokenizer, checkpoint.name)
    content = tokens.digest(tokenizer)
    length = lengths.kept(recipe, chosen, tokenizer, config)
    lent = tokens.set_pad_token(tokenizer, config)
    negative = bool(chosen.get("questions_without_answer", recipe.version_2_with_negative))
    cut = QAWindowing(tokenizer, content, length.value.longest, recipe.stride_of(length.value.longest), negative)
    model, weights = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)

    def answers(trainer: Any, rows: Rows) -> Iterator[dict[str, Any]]:
        windows.check_texts(rows)
        found = cut.windows(rows)
        evaluator = QAEvaluator(recipe, rows, found, None, negative)
        return evaluator.rows(evaluator.answers(trainer.predict(found.select_columns(cut.inputs)).predictions))

    return Answering(
        model=model,
        processing_class=tokenizer,
        collator=length.value.collator(transformers.DataCollatorWithPadding(tokenizer), tokenizer),
        answers=answers,
        choices={"model": weights, "lengths": length, **lent},
        trainer_settings={"preprocess_logits_for_metrics": _two_logits},
    )


def _sampling(recipe: Recipe) -> dict[str, Choice[str]]:
    """Return random batches, unless the recipe says how they are drawn."""
    if buckets.KEY in recipe.training:
        return {}
    # Measured on XQuAD with two seeds: after 3 epochs F1 4.5 points below the stock Trainer's random batches.
    reason = "the questions of one text are of one length: batches of one length would be batches of one text"
    return {"sampling": Choice(buckets.RANDOM, reason)}


def smoke_rows(recipe: Recipe, folder: Any) -> dict[str, list[dict[str, Any]]]:
    """Return questions about short generated texts; some have no answer where the recipe allows that."""
    named = recipe.data.columns
    rows = []
    for person, place, thing in itertools.product(
        ("Ada", "Kofi", "Mina", "Ravi"), ("Lagos", "Oslo", "Lima", "Kyoto"), ("kite", "drum", "map")
    ):
        text = f"{person} lives in {place}. {person} bought a {thing} there. The {thing} was old."
        truth = {"text": [place], "answer_start": [text.index(place)]}
        if recipe.version_2_with_negative and thing == "map":
            truth = {"text": [], "answer_start": []}
        question = f"Where does {person} live?" if truth["text"] else f"Who sold the {thing}?"
        rows.append({named.context: text, named.question: question, named.answers: truth})
        if named.id:
            rows[-1][named.id] = f"q{len(rows)}"
    return {"train": rows[:32], "validation": rows[32:]}


def _is_squad(path: Path) -> bool:
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return b'"paragraphs"' in file.read(4096)


def _negative(recipe: Recipe, rows: Mapping[str, Rows]) -> Choice[bool]:
    """Whether a question may have no answer."""
    empty = {split: windows.unanswered(rows[split]) for split in ("train", "validation")}
    if recipe.version_2_with_negative is None:
        some = len(empty["train"])
        return Choice(bool(some), f"{some} of {len(rows['train'].dataset)} training rows have no answer")
    if not recipe.version_2_with_negative:
        windows.refuse_unanswered(rows, empty)
    return Choice(recipe.version_2_with_negative, "version_2_with_negative in the recipe")


def _two_logits(logits: Any, labels: Any) -> Any:
    """Keep start and end logits alone: models with a decoder return hidden states behind them, which would fill
    memory.
    """
    return tuple(logits[:2])


def _judged(text: str, truths: list[str]) -> dict[str, Any]:
    return {
        "truth": " | ".join(dict.fromkeys(truths)),
        "exact_match": exact_match(text, truths),
        "f1": round(f1(text, truths), 4),
    }


class QAEvaluator:
    """Answers questions from the logits of their windows, and scores the answers where they are `measured`."""

    def __init__(
        self, recipe: Recipe, rows: Rows, features: Any, measured: metrics.Metrics | None, negative: bool
    ) -> None:
        self._recipe = recipe
        self._measured = measured
        self._negative = negative
        self._contexts: list[str] = rows.dataset["context"][:]
        self._questions: list[str] = rows.dataset["question"][:]
        self._truths = windows.truths(rows) if measured is not None else []
        has_ids = "id" in rows.dataset.column_names
        count = len(self._contexts)
        self._ids = (
            [str(value) for value in rows.dataset["id"]] if has_ids else [str(rows.number(n)) for n in range(count)]
        )
        self._places = features.select_columns(["row", "starts", "ends", "null"]).with_format("numpy")

    def answers(self, logits: Sequence[Any]) -> list[Answer]:
        """Return the answer to each question; `logits` are start and end, each of shape (windows, width)."""
        return [
            spans.answer(
                self._contexts[row],
                (window for _, window in pieces),
                count=self._recipe.n_best_size,
                longest=self._recipe.max_answer_length,
                nothing=self._negative,
                threshold=self._recipe.null_score_diff_threshold,
            )
            for row, pieces in itertools.groupby(self._windows(logits), key=lambda pair: pair[0])
        ]

    def _windows(self, logits: Sequence[Any]) -> Iterator[tuple[int, Window]]:
        for place, start, end in zip(self._places, *logits, strict=True):
            yield int(place["row"]), Window(start, end, place["starts"], place["ends"], int(place["null"]))

    def score(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Return the metrics of an answer to every question."""
        return self._score([given.text for given in answers])

    def _score(self, texts: Sequence[str]) -> dict[str, float]:
        assert self._measured is not None
        # Numbered here: ids in a user's rows may repeat.
        predictions = [{"id": str(number), "prediction_text": text} for number, text in enumerate(texts)]
        references = [
            {"id": str(number), "answers": {"text": truths, "answer_start": [0] * len(truths)}}
            for number, truths in enumerate(self._truths)
        ]
        return self._measured.compute(predictions, references)

    def baseline(self) -> metrics.Baseline:
        """Return the score of the text's first sentence, or of no answer where that is allowed."""
        if self._negative:
            return metrics.Baseline("always answers that there is no answer", self._score([""] * len(self._truths)))
        firsts = [context.partition(". ")[0] for context in self._contexts]
        return metrics.Baseline("always answers with the first sentence of the text", self._score(firsts))

    def rows(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        """Yield the rows of predictions.csv, without the truth where nothing is measured."""
        for number, predicted in enumerate(answers):
            yield {
                "id": self._ids[number],
                "question": self._questions[number],
                "prediction": predicted.text,
                **(_judged(predicted.text, self._truths[number]) if self._measured is not None else {}),
                "probability": round(predicted.probability, 4),
                "start": predicted.start,
                **({"null_score_diff": round(predicted.null_margin, 4)} if self._negative else {}),
            }
