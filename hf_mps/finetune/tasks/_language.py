"""What the tasks of language models share: their recipe's keys, the model with its adapters, labels, and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

from pydantic import Field

from hf_mps.core import extras
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import counted
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import lora, quantization
from hf_mps.finetune.models.checkpoint import resolve, text_config
from hf_mps.finetune.models.lora import Lora
from hf_mps.finetune.models.quantization import Kind
from hf_mps.finetune.recipe import schema, training_section
from hf_mps.finetune.run.logging import errors_only
from hf_mps.finetune.tasks import Dataset, Input, Prepared, R, Shape
from hf_mps.finetune.tasks._text import TokenTask
from hf_mps.finetune.text import chat, lengths, tokens
from hf_mps.finetune.text.lengths import IGNORED
from hf_mps.metrics import Baseline
from hf_mps.metrics.selection import Chosen

Conversation = Callable[[Mapping[str, Any]], list[dict[str, Any]]]
Made = Callable[[dict[str, Any], int], Mapping[str, Any] | None]
"""Makes columns of a row and its place."""
Asked = tuple[list[dict[str, Any]], str | None]
"""The messages before an answer, and the answer in the data where it is known."""

AUTO_CLASS = "AutoModelForCausalLM"
# peft's task types of the auto classes.
TASK_TYPES = dict.fromkeys((AUTO_CLASS, "AutoModelForImageTextToText"), "CAUSAL_LM")
TASK_TYPES["AutoModelForSeq2SeqLM"] = "SEQ_2_SEQ_LM"
# Longer than a classifier's rows: a model learns long context only from long rows.
MAX_LENGTH = 512

LABELLED = {"input_ids": ("int32",), "labels": ("int32",)}
"""The columns of rows that carry their labels, as `tokens.typed` reads them."""
# Prompts that are answered at once.
PROMPTS = 8


class Recipe(lengths.Padded):
    """Adds `lora`: adapters in place of all weights (`lora: {}` takes their defaults)."""

    lora: Lora | None = None


class Decoder(Recipe):
    """Adds `quantization`: the model's linear layers in 4 bits (nf4, fp4) or 8 (int8) below the adapters of `lora`."""

    quantization: Kind | None = None
    """Keeps the frozen weights below the adapters in 4 bits (nf4, fp4) or 8 (int8)."""

    def wrong(self) -> Iterator[str]:
        if self.quantization is None:
            return
        if self.lora is None:
            told = "without lora, and rounded weights cannot be trained; give lora: {}, or leave quantization out"
            yield f"has quantization: {self.quantization} {told}"
        if self.training.get("fsdp"):
            yield "has quantization and training.fsdp, which divides whole weights; leave one of them out"


class Chat(Decoder):
    """Adds the chat template: `plain`, or a Jinja file."""

    chat_template: str | None = None
    """plain, or a Jinja file; by default the tokenizer's own."""


class Generate(schema.Section):
    """For predictions.csv: to how many validation rows the model answers, and with at most how many tokens."""

    rows: int = Field(default=16, ge=0)
    """How many validation rows the model answers in predictions.csv."""
    max_new_tokens: int = Field(default=128, ge=1)
    """The most tokens of an answer."""


def untrained(recipe: schema.Recipe) -> tuple[dict[str, Any], Baseline | None]:
    """Return the arguments that evaluate the model before its first step, and the baseline that this fills.

    The baseline is None where the recipe's `training` says `eval_on_start: false`.
    """
    if recipe.training.get("eval_on_start") is False:
        return {}, None
    return {"eval_on_start": True}, Baseline("is the model before its first step", {})


@dataclass
class Labelled:
    """Pads rows of `input_ids` and a label for each token (the token itself where the row has none); padding is
    -100.
    """

    tokenizer: Any

    def __call__(self, features: list[Any]) -> Any:
        from transformers import DataCollatorForTokenClassification

        # Its name aside, this is the collator for one label a token.
        rows = [{"input_ids": row["input_ids"], "labels": row.get("labels", row["input_ids"])} for row in features]
        return DataCollatorForTokenClassification(self.tokenizer)(rows)


def started_from(recipe: Recipe) -> Any:
    """Return the model that a run started from, against which a saved one is measured.

    Raises UserError where it is not there any more.
    """
    return replace(resolve(recipe.model), dtype=recipe.weights).model(AUTO_CLASS)[0]


def positions(model_: Any) -> int:
    """Return how many tokens a model has positions for."""
    return getattr(text_config(model_), "max_position_embeddings", None) or lengths.UNLIMITED


