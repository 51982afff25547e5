"""Taggers by what a word has, one tag or several labels: targets, loss, metrics and the rows of predictions.csv."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import label_sets, labels
from hf_mps.finetune.models import classification, multi_label
from hf_mps.finetune.text import word_labels, word_sets
from hf_mps.finetune.text.padding import IGNORED
from hf_mps.finetune.text.word_labels import Tags
from hf_mps.finetune.text.word_sets import WordSets
from hf_mps.metrics.sets import SetMetrics, of_sets
from hf_mps.metrics.tagged import TagMetrics, of_tags

if TYPE_CHECKING:
    import torch
    from datasets import Dataset

    from hf_mps.finetune.data.load import Rows
    from hf_mps.metrics import Baseline

ONE = """from transformers import pipeline

tagger = pipeline("token-classification", model=".", aggregation_strategy="simple")
print(tagger("Ada Lovelace lived in London."))"""
# The pipeline takes the softmax over the labels, as of one tag a word.
SEVERAL = """from transformers import AutoModelForTokenClassification, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("."), AutoModelForTokenClassification.from_pretrained(".")
inputs = tokenizer("Ada Lovelace lived in London.", return_tensors="pt")
for token, shares in zip(inputs.tokens(), model(**inputs).logits[0].sigmoid().tolist()):
    print(token, [model.config.id2label[at] for at, share in enumerate(shares) if share >= {threshold:g}])"""
Line = dict[str, Any]


class Tagging(Protocol):
    """What a tagger's words have, and all that depends on it."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tags or labels in the order of their ids."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Plain values that tell the targets of the same rows apart from others."""

    @property
    def problem_type(self) -> str | None:
        """transformers' name for the problem, where the saved configuration needs one."""

    @property
    def feature(self) -> Any:
        """The type of one token's target, as datasets has it."""

    @property
    def snippet(self) -> str | None:
        """Lines of Python that load the saved model and tag a sentence."""

    @property
    def loss(self) -> Callable[..., Any] | None:
        """Trainer's `compute_loss_func`; None where the model's own loss is meant."""

    def kept(self, logits: Any, labels: Any) -> Any:
        """Trainer's `preprocess_logits_for_metrics`: what is kept of a batch's logits for `measured` and `answered`."""

    def targets(self, rows: Rows) -> Callable[[Sequence[int | None], Sequence[Any]], list[Any]]:
        """Return what makes each token's target, of the numbers of the tokens' words and the words' tags in a row."""

    def collator(self, inner: Any, tokenizer: Any) -> Any:
        """Return what pads the targets beside the rows that `inner` pads."""

    def measures(self, asked: Sequence[str] | None, task: str) -> Any:
        """Return the metrics that the recipe asks for, or those that suit. Raises UserError."""

    def measured(self, evaluated: Any, metrics: Any) -> dict[str, float]:
        """Return the metrics of an evaluation."""

    def baseline(self, metrics: Any, features: Mapping[str, Dataset]) -> Baseline:
        """Return the score of one constant answer to each word of the validation rows."""

    def choices(self, train: Dataset | None = None) -> dict[str, Choice[Any]]:
        """Return the tags in words and what to look at, for a header; `train` has the training rows' targets."""

    def answered(self, evaluated: Any, every: bool = False) -> Iterator[list[Line]]:
        """Yield each row's answers, one for each word that has a token.

        With `every` the probabilities of all tags come by their names, where `whole` is what was kept.
        """

    def whole(self, logits: Any, labels: Any) -> Any:
        """Keep as `kept` does, and the logits."""

    def truth(self, rows: Rows) -> Callable[[Any], Any]:
        """Return what names the tags of a word, of what the column of `rows` holds for it."""

    def figures(self, predicted: Sequence[Mapping[str, Any]]) -> Mapping[str, bytes]:
        """Return pictures of the rows of predictions.csv."""


