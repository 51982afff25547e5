"""Preference tuning (DPO): a model learns to prefer one of two answers, measured against itself before training."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import language
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._base import Dataset, Prepared
from hf_mps.finetune.tasks._language import ChatTask, asked, left_out, mapped
from hf_mps.finetune.text import chat, lengths, tokens
from hf_mps.metrics import Baseline

# TRL's default for all weights; adapters take ten times that (TRL's documentation, "Training adapters").
RATE, RATE_OF_ADAPTERS = 1e-6, 1e-5
IDS = ("prompt_ids", "chosen_ids", "rejected_ids")


class Columns(schema.Columns):
    """The two answers, and the prompt where they do not hold it: texts, messages, or whole conversations."""

    prompt: str | None = None
    """The column of the prompt."""
    chosen: str = "chosen"
    """The column of the better answer."""
    rejected: str = "rejected"
    """The column of the worse answer."""


class Data(schema.Data):
    """Adds the columns."""

    columns: Columns = Columns()


class Recipe(language.Decoder):
    """Adds the chat template (`plain`, or a Jinja file). `training` takes DPOConfig's `beta`, `loss_type` and so on."""

    task: Literal["dpo"]
    """What the model learns to do."""
    data: Data
    chat_template: str | None = None
    """plain, or a Jinja file; by default the tokenizer's own."""


class DPO(ChatTask):
    """Learns to prefer one of two answers. A saved model rewards pairs of answers, or answers prompts alone."""

    name = "dpo"
    recipe_class = Recipe
    metrics = ("rewards/accuracies", "rewards/margins")
    # A row to be answered has a pair, whose rewards are measured, or a prompt alone.
    optional = ("prompt", "chosen", "rejected")
    asked: ClassVar[Mapping[str, str]] = {"prompt": "prompt"}
    arguments_source = ("trl/trainer/dpo_config.py", "DPOConfig")
    settled: ClassVar[Mapping[str, str]] = {
        "max_length": "it is a key of the recipe itself: max_length: N",
        "truncation_mode": "the task cuts the answers' ends itself; leave it out",
        "pad_to_multiple_of": "it is a key of the recipe itself: pad_to_multiple_of: N",
        "model_init_kwargs": "the runner loads the model itself; leave it out",
        "use_weighting": "the rewards that are measured are those of the unweighted loss; leave it out",
        "ld_alpha": "the rewards that are measured are those of whole answers; leave it out",
    }
    unsharded = "its reference model would stay whole on every rank"
    recipe: Recipe

    def begin(self) -> None:
        from hf_mps.finetune.models.preference_trainer import Arguments

        super().begin()
        self.arguments, self.arguments_defaults = Arguments, {"max_length": None}
        self.loaded.tokenizer.padding_side = "right"  # as TRL's collator pads
        self.loaded.content = tokens.digest(self.loaded.tokenizer)

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        self.refuse_without_trl()
        from hf_mps.finetune.models.preference_trainer import PreferenceTrainer, measured

        recipe = self.recipe
        chosen = self.measures()
        self.begin()
        loaded = self.loaded
        features = {split: _tokenised(rows[split], loaded) for split in rows}
        sizes = {split: [tokens.counts(some, name) for name in IDS] for split, some in features.items()}
        counts = {
            split: [asked + max(pair) for asked, *pair in zip(*some, strict=True)] for split, some in sizes.items()
        }
        length = lengths.decide(recipe, counts["train"], loaded.longest, others=itertools.chain(*counts.values()))
        self.load_language(chunks=False)  # TRL takes its log-probabilities in chunks itself
        # The habit that preferences teach most easily.
        longer = [better > worse for _, better, worse in zip(*sizes["validation"], strict=True)]
        baseline = Baseline("always prefers the longer answer", {"rewards/accuracies": sum(longer) / len(longer)})
        left = left_out(
            rows, features, "their prompt alone is max_length or longer", "pairs of answers to one prompt; "
        )
        return self.made(
            splits=features,
            collator=self._collator(length.value),
            metrics=chosen,
            compute_metrics=lambda evaluated: measured(evaluated.predictions, chosen),
            baseline=baseline,
            choices={"lengths": length, **loaded.choices, "pairs": left},
            trainer=PreferenceTrainer,
            arguments_defaults={"max_length": None, "learning_rate": RATE_OF_ADAPTERS if recipe.lora else RATE},
            token_counts=counts["train"],
            predicted=(rows["validation"], features["validation"]),
        )

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        made = super().open(chosen)
        self.length = lengths.kept(self.recipe, chosen, self.loaded.tokenizer, self.loaded.config).value
        self._rewarding: Any = None
        return made

    def reference(self) -> Any:
        return language.started_from(self.recipe)

    def inputs(self, rows: Rows) -> Any:
        if {"chosen", "rejected"} <= set(rows.dataset.column_names):
            return _tokenised(rows, self.loaded)
        return asked(rows, _prompt)

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        """Yield each pair with the model's rewards, and after a training whether it prefers the chosen answer."""
        if isinstance(inputs, list):
            yield from super().answers(trainer, rows, inputs)
            return
        trained = trainer.train_dataset is not None
        if not trained:  # a saved model's own trainer computes no rewards
            trainer = self._rewarding = self._rewarding or self._rewards(trainer, inputs)
        decode = self.loaded.tokenizer.decode
        for row, (better, worse) in zip(inputs, trainer.predict(inputs).predictions.tolist(), strict=True):
            texts = {name.removesuffix("_ids"): decode(row[name], skip_special_tokens=True) for name in IDS}
            right = {"right": better > worse} if trained else {}
            yield {**texts, "reward_chosen": better, "reward_rejected": worse, **right}

    def _rewards(self, trainer: Any, features: Dataset) -> Any:
        """Return the trainer that rewards, beside `trainer`, which has put the model on its device."""
        from hf_mps.finetune.models.preference_trainer import PreferenceTrainer

        return PreferenceTrainer(
            model=self.model,
            ref_model=self.reference(),
            args=trainer.args,
            data_collator=self._collator(self.length),
            train_dataset=features,
            processing_class=trainer.processing_class,
        )

    def _collator(self, length: lengths.Lengths) -> Any:
        """Return TRL's collator, its batches padded to the lengths."""
        from trl.trainer.dpo_trainer import DataCollatorForPreference

        inner = DataCollatorForPreference(self.loaded.tokenizer.pad_token_id)
        return length.collator(inner, self.loaded.tokenizer, filled={"completion_mask": 0})

    @staticmethod
    def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Return made-up sentences: the chosen answer is another sentence, the rejected one its words in disorder."""
        draw, named = random.Random(recipe.seed), recipe.data.columns

        def row(question: str, answer: str) -> dict[str, Any]:
            asked = {"role": "user", "content": f"Say it in other words: {question}"}
            sides = {named.chosen: answer, named.rejected: " ".join(sorted(answer.split()))}
            if named.prompt:
                return {named.prompt: asked["content"], **sides}
            return {side: [asked, {"role": "assistant", "content": text}] for side, text in sides.items()}

        return {
            split: [row(*synthetic.sentences(draw, 2)) for _ in range(n)] for split, n in synthetic.splits().items()
        }


def conversation(row: Mapping[str, Any]) -> tuple[list[dict[str, str]], str, str]:
    """Return a row's prompt messages and its two answers. Raises chat.ConversationError for a row without them."""
    sides = {}
    for side in ("chosen", "rejected"):
        raw = row[side]
        whole = [{"role": "assistant", "content": raw}] if isinstance(raw, str) else chat.messages(raw)
        if whole[-1]["role"] != "assistant":
            raise chat.ConversationError(
                f"has a {side} answer whose last words are the {whole[-1]['role']}'s, not the assistant's"
            )
        sides[side] = whole
    (*before, answer), (*other, worse) = sides["chosen"], sides["rejected"]
    if before != other:
        raise chat.ConversationError("has answers to two different prompts")
    return before or _prompt(row), answer["content"], worse["content"]


