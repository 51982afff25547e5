"""What the tasks of embeddings take from sentence-transformers: model, collator, trainer, losses, and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy

from hf_mps.core import extras
from hf_mps.core.errors import UserError
from hf_mps.distributed.ranks import Ranks
from hf_mps.distributed.world import World
from hf_mps.finetune.models import trainer_mixins
from hf_mps.finetune.text.lengths import Lengths, PadToBucket, pad_values
from hf_mps.metrics import Baseline, Metrics
from hf_mps.metrics.selection import Chosen

if TYPE_CHECKING:
    from hf_mps.finetune.data.load import Rows

# Each role's column for sentence-transformers, which refuses a name that begins with another one's.
NAMES = {"text": "anchor", "text_pair": "positive", "negative": "negative"}
IDS = "_input_ids"
# The class that has the fields of all the library's training arguments; those of a kind of model add none.
ARGUMENTS = ("sentence_transformers/base/training_args.py", "BaseTrainingArguments")
SETTLED = {
    "train_sampling_strategy": "sentence-transformers draws its batches itself; training.batch_sampler says how",
    "label_smoothing_factor": "its losses know no classes; leave it out",
    "multi_dataset_batch_sampler": "a recipe has one data set; leave it out",
    "router_mapping": "a recipe trains one encoder for all texts; leave it out",
    "warmup_ratio": "it was removed in transformers 5; in its place: warmup_steps, of which a part of 1 is a share",
}
# Rows embedded at once, and rows compared with all candidates at once.
BATCH = 32
BLOCK = 1024
Span = tuple[float, float]
"""The scores of no similarity and of identity."""
WHOLE: Span = (0.0, 1.0)


def library(task: str) -> Any:
    """Return the module sentence_transformers. Raises UserError, with the command that installs it, where it is
    absent.
    """
    try:
        import sentence_transformers
        import sentence_transformers.cross_encoder.losses
        import sentence_transformers.sentence_transformer.losses  # version 6 has them there
        import sentence_transformers.sparse_encoder.losses
    except ImportError as error:
        raise UserError(f"{task} needs sentence-transformers 6; next: {extras.install('embeddings')}") from error
    return sentence_transformers


def collator(model: Any, length: Lengths, prompts: Any) -> Any:
    """Return sentence-transformers' collator, each column of its batches padded up to a length of the list."""
    from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

    tokenizer = model.tokenizer
    pad: Any = PadToBucket(lambda batch: batch, length.target, pad_values(tokenizer), tokenizer.padding_side)

    class Padded(SentenceTransformerDataCollator):  # type: ignore[misc]
        def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
            batch: dict[str, Any] = super().__call__(features)
            for prefix in [name.removesuffix("input_ids") for name in batch if name.endswith(IDS)]:
                column_batch = {name.removeprefix(prefix): batch[name] for name in batch if name.startswith(prefix)}
                batch |= {f"{prefix}{name}": value for name, value in pad(column_batch).items()}
            return batch

        def texts(self, texts: Sequence[str], column: str) -> dict[str, Any]:
            """Return the model's inputs for `texts` of one column."""
            given = self.prompts.get(column) if isinstance(self.prompts, dict) else self.prompts
            return dict(pad(self.preprocess_fn(list(texts), prompt=given)))

    return Padded(preprocess_fn=model.preprocess, prompts=prompts or {})


class LossParts(trainer_mixins.KeptInCheckpoints):
    """A part of sentence-transformers' trainers: a checkpoint has the sums of a loss's parts since the last log entry.

    SpladeLoss has three; most losses have none.
    """

    KEPT = "loss_parts_{}.pth"
    accum_loss_components: dict[str, dict[str, Any]]

    def _kept(self) -> dict[str, Any] | None:
        unlogged = self.accum_loss_components["train"]
        return unlogged if unlogged.get("steps") else None

    def _put_back(self, kept: dict[str, Any]) -> None:
        self.accum_loss_components["train"] = kept