@dataclass(frozen=True)
class OneTag:
    """Each word has one tag."""

    tags: Tags
    problem_type: str | None = None
    loss: Callable[..., Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.tags.names

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.tags.names, self.tags.keys)

    @property
    def feature(self) -> Any:
        from datasets import Value

        return Value("int64")

    @property
    def snippet(self) -> str | None:
        return ONE if self.tags.chunked else None

    def kept(self, logits: Any, labels: Any) -> tuple[Any, Any]:
        """Return the tags' ids and probabilities, each of shape (rows, tokens); the logits would fill memory."""
        return self.whole(logits, labels)[:2]

    def whole(self, logits: Any, labels: Any) -> tuple[Any, Any, Any]:
        """Return the same, and the probabilities of all tags, (rows, tokens, tags)."""
        every = _logits(logits).softmax(-1)
        shares, ids = every.max(-1)
        return ids, shares, every

    def targets(self, rows: Rows) -> Callable[[Sequence[int | None], Sequence[Any]], list[Any]]:
        return lambda word_ids, raw: word_labels.align(word_ids, self.tags.ids(raw))

    def collator(self, inner: Any, tokenizer: Any) -> Any:
        return inner

    def measures(self, asked: Sequence[str] | None, task: str) -> TagMetrics:
        return of_tags(asked, self.names, task)

    def measured(self, evaluated: Any, metrics: TagMetrics) -> dict[str, float]:
        ids, _ = evaluated.predictions
        kept = evaluated.label_ids != IGNORED
        answers, truths = (
            [[self.names[tag] for tag in row[mask]] for row, mask in zip(table, kept, strict=True)]
            for table in (ids, evaluated.label_ids)
        )
        return metrics.compute(answers, truths)

    def baseline(self, metrics: TagMetrics, features: Mapping[str, Dataset]) -> Baseline:
        truths = {
            split: [[self.names[tag] for tag in row if tag != IGNORED] for row in features[split]["labels"]]
            for split in ("train", "validation")
        }
        return metrics.baseline(truths["validation"], truths["train"])

    def choices(self, train: Dataset | None = None) -> dict[str, Choice[Any]]:
        doubts = labels.doubted("tags", labels.doubts(self.names)) if train is not None else {}
        return {"tags": word_labels.described(self.tags), **doubts}

    def answered(self, evaluated: Any, every: bool = False) -> Iterator[list[Line]]:
        for at, truths in enumerate(evaluated.label_ids):
            ids, shares, *whole = (table[at][truths != IGNORED] for table in evaluated.predictions)
            lines: list[Line] = [
                {"prediction": self.names[tag], "probability": round(float(share), 4)}
                for tag, share in zip(ids, shares, strict=True)
            ]
            if every:
                lines = [
                    line | classification.by_name(one, self.names) for line, one in zip(lines, whole[0], strict=True)
                ]
            yield lines

    def truth(self, rows: Rows) -> Callable[[Any], Any]:
        return lambda raw: self.names[self.tags.keys[labels.key(raw)]]

    def figures(self, predicted: Sequence[Mapping[str, Any]]) -> Mapping[str, bytes]:
        from hf_mps.finetune.report import classes

        return classes.confusion(_pairs(predicted), self.names, of="words")