def _prompt(row: Mapping[str, Any]) -> list[dict[str, str]]:
    if row.get("prompt") is None:
        raise chat.ConversationError("has no prompt; name its column with data.columns.prompt")
    return chat.messages(row["prompt"])


def _tokenised(rows: Rows, loaded: language.Loaded) -> Dataset:
    """Return prompt and answers of one split as ids, cut at their ends; rows whose prompt fills the length are
    dropped.
    """
    from datasets import List, Value

    def make(row: Mapping[str, Any]) -> dict[str, list[int]] | None:
        prompt, better, worse = conversation(row)
        (asked, chosen), (_, rejected) = (_split(loaded.tokenizer, prompt, one) for one in (better, worse))
        room = loaded.longest - len(asked)
        return dict(zip(IDS, (asked, chosen[:room], rejected[:room]), strict=True)) if room > 0 else None

    kinds = dict.fromkeys(IDS, List(Value("int32")))
    empty = f"every prompt is {loaded.longest} tokens or longer; give a longer max_length"
    return mapped(rows, loaded, ("dpo", loaded.longest), kinds, make, empty)


def _split(tokenizer: Any, prompt: Sequence[chat.Message], answer: str) -> tuple[list[int], list[int]]:
    """Return the ids before the answer and the answer's own: the last run of the assistant's words, with its end."""
    found = chat.encode(tokenizer, [*prompt, {"role": "assistant", "content": answer}])
    if not any(found.assistant_mask):
        raise chat.ConversationError("has an empty answer")
    end = len(found.assistant_mask) - found.assistant_mask[::-1].index(True)
    start = next((at for at in range(end - 1, -1, -1) if not found.assistant_mask[at]), -1) + 1
    return found.input_ids[:start], found.input_ids[start:end]