def trainer(evaluator: Any, kind: str = "SentenceTransformerTrainer") -> type[Any]:
    """Return sentence-transformers' trainer class `kind` with an evaluation that adds what `evaluator` measures.

    It writes no model card: this project does.
    """
    import sentence_transformers

    stock: Any = getattr(sentence_transformers, kind)

    class Measuring(LossParts, stock):  # type: ignore[misc]
        def evaluation_loop(self, *arguments: Any, metric_key_prefix: str = "eval", **settings: Any) -> Any:
            with within_a_process(self.loss):
                output = super().evaluation_loop(*arguments, metric_key_prefix=metric_key_prefix, **settings)
            # Of a loss's parts the library takes a mean over batches, the last one and a process's repeats among them.
            self.accum_loss_components["eval"] = {}
            # The library's own way, an evaluator that the trainer is given, leaves an empty folder `eval` behind.
            measured = evaluator.measure(self.model)
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in measured.items()})
            return output

        def get_train_dataloader(self) -> Any:
            self._trains = True
            try:
                return super().get_train_dataloader()
            finally:
                self._trains = False

        def get_batch_sampler(self, dataset: Any, batch_size: int, *arguments: Any, **settings: Any) -> Any:
            # The library asks for the batches of an evaluation here too, and those are of one process.
            size = self.args.world_size if getattr(self, "_trains", False) else 1
            made = super().get_batch_sampler(dataset, batch_size * size, *arguments, **settings)
            return Parts(made, size) if size > 1 else made

        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            """Save on the main process: every process comes here, and sentence-transformers lets each write."""
            if self.args.should_save:
                super()._save(output_dir, state_dict)

        def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
            """Do nothing: the callback would ask the hub about model and data when the trainer is made."""

    return Measuring


def apart(*, model: Any, args: Any, **_: Any) -> Any:
    """Return the model and `args` in place of a trainer, where sentence-transformers' own would ask for a loss."""
    return SimpleNamespace(model=model, args=args)


