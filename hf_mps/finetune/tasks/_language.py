"""What the tasks of language models share: a checkpoint opened and loaded with its adapters, and measures by token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

from hf_mps.core import extras
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import counted
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import language, lora, quantization
from hf_mps.finetune.recipe import training_section
from hf_mps.finetune.tasks import Dataset, Input, Prepared, R, Shape
from hf_mps.finetune.tasks._text import TokenTask
from hf_mps.finetune.text import chat, tokens
from hf_mps.finetune.text.lengths import IGNORED
from hf_mps.metrics.selection import Chosen

Conversation = Callable[[Mapping[str, Any]], list[dict[str, Any]]]
Made = Callable[[dict[str, Any]], Mapping[str, Any] | None]
Asked = tuple[list[dict[str, Any]], str | None]
"""The messages before an answer, and the answer in the data where it is known."""


class LanguageTask(TokenTask[R]):
    """A task of a model that writes text."""

    auto_class = language.AUTO_CLASS
    pipeline_tag = "text-generation"
    metrics: ClassVar[tuple[str, ...] | None] = ("perplexity", "accuracy")
    shape: ClassVar[Shape | None] = "decoder"
    family: ClassVar[tuple[str, Input]] = ("qwen2", "text")
    longest_default = language.MAX_LENGTH

    def open_tokenizer(self) -> None:
        """Open tokenizer and configuration, with a padding token. Raises UserError where there is none."""
        self.read_by(self.checkpoint.tokenizer(), self.checkpoint.config())
        self.choices |= tokens.set_pad_token(self.tokenizer, self.config)

    def begin(self) -> None:
        """Open tokenizer and configuration, with the chat template where the recipe has the key."""
        self.open_tokenizer()
        # Only recipes of conversations have the key.
        if hasattr(self.recipe, "chat_template"):
            self.choices["chat_template"] = chat.template(self.tokenizer, self.recipe.chat_template)
        self.content = tokens.digest(self.tokenizer)

    def load_language(
        self, *, chunks: bool = True, only: Callable[[Any], tuple[str, Choice[str]]] | None = None
    ) -> None:
        """Load the model, with adapters where the recipe says `lora`, and with its loss in chunks where `chunks` and it
        allow.

        `only` freezes all of a model but one part and returns that part's name, which alone gets the adapters, and a
        choice that says so. Adds to the choices what was loaded, what trains, and how the loss is computed. Raises
        UserError for a checkpoint that cannot be used and for layers that it does not have.
        """
        from hf_mps.finetune.loss import deferred_head

        recipe, choices, part = self.recipe, self.choices, None
        if (kind := getattr(recipe, quantization.KEY, None)) is not None:
            computed = quantization.compute_dtype(recipe.training, recipe.weights, self.device)
            how = (self.checkpoint, self.auto_class, kind, computed.value)
            self.model, choices["model"] = quantization.load(*how, config=self.config)
            choices |= quantization.choices(self.model, kind, computed, self.device)
        else:
            self.load(self.config)
        if only is not None:
            part, choices["trained"] = only(self.model)
        if (adapters := self.adapters()) is not None:
            checkpointed = bool(recipe.training.get(training_section.checkpointing()))
            task_type = language.TASK_TYPES[self.auto_class]
            self.model, told = lora.apply(self.model, adapters, task_type, checkpointed=checkpointed, part=part)
            if adapters is not recipe.lora:
                merged = f"merged, weights would be rounded again; next, for whole ones: {quantization.MERGE}"
                told = Choice(told.value, f"{told.reason}: {merged}")
            choices["lora"] = told
        if chunks:
            choices["loss"] = deferred_head.decide(recipe, self.model)

    def adapters(self) -> lora.Lora | None:
        """Return the recipe's `lora`; over quantized weights with `export: adapter`, whatever it says."""
        said: lora.Lora | None = getattr(self.recipe, "lora", None)
        if said is None or getattr(self.recipe, quantization.KEY, None) is None:
            return said
        return said.model_copy(update={"export": "adapter"})

    def by_token(self, chosen: Chosen) -> dict[str, Any]:
        """Return the parts of `Prepared` for a training that is measured by token, before its first step too."""
        from hf_mps.finetune.models.token_trainer import TokenTrainer, measured

        defaults, baseline = language.untrained(self.recipe)
        return {
            "metrics": chosen,
            "compute_metrics": lambda evaluated: measured(evaluated.predictions, chosen),
            "baseline": baseline,
            "trainer": TokenTrainer,
            "arguments_defaults": defaults,
            "trainer_settings": {"untrained": baseline},
        }

    def mapped(self, rows: Rows, key: Sequence[Any], kinds: Mapping[str, Any], make: Made, empty: str) -> Dataset:
        """Return the columns `kinds` that `make` returns of each row, without the rows for which it returns None.

        Raises UserError, naming the row, where `make` raises ConversationError, and with `empty` where no row is left.
        """

        def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
            usable: dict[str, list[Any]] = {name: [] for name in kinds}
            for place, index in enumerate(indices):
                with chat.of_row(rows, index):
                    made = make({role: column[place] for role, column in batch.items()})
                for name, value in (made or {}).items():
                    usable[name].append(value)
            return usable

        features = tokens.map_cached(rows, encode, content=self.content, key=key, features=kinds)
        if len(features) == 0:
            raise UserError(f"{rows.where}: {empty}")
        return features

    def refuse_without_trl(self) -> None:
        """Raise UserError where TRL is not installed."""
        if find_spec("trl") is None:
            raise UserError(f"task {self.name}: trl is not installed; next: {extras.install('preference')}")

    def answers_to(
        self, rows: Rows, count: int, messages: Conversation
    ) -> Callable[[Any], Iterable[Mapping[str, Any]]] | None:
        """Return `Prepared.predict` for the last answer of the first `count` conversations in `rows`; None for none."""
        some = rows.sample(list(range(min(count, len(rows.dataset)))))
        return (lambda trainer: self.answers(trainer, some, asked(some, messages, answered=True))) if count else None

    def made(self, predicted: tuple[Rows, Any] | None = None, **parts: Any) -> Prepared:
        if (adapters := self.adapters()) is not None:  # which need other ways than Trainer's
            needed = lora.snippet(adapters, self.auto_class, getattr(self.recipe, quantization.KEY, None))
            parts = {"save": partial(lora.save, lora=adapters), **({"snippet": needed} if needed else {}), **parts}
        return super().made(predicted, **parts)


