"""What the tasks that learn from preferences share: answers to a prompt as ids, their rewards, and TRL's trainers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from hf_mps.core.choice import Choice
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.tasks._base import Dataset, Prepared
from hf_mps.finetune.tasks._language import ChatTask, asked, left_out, mapped
from hf_mps.finetune.text import chat, lengths, tokens
from hf_mps.metrics import Baseline

# TRL's default for all weights; adapters take ten times that (TRL's documentation, "Training adapters").
RATE, RATE_OF_ADAPTERS = 1e-6, 1e-5
SETTLED = {
    "max_length": "it is a key of the recipe itself: max_length: N",
    "model_init_kwargs": "the runner loads the model itself; leave it out",
}
WHOLE = "its reference model would stay whole on every rank"


class PreferenceTask(ChatTask):
    """Learns to prefer answers over others. A saved model rewards answers, or answers prompts alone."""

    asked: ClassVar[Mapping[str, str]] = {"prompt": "prompt"}
    ids: ClassVar[tuple[str, ...]]
    """The columns of ids: the prompt's, and those of the answers to it."""
    counted: ClassVar[tuple[str, str]]
    """What a row is: the name of the choice that says how many there are, and in words."""
    shapes: ClassVar[tuple[tuple[str, ...], ...]]
    """The columns of answers that a row may have, one of these tuples or another."""
    alone: ClassVar[bool] = True
    """Whether an answer is read behind its own prompt alone, and so is cut to the room that this leaves."""
    label: ClassVar[tuple[str, ...]] = ()
    """The column that says whether an answer is wanted, where a row has one."""

    def kinds(self) -> tuple[type[Any], type[Any]]:
        """Return the classes of its arguments and its trainer."""
        raise NotImplementedError

    def answered(self, row: Mapping[str, Any]) -> tuple[list[dict[str, str]], list[str]]:
        """Return a row's prompt and the answers to it, as in `ids`. Raises chat.ConversationError without them."""
        raise NotImplementedError

    def make_collator(self, length: lengths.Lengths) -> Any:
        """Return TRL's collator, its batches padded to the lengths."""
        raise NotImplementedError

    def baseline(self, sizes: Sequence[Sequence[int]]) -> Baseline:
        """Return what a model is measured against; `sizes` has the lengths of the validation rows for each of `ids`."""
        raise NotImplementedError

    def rewarded(self, row: Mapping[str, Any], reward: Any) -> tuple[dict[str, Any], bool]:
        """Return a row's rewards as predictions.csv has them, and whether they are as the row wants them."""
        raise NotImplementedError

    def begin(self) -> None:
        super().begin()
        self.arguments, self.trainer = self.kinds()
        self.arguments_defaults = {"max_length": self.loaded.longest}
        self.loaded.tokenizer.padding_side = "right"  # as TRL's collators pad
        self.loaded.content = tokens.digest(self.loaded.tokenizer)

    def each(self, rows: Rows) -> Rows:
        """Return the rows with those of several answers apart, where the task learns from single ones."""
        return rows

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        self.refuse_without_trl()
        recipe = self.recipe
        chosen = self.measures()
        self.begin()
        loaded = self.loaded
        rows = {split: self.each(some) for split, some in rows.items()}
        features = {split: self._tokenised(some) for split, some in rows.items()}
        sizes = {split: [tokens.counts(some, name) for name in self.ids] for split, some in features.items()}
        counts = {
            split: [min(before + max(answers), loaded.longest) for before, *answers in zip(*some, strict=True)]
            for split, some in sizes.items()
        }
        length = lengths.decide(recipe, counts["train"], loaded.longest, others=itertools.chain(*counts.values()))
        self.load_language(chunks=False)  # TRL takes its log-probabilities in chunks itself
        name, what = self.counted
        left = left_out(rows, features, "their prompt alone is max_length or longer", f"{what}; ")
        return self.made(
            splits=features,
            collator=self.make_collator(length.value),
            metrics=chosen,
            compute_metrics=lambda evaluated: chosen.of(self.trainer.measured(evaluated)),
            baseline=self.baseline(sizes["validation"]),
            choices={"lengths": length, **loaded.choices, name: self.told(left, features)},
            arguments_defaults={**self.arguments_defaults, "learning_rate": RATE_OF_ADAPTERS if recipe.lora else RATE},
            token_counts=counts["train"],
            predicted=(rows["validation"], features["validation"]),
        )

    def told(self, left: Choice[str], features: Mapping[str, Any]) -> Choice[str]:
        """Return the choice that says how many rows there are, with what else is to be known of them."""
        return left

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        made = super().open(chosen)
        made.trainer = None  # it answers by Trainer itself
        self.length = lengths.kept(self.recipe, chosen, self.loaded.tokenizer, self.loaded.config).value
        self._rewarding: Any = None
        return made

    def inputs(self, rows: Rows) -> Any:
        if any(set(shape) <= set(rows.dataset.column_names) for shape in self.shapes):
            return self._tokenised(self.each(rows))
        return asked(rows, prompted)

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        """Yield each row with the model's rewards, and after a training whether they are as the row wants them."""
        if isinstance(inputs, list):
            yield from super().answers(trainer, rows, inputs)
            return
        trained = trainer.train_dataset is not None
        if not trained:  # a saved model's own trainer computes no rewards
            if self._rewarding is None:  # beside `trainer`, which has put the model on its device
                reference = self.reference()
                self._rewarding = self.trainer(
                    model=self.model,
                    args=trainer.args,
                    data_collator=self.make_collator(self.length),
                    train_dataset=inputs,
                    processing_class=trainer.processing_class,
                    **({} if reference is None else {"ref_model": reference}),
                )
            trainer = self._rewarding
        decode = self.loaded.tokenizer.decode
        for row, reward in zip(inputs, trainer.predict(inputs).predictions.tolist(), strict=True):
            texts = {name.removesuffix("_ids"): decode(row[name], skip_special_tokens=True) for name in self.ids}
            rewards, right = self.rewarded(row, reward)
            known = {**{name: row[name] for name in self.label}, "right": right} if trained else {}
            yield {**texts, **rewards, **known}

    def _tokenised(self, rows: Rows) -> Dataset:
        """Return prompt and answers of one split as ids, cut at their ends; rows whose prompt fills the length are
        dropped.
        """
        from datasets import List, Value

        loaded = self.loaded
        columns = {**dict.fromkeys(self.ids, List(Value("int32"))), **dict.fromkeys(self.label, Value("bool"))}

        def make(row: Mapping[str, Any]) -> dict[str, Any] | None:
            prompt, answers = self.answered(row)
            (before, *_), found = zip(*(_split(loaded.tokenizer, prompt, one) for one in answers), strict=True)
            room = loaded.longest - len(before)
            cut = room if self.alone else loaded.longest
            values = (before, *(one[:cut] for one in found), *(wanted(row) for _ in self.label))
            return dict(zip(columns, values, strict=True)) if room > 0 else None

        empty = f"every prompt is {loaded.longest} tokens or longer; give a longer max_length"
        return mapped(rows, loaded, (self.name, loaded.longest), columns, make, empty)


