"""Question answering: for a question and a text, the piece of the text that answers it, or none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import SPLITS, Rows
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks import Dataset, Prepared
from hf_mps.finetune.tasks._text import TextTask
from hf_mps.finetune.text import buckets, lengths, tokens, windows
from hf_mps.metrics.selection import choose
from hf_mps.metrics.squad import exact_match, f1

SQUAD = "data.paragraphs.qas"
"""The path to the questions in a file of SQuAD's own format."""


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

    @model_validator(mode="before")
    @classmethod
    def _squads_own(cls, values: Any) -> Any:
        """Know a file in SQuAD's own format, questions within paragraphs within articles, by its beginning."""
        files = values.get("files") if isinstance(values, dict) else None
        if not isinstance(files, dict) or values.get("field") is not None:
            return values
        for path in [Path(name).expanduser() for name in files.values() if isinstance(name, str)]:
            if path.suffix == ".json" and path.is_file():
                with path.open("rb") as file:
                    if b'"paragraphs"' in file.read(4096):
                        return {**values, "field": SQUAD}
        return values


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

    def stride_of(self, longest: int) -> int:
        """Return the tokens that windows share: a third of one, as 128 are of 384, where the file's stride is too long.

        Raises UserError for one that was typed.
        """
        if self.doc_stride >= longest and "doc_stride" in self._typed:
            raise UserError(f"doc_stride is {self.doc_stride}; allowed: less than a window's {longest} tokens")
        return self.doc_stride if self.doc_stride < longest else longest // 3


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
            windows.refuse_other_than_squads(rows[split])
        negative = _negative(recipe, rows)
        self.negative = negative.value
        own = ["squad_v2", "squad"] if negative.value else ["squad"]
        measured = self.measured = metrics.load(choose(recipe.metrics or own[:1], own, recipe.task).names)
        self.begin(self.checkpoint.config())
        cut = self._windowing()
        found = {split: cut.windows(rows[split]) for split in SPLITS}
        counts = {split: tokens.counts(found[split]) for split in found}
        self.choices |= {"windows": windows.summary(found, rows, cut.stride), "questions_without_answer": negative}
        if buckets.KEY not in recipe.training:
            # Measured on XQuAD with two seeds: after 3 epochs F1 4.5 points below the stock Trainer's random batches.
            reason = "the questions of one text are of one length: batches of one length would be batches of one text"
            self.choices["sampling"] = Choice(buckets.RANDOM, reason)
        grouped = False if "sampling" in self.choices else None
        self.length = lengths.decide(recipe, counts, self.longest, grouped=grouped)
        self.finish()
        validation = rows["validation"]
        return self.made(
            splits={split: found[split].select_columns(cut.columns) for split in SPLITS},
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
        return self._windowing().windows(rows)

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        """Yield each question and its answer, beside the truth where it is known."""
        cut, known = self._windowing(), self.measured is not None
        # The loss that `predict` computes wants the answers' places, where they are known.
        logits = trainer.predict(inputs.select_columns(cut.columns if known else cut.inputs)).predictions
        truths = windows.truths(rows) if known else []
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
        truths = [{"text": right, "answer_start": [0] * len(right)} for right in windows.truths(rows)]
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

    def _windowing(self) -> windows.QAWindowing:
        stride = self.recipe.stride_of(self.longest)
        return windows.QAWindowing(self.tokenizer, self.content, self.longest, stride, self.negative)

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


def _negative(recipe: Recipe, rows: Mapping[str, Rows]) -> Choice[bool]:
    """Whether a question may have no answer."""
    empty = {split: [at for at, texts in enumerate(windows.truths(rows[split])) if not texts] for split in SPLITS}
    if recipe.version_2_with_negative is None:
        some = len(empty["train"])
        return Choice(bool(some), f"{some} of {len(rows['train'].dataset)} training rows have no answer")
    for split, numbers in empty.items():
        if numbers and not recipe.version_2_with_negative:
            place = rows[split].place(numbers[0])
            raise UserError(f"{place} has no answer; allowed with version_2_with_negative=true")
    return Choice(recipe.version_2_with_negative, "version_2_with_negative in the recipe")