class EmbeddingEvaluator:
    """Measures a model on the validation rows by the cosines of its embeddings."""

    SIMILARITY = "cosine"

    def __init__(self, rows: Rows, data: Any, measured: Metrics | Chosen, collator: Any) -> None:
        self._rows, self._collator = rows, collator
        self._measured: Any = measured
        self._texts: dict[str, list[str]] = {name: data[name][:] for name in data.column_names if name != "score"}
        self._scores: list[float] | None = data["score"][:] if "score" in data.column_names else None
        # The candidates: every right answer and every hard negative, each once.
        candidates = [*self._texts["positive"], *self._texts.get("negative", ())]
        self._corpus = {text: place for place, text in enumerate(dict.fromkeys(candidates))}

    def measure(self, model: Any) -> dict[str, float]:
        """Return the metrics of `model` on the validation rows."""
        return self._metrics(lambda texts, column: self._embedded(model, texts, column))

    def baseline(self) -> Baseline:
        """Return what the words that two texts share achieve."""
        from sklearn.feature_extraction.text import HashingVectorizer

        counts = HashingVectorizer(token_pattern=r"\w+", alternate_sign=False)
        words = self._metrics(lambda texts, column: counts.transform(texts))
        return Baseline("compares the counts of the texts' words", words)

    def rows(self, model: Any) -> Iterator[dict[str, Any]]:
        """Yield the rows of predictions.csv."""
        first, second = (self._embedded(model, self._texts[name], name) for name in ("anchor", "positive"))
        if self._scores is not None:
            known = [{"score": raw} for raw in self._rows.dataset["score"]]
        else:
            corpus = list(self._corpus)
            ranked = zip(*self._ranks(first, self._embedded(model, corpus, "positive")), strict=True)
            known = [{"rank": rank, "nearest": corpus[nearest]} for rank, nearest in ranked]
        for number, cosine in enumerate(products(first, second).tolist()):
            line = {role: self._texts[name][number] for role, name in NAMES.items() if name in self._texts}
            yield {**line, self.SIMILARITY: round(cosine, 4), **known[number]}

    def _metrics(self, embed: Callable[[list[str], str], Any]) -> dict[str, float]:
        """Return the metrics; `embed(texts, column)` gives unit vectors (texts, dimensions), dense or sparse."""
        first = embed(self._texts["anchor"], "anchor")
        if self._scores is not None:
            second = embed(self._texts["positive"], "positive")
            return dict(self._measured.compute(products(first, second), self._scores))
        ranks, _ = self._ranks(first, embed(list(self._corpus), "positive"))
        return dict(self._measured.compute(ranks, [1] * len(ranks)))

    def _ranks(self, queries: Any, corpus: Any) -> tuple[list[int], list[int]]:
        """Return the rank of each row's right answer among all candidates, from 1, and the number of the first-ranked
        one.
        """
        right = numpy.array([self._corpus[text] for text in self._texts["positive"]])
        ranks, nearest = list[int](), list[int]()
        for begin in range(0, len(right), BLOCK):
            cosines = queries[begin : begin + BLOCK] @ corpus.T
            cosines = cosines.toarray() if hasattr(cosines, "toarray") else cosines
            for line, text in enumerate(self._texts["anchor"][begin : begin + BLOCK]):
                itself = self._corpus.get(text)
                if itself is not None and itself != right[begin + line]:
                    cosines[line, itself] = -numpy.inf  # the query itself is no answer to it
            own = cosines[numpy.arange(len(cosines)), right[begin : begin + BLOCK]]
            # Not "above it": neither a NaN cosine nor one that all candidates have may rank first.
            ahead, alike = ~(cosines <= own[:, None]), cosines == own[:, None]
            ranks += (1 + ahead.sum(axis=1) + numpy.maximum(alike.sum(axis=1) - 1, 0)).tolist()
            nearest += cosines.argmax(axis=1).tolist()
        return ranks, nearest

    def _embedded(self, model: Any, texts: list[str], column: str) -> Any:
        return embedded(model, self._collator, texts, column)


def embedded(model: Any, collator: Any, texts: Sequence[str], column: str, at_once: int = BATCH) -> Any:
    """Return unit vectors, float32 of shape (texts, dimensions)."""
    import torch

    return numpy.stack(vectors(model, collator, texts, column, partial(torch.nn.functional.normalize, dim=-1), at_once))


def vectors(
    model: Any,
    collator: Any,
    texts: Sequence[str],
    column: str,
    finished: Callable[[Any], Any] = lambda made: made,
    at_once: int = BATCH,
) -> list[Any]:
    """Return what `finished` makes of each text's embedding, of a batch of them in float32 (texts, dimensions).

    Texts of like length share a batch; where there are several processes each embeds a batch of every so many.
    """

    def made(numbers: Sequence[int]) -> Any:
        batch = collator.texts([texts[number] for number in numbers], column)
        batch = {name: value.to(model.device) if hasattr(value, "to") else value for name, value in batch.items()}
        return finished(model(batch)["sentence_embedding"].float())

    return each_once(model, sorted(range(len(texts)), key=lambda number: len(texts[number])), at_once, made)


def products(first: Any, second: Any) -> Any:
    """Return the inner product of each row of two matrices, dense or sparse, of the same shape."""
    product = first.multiply(second) if hasattr(first, "multiply") else first * second
    return numpy.asarray(product.sum(axis=1)).ravel()


# A pair's negatives are the other pairs of the whole step, so that two processes with half a batch each learn what one
# learns from the whole: sentence-transformers gathers the embeddings with their gradients for the losses that say so;
# CoSENTLoss, which compares all pairs' scores, is given the embeddings of all here.
ACROSS = "gather_across_devices"
GATHERED = ("CoSENTLoss", "FlopsLoss")
"""Those that do not gather themselves. FlopsLoss, SpladeLoss's regularizer, squares the mean over a batch: a mean over
processes of that would be another, larger cost."""