@dataclass(frozen=True)
class SeveralLabels:
    """Each word has any number of labels, or none; one is answered from the probability `least` on."""

    found: WordSets
    least: Choice[float]
    problem_type: str | None = label_sets.PROBLEM

    @property
    def names(self) -> tuple[str, ...]:
        return self.found.names

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.found.names, self.found.sets.keys, self.found.classes, self.found.separator)

    @property
    def feature(self) -> Any:
        from datasets import List, Value

        return List(Value("int8"))

    @property
    def snippet(self) -> str | None:
        return SEVERAL.format(threshold=self.least.value)

    @property
    def loss(self) -> Callable[..., Any] | None:
        return over_words

    def kept(self, logits: Any, labels: Any) -> Any:
        return _logits(logits)

    def whole(self, logits: Any, labels: Any) -> Any:
        return _logits(logits)

    def targets(self, rows: Rows) -> Callable[[Sequence[int | None], Sequence[Any]], list[Any]]:
        read, ignored = self.found.reader(rows), [IGNORED] * len(self.names)
        return lambda word_ids, raw: word_labels.align(word_ids, [self.found.encode(read(one)) for one in raw], ignored)

    def collator(self, inner: Any, tokenizer: Any) -> Any:
        return word_sets.Collator(inner, len(self.names), tokenizer.padding_side)

    def measures(self, asked: Sequence[str] | None, task: str) -> SetMetrics:
        return of_sets(asked, task, of="word", each=self.names)

    def measured(self, evaluated: Any, metrics: SetMetrics) -> dict[str, float]:
        kept = evaluated.label_ids[..., 0] != IGNORED
        answers = multi_label.answers(evaluated.predictions[kept], self.least.value)
        return metrics.compute(answers, evaluated.label_ids[kept])

    def baseline(self, metrics: SetMetrics, features: Mapping[str, Dataset]) -> Baseline:
        truths, seen = (self._table(features[split]) for split in ("validation", "train"))
        return metrics.baseline(truths, train=seen, names=self.names)

    def choices(self, train: Dataset | None = None) -> dict[str, Choice[Any]]:
        table = self._table(train) if train is not None else None
        return {**word_sets.described(self.found, table), "threshold": self.least}

    def answered(self, evaluated: Any, every: bool = False) -> Iterator[list[Line]]:
        for logits, truths in zip(evaluated.predictions, evaluated.label_ids, strict=True):
            known = logits[_first(truths) != IGNORED]
            yield multi_label.rows([{}] * len(known), None, known, self.found.sets, self.least.value, every=every)

    def truth(self, rows: Rows) -> Callable[[Any], Any]:
        read = self.found.reader(rows)
        order = {name: at for at, name in enumerate(self.names)}
        return lambda raw: sorted({self.names[self.found.sets.keys[one]] for one in read(raw)}, key=order.__getitem__)

    def figures(self, predicted: Sequence[Mapping[str, Any]]) -> Mapping[str, bytes]:
        from hf_mps.finetune.report import classes

        return classes.by_label(_pairs(predicted), self.names, of="words")

    def _table(self, features: Dataset) -> Any:
        """Return the labels of all words that have a token, (words, labels) of 0 and 1, in the rows' order."""
        import numpy

        column = features.with_format("arrow")["labels"]
        chunks = column.chunks if hasattr(column, "chunks") else [column]
        flat = [chunk.flatten().flatten().to_numpy(zero_copy_only=False) for chunk in chunks]
        table = numpy.concatenate(flat).reshape(-1, len(self.names))
        return table[table[:, 0] != IGNORED]


def decide(recipe: Any, train: Rows, others: Iterable[Rows]) -> Tagging:
    """Return what the words of the rows have, by token-classification's `recipe`.

    Raises UserError for tags that cannot be used.
    """
    data = recipe.data
    if word_sets.asked(train, data.separator, recipe.problem_type):
        found = word_sets.decide(train, others, data.labels, data.separator)
        return SeveralLabels(found, multi_label.threshold(recipe.threshold))
    if recipe.threshold is not None:
        raise UserError("threshold is for words with several labels, and these have one each; leave it out")
    return OneTag(word_labels.decide(train, others, data.labels))


def kept(config: Any, least: float | None, chosen: Mapping[str, Any]) -> Tagging:
    """Return what the words of a saved model have; `chosen` are the values of its run's choices."""
    if (found := word_sets.kept(config)) is not None:
        return SeveralLabels(found, multi_label.threshold(least, chosen))
    return OneTag(word_labels.kept(config))


def over_words(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return the binary cross-entropy of labels of shape (rows, tokens, labels), the mean over those of the whole step.

    It is Trainer's `compute_loss_func`: transformers' token classifiers know no `problem_type`, and take one tag a
    token (transformers#15052). IGNORED ones are left out; without a number (an evaluation) it is the mean over the
    batch.
    """
    import torch

    logits = outputs["logits"].float()
    labels = labels.to(logits.device)
    ignored = labels == IGNORED
    each = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, labels.masked_fill(ignored, 0.0), reduction="none"
    )
    count = (~ignored).sum() if num_items_in_batch is None else num_items_in_batch
    return each.masked_fill(ignored, 0.0).sum() / count


def _logits(logits: Any) -> Any:
    """Return the logits alone in float32; some models return hidden states behind them."""
    return (logits[0] if isinstance(logits, tuple) else logits).float()


def _first(truths: Any) -> Any:
    """Return a row's first target of each token: (tokens,) of itself, or of shape (tokens, labels)."""
    return truths if truths.ndim == 1 else truths[..., 0]


def _pairs(predicted: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    return [(row["label"], row["prediction"]) for row in predicted if "prediction" in row]