def generated(model_: Any, tokenizer: Any, ids: list[list[int]], max_new_tokens: int, **how: Any) -> list[str]:
    """Return what a model says behind each prompt's `ids`, without special tokens; greedy unless `how` says otherwise.

    It ends at the tokens of its generation configuration, and where the chat template ends a turn.
    """
    # The answer follows the last token of each prompt, so padding is on the left.
    batch = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt").to(model_.device)
    width = batch["input_ids"].shape[1]
    settings = {"do_sample": False, "num_beams": 1, "pad_token_id": tokenizer.pad_token_id, "use_cache": True}
    settings["max_new_tokens"] = max(1, min(max_new_tokens, positions(model_) - width))
    # Where a chat template was learned, its end of a turn may be missing in the model's configuration.
    known = model_.generation_config.eos_token_id
    ends = [] if known is None else list(known) if isinstance(known, (list, tuple)) else [known]
    turn = chat.end_of_turn(tokenizer) if tokenizer.chat_template else None
    if turn is not None and turn not in ends:
        settings["eos_token_id"] = [*ends, turn]
    with errors_only():
        made = model_.generate(**batch, **(settings | how))
    return list(tokenizer.batch_decode(made[:, width:], skip_special_tokens=True))


def decoded(ids: Any, tokenizer: Any) -> list[str]:
    """Return texts for ids of shape (rows, tokens), -100 behind a row's end."""
    import numpy

    ids = ids[0] if isinstance(ids, tuple) else ids
    return read(numpy.where(ids < 0, tokenizer.pad_token_id, ids), tokenizer)


def read(rows: Any, tokenizer: Any) -> list[str]:
    """Return texts for rows of ids, as they are compared: without special tokens, and without space around them."""
    return [text.strip() for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]


class LanguageTask(TokenTask[R]):
    """A task of a model that writes text."""

    auto_class = AUTO_CLASS
    pipeline_tag = "text-generation"
    metrics: ClassVar[tuple[str, ...] | None] = ("perplexity", "accuracy")
    shape: ClassVar[Shape | None] = "decoder"
    family: ClassVar[tuple[str, Input]] = ("qwen2", "text")
    longest_default = MAX_LENGTH

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
        if self.auto_class == AUTO_CLASS and getattr(self.model, "loss_type", "") is None:
            # GPT-2's class name tells transformers no loss, and Trainer would divide by each row's first token, too.
            self.model.loss_type = "ForCausalLM"
        if only is not None:
            part, choices["trained"] = only(self.model)
        if (adapters := self.adapters()) is not None:
            checkpointed = bool(recipe.training.get(training_section.checkpointing()))
            task_type = TASK_TYPES[self.auto_class]
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

        defaults, baseline = untrained(self.recipe)
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
                    made = make({role: column[place] for role, column in batch.items()}, index)
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
    batch = PROMPTS

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        self.begin()
        self.load_language(chunks=False)
        return self.made()

    def answers(self, trainer: Any, rows: Rows, inputs: Sequence[Asked], every: bool = False) -> Iterator[Any]:
        """Yield each conversation without the template's tokens, the answer in the data, and what the model writes.

        Greedily, so that equal weights answer equally. Prompts are cut on their left so that prompt and answer fit the
        model's positions.
        """
        kwargs = self.recipe.training.get("chat_template_kwargs") or {}
        prompts = []
        for index, (messages, _) in enumerate(inputs):
            with chat.of_row(rows, index):
                prompts.append(chat.render(self.tokenizer, messages, prompt=True, **kwargs))
        model, most = trainer.model.eval(), self.generates().max_new_tokens
        longest = max(1, positions(model) - most)
        # Only a saved model's trainer has no rows to train on; it answers as many at once as --batch says.
        at_once = PROMPTS if trainer.train_dataset is not None else int(trainer.args.eval_batch_size)
        for start in range(0, len(inputs), at_once):
            # verbose=False: the tokenizer would warn of prompts longer than the model's positions, which are cut here.
            made = self.tokenizer(prompts[start : start + at_once], add_special_tokens=False, verbose=False)
            texts = generated(model, self.tokenizer, [ids[-longest:] for ids in made["input_ids"]], most)
            for (messages, truth), text in zip(inputs[start : start + at_once], texts, strict=True):
                known = {} if truth is None else {"reference": truth}
                yield {"prompt": readable(messages), **known, "generated": text}

    def generates(self) -> Generate:
        """Return how answers are generated."""
        return Generate()


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