def disordered(answer: str) -> str:
    """Return the words of an answer in the order of the alphabet."""
    return " ".join(sorted(answer.split()))


def said(row: Mapping[str, Any], side: str) -> tuple[list[dict[str, str]], str]:
    """Return the messages before an answer in the column `side`, where it holds any, and the answer.

    Raises chat.ConversationError for one that is not the assistant's.
    """
    raw = row[side]
    *before, last = [{"role": "assistant", "content": raw}] if isinstance(raw, str) else chat.messages(raw)
    if last["role"] != "assistant":
        raise chat.ConversationError(
            f"has a {side} answer whose last words are the {last['role']}'s, not the assistant's"
        )
    return before, last["content"]


def prompted(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a row's prompt. Raises chat.ConversationError where it has none."""
    if row.get("prompt") is None:
        raise chat.ConversationError("has no prompt; name its column with data.columns.prompt")
    return chat.messages(row["prompt"])


def wanted(row: Mapping[str, Any]) -> bool:
    """Return whether a row's answer is wanted; one without a label, which is only to be rewarded, counts as wanted.

    Raises chat.ConversationError for another label than true and false.
    """
    label = row.get("label", True)
    found = str(label).lower()
    if found not in WANTED:
        raise chat.ConversationError(f"has the label {label!r}; allowed: true, false, 1, 0")
    return WANTED[found]


WANTED = {"true": True, "1": True, "false": False, "0": False}


def _split(tokenizer: Any, prompt: Sequence[chat.Message], answer: str) -> tuple[list[int], list[int]]:
    """Return the ids before the answer and the answer's own: the last run of the assistant's words, with its end."""
    found = chat.encode(tokenizer, [*prompt, {"role": "assistant", "content": answer}])
    if not any(found.assistant_mask):
        raise chat.ConversationError("has an empty answer")
    end = len(found.assistant_mask) - found.assistant_mask[::-1].index(True)
    start = next((at for at in range(end - 1, -1, -1) if not found.assistant_mask[at]), -1) + 1
    return found.input_ids[:start], found.input_ids[start:end]