class ChatTask(LanguageTask[R]):
    """A task whose saved model answers conversations."""

    chats = True
    at_a_time = 64  # answers take long, and each should be there soon
    batch = language.PROMPTS

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        self.begin()
        self.load_language(chunks=False)
        return self.made()

    def answers(self, trainer: Any, rows: Rows, inputs: Sequence[Asked], every: bool = False) -> Iterator[Any]:
        """Yield each conversation without the template's tokens, the answer in the data, and what the model writes."""
        kwargs = self.recipe.training.get("chat_template_kwargs") or {}
        prompts = []
        for index, (messages, _) in enumerate(inputs):
            with chat.of_row(rows, index):
                prompts.append(chat.render(self.tokenizer, messages, prompt=True, **kwargs))
        written = language.answers(trainer, self.tokenizer, prompts, self.generates(), self.at_once(trainer))
        for (messages, truth), text in zip(inputs, written, strict=True):
            yield {"prompt": readable(messages), **({} if truth is None else {"reference": truth}), "generated": text}

    def generates(self) -> language.Generate:
        """Return how answers are generated."""
        return language.Generate()

    def at_once(self, trainer: Any) -> int:
        """Return how many answers are generated at once: a saved model's as --batch says."""
        # Only a saved model's trainer has no rows to train on.
        return language.PROMPTS if trainer.train_dataset is not None else int(trainer.args.eval_batch_size)


def readable(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation as predictions.csv has it: a line a message, without the template's tokens."""
    return "\n".join(f"{message['role']}: {_words(message.get('content') or '')}" for message in messages)


def _words(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a message's text, with <image> where it has one."""
    return content if isinstance(content, str) else " ".join(part.get("text", f"<{part['type']}>") for part in content)


def asked(rows: Rows, messages: Conversation, *, answered: bool = False) -> list[Asked]:
    """Return the `messages` of each row; of one that is `answered` those before its last answer, and that answer.

    Raises UserError, naming the row, where `messages` raises ConversationError.
    """
    found: list[Asked] = []
    for index, row in enumerate(rows.dataset):
        with chat.of_row(rows, index):
            said = messages(row)
        if not answered:
            found.append((said, None))
            continue
        # A conversation without words of the assistant was refused before (chat.encode).
        last = max(place for place, message in enumerate(said) if message["role"] == "assistant")
        content = said[last]["content"]
        found.append((said[:last], content if isinstance(content, str) else content[0]["text"]))
    return found


def _left_out(rows: Mapping[str, Rows], features: Mapping[str, Any], why: str) -> str:
    """Say how many rows of each split were left out because they are `why`; empty where none was."""
    left = {split: len(rows[split].dataset) - len(features[split]) for split in features}
    told = ", ".join(counted(count, f"{split} row") for split, count in left.items() if count)
    return f"left out, {why}: {told}" if told else ""


def learned(rows: Mapping[str, Rows], features: Mapping[str, Any]) -> Choice[str]:
    """Describe how much of the conversations is learned (labels that are not IGNORED), and what was dropped."""
    import numpy

    labels = numpy.concatenate([numpy.asarray(row) for row in features["train"].with_format("numpy")["labels"]])
    share = float((labels != IGNORED).mean())
    out = _left_out(rows, features, "their prompt alone is max_length or longer")
    told = f"{share:.0%} of the training tokens; the others are read, not learned{f'; {out}' if out else ''}"
    return Choice("the assistant's words", told)


def left_out(rows: Mapping[str, Rows], features: Mapping[str, Any], why: str, what: str = "") -> Choice[str]:
    """Describe how many rows each split has, and how many were left out because they are `why`."""
    out = _left_out(rows, features, why) or "no row is left out"
    return Choice(" + ".join(str(len(some)) for some in features.values()), f"{what}{out}")