def make(losses: Any, name: str, model: Any) -> Any:
    """Return the loss `name` of sentence-transformers' module `losses` for `model`, over all processes' rows."""
    loss = getattr(losses, name)
    if World.here().alone:
        return loss(model)
    if name in GATHERED:
        return _gathering(loss)(model)
    made = loss(model)
    if hasattr(made, ACROSS):
        made.gather_across_devices = True
    return made


def arguments(*, ranked: bool) -> dict[str, Any]:
    """Return the training arguments that suit the losses: with `ranked` pairs no text comes twice in a step.

    Where there are several processes, sentence-transformers drops the last rows of an epoch that do not fill the
    batches of all (its training_args.py says so, and does it whatever it is told).
    """
    drawn = {"batch_sampler": "no_duplicates"} if ranked else {}
    return drawn if World.here().alone else {**drawn, "dataloader_drop_last": True}


@contextmanager
def within_a_process(loss: Any) -> Iterator[None]:
    """Let `loss` look at its own process's rows alone: in an evaluation batches may be of different size."""
    gathering = [part for part in loss.modules() if getattr(part, ACROSS, False)]  # SpladeLoss is of three
    for part in gathering:
        part.gather_across_devices = False
    try:
        yield
    finally:
        for part in gathering:
            part.gather_across_devices = True


def each_once(model: Any, order: Sequence[int], size: int, compute: Callable[[Sequence[int]], Any]) -> list[Any]:
    """Return what `compute` makes of each number in `order`, by number, in batches of `size` without gradients.

    `compute` returns a tensor whose first dimension is that of its numbers. Where there are several processes each
    computes a batch of every so many, and all get all.
    """
    import torch

    results: list[Any] = [None] * len(order)
    world, was_training = World.here(), model.training
    model.eval()
    with torch.no_grad():
        for begin in range(0, len(order), size * world.size):
            dealt = [order[begin + size * rank :][:size] for rank in range(world.size)]
            made = compute(dealt[world.rank] or dealt[0])  # every process takes part in each pass
            for numbers, part in zip(dealt, Ranks.here().exchange(made.cpu().numpy()), strict=True):
                # A process without a batch has computed another's, and has no numbers for it.
                for number, result in zip(numbers, part, strict=False):
                    results[number] = result
    model.train(was_training)
    return results


def _gathering(loss: Any) -> Any:
    """Return a class of `loss` that computes on all processes the loss of all rows.

    The gradient of each process's embeddings is the sum over all processes' equal losses, of which DDP takes the mean.
    """
    from sentence_transformers.util import all_gather, all_gather_with_grad

    class Gathering(loss):  # type: ignore[misc]
        gather_across_devices = True

        def compute_loss_from_embeddings(self, embeddings: Any, *labels: Any) -> Any:
            if self.gather_across_devices:
                gather = all_gather_with_grad  # of several columns; a regularizer is given those of one
                embeddings = list(map(gather, embeddings)) if isinstance(embeddings, list) else gather(embeddings)
                labels = tuple(map(all_gather, labels))
            return super().compute_loss_from_embeddings(embeddings, *labels)

    Gathering.__name__ = loss.__name__
    return Gathering


class Parts:
    """A batch sampler that draws the batches of a whole step from `batches` and gives one process's part at a time.

    What sentence-transformers' samplers promise of a batch (no text twice) then holds over all processes.
    """

    def __init__(self, batches: Any, size: int) -> None:
        self.sampler = batches
        """accelerate sets the epoch of a sampler of this name, in several processes of no other (data_loader.py)."""
        self.batch_size = batches.batch_size // size
        self.drop_last = batches.drop_last
        self._size = size

    def __len__(self) -> int:
        return len(self.sampler) * self._size

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.sampler:
            for place in range(self._size):
                yield batch[place * self.batch_size : (place + 1) * self.batch_size]
