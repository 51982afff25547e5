"""Learning from rewards (GRPO): a model answers each prompt several times, and what scores above the rest wins."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import groups, language
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.rewards import choose
from hf_mps.finetune.tasks._base import GENERATES, Dataset, Prepared
from hf_mps.finetune.tasks._language import Asked, ChatTask, asked, left_out, mapped, readable
from hf_mps.finetune.text import chat, lengths, tokens
from hf_mps.metrics import selection

# Rows on which the rewards are tried before a run trains.
TRIED = 2
# Shapes of prompts and completions on a GPU: few enough for Metal to compile, close enough for little padding.
MULTIPLE = 32


class Columns(schema.Columns):
    """The prompt, a text or messages, and the reference answer where the data has one, a text or a number."""

    prompt: str = "prompt"
    """The column of the prompt."""
    answer: str | None = None
    """The column of the answer."""


class Data(schema.Data):
    """Adds the columns."""

    columns: Columns = Columns()


class Recipe(language.Chat):
    """Adds `rewards`, the system's words before each prompt, and the chat template (`plain`, or a Jinja file).

    `trust_reward_code=true`, on the command line alone, allows a reward that is any importable function.

    `max_length` holds prompt and completion; the longest completion is `training.max_completion_length`. `training`
    takes GRPOConfig's `num_generations`, `temperature`, `beta` (the weight of KL) and so on.
    """

    TYPED_ALONE: ClassVar[tuple[str, ...]] = (choose.AGREEMENT,)

    task: Literal["grpo"]
    """What the model learns to do."""
    data: Data
    rewards: list[choose.Reward] = Field(min_length=1)
    """What scores the completions."""
    trust_reward_code: bool = Field(default=False, exclude=True)
    """true lets rewards be any importable functions; typed, never in a file."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """The system's words before each prompt."""

    @field_validator("rewards", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """Return a name alone as the section that it means; `rewards: number` is one reward."""
        value = [value] if isinstance(value, str) else value
        return [{"name": one} if isinstance(one, str) else one for one in value] if isinstance(value, list) else value

    @field_validator("rewards")
    @classmethod
    def _apart(cls, value: list[choose.Reward]) -> list[choose.Reward]:
        choose.refuse_alike(value)
        return value

    @model_validator(mode="after")
    def _padded_by_steps(self) -> Recipe:
        if self.padding is not None:
            raise ValueError("has padding, and prompts are as long as completions make them; give pad_to_multiple_of")
        return self


class GRPO(ChatTask):
    """Learns from rewards of its own answers. A saved model answers prompts."""

    name = "grpo"
    recipe_class = Recipe
    metrics = ("reward", "completions/mean_length", "completions/clipped_ratio", "kl")
    truth = ("answer",)
    arguments_source = ("trl/trainer/grpo_config.py", "GRPOConfig")
    settled = groups.SETTLED
    unsharded = GENERATES
    in_groups = True
    smoke_arguments: ClassVar[Mapping[str, Any]] = {
        **{"num_generations": 4, "max_completion_length": 8},
        **{"steps_per_generation": None, "generation_batch_size": None},
    }
    recipe: Recipe

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        self.refuse_without_trl()
        from hf_mps.finetune.models.group_trainer import Arguments, GroupTrainer, mean_of, measured

        recipe = self.recipe
        self.measures()  # refuses an unknown one before the rows are read
        self.begin()
        loaded = self.loaded
        drawn = self.drawn = groups.decide(recipe.training, loaded.longest, adapters=recipe.lora is not None)
        features = {split: _prompts(rows[split], loaded, recipe, drawn) for split in rows}
        tried = [
            dict(row)
            for row in features["train"].select(range(min(TRIED, len(features["train"])))).remove_columns("prompt_ids")
        ]
        scores, told = choose.choose(recipe.rewards, tried, agreed=recipe.trust_reward_code)
        names = [one.shown for one in recipe.rewards]
        chosen = self._measures([mean_of(name) for name in names])
        self.load_language(chunks=False)  # TRL takes its log-probabilities in chunks itself
        # Adapters need no copy: without them the model is its own reference.
        origin = copy.deepcopy(self.model) if drawn.beta and recipe.lora is None else None
        defaults, baseline = language.untrained(recipe)
        counts, padded = tokens.counts(features["train"], "prompt_ids"), self._padding()
        room = loaded.longest - drawn.longest
        reason = f"a prompt of up to {room}, a completion of up to {drawn.longest}; {padded.reason}"
        return self.made(
            splits=features,
            metrics=chosen,
            compute_metrics=lambda evaluated: measured(evaluated.predictions, names, chosen, drawn.beta),
            baseline=baseline,
            choices={
                "lengths": Choice(
                    lengths.Lengths(loaded.longest, "longest", multiple=padded.value),
                    f"{reason}; {lengths.summary(counts, room)}",
                ),
                **loaded.choices,
                "prompts": left_out(rows, features, "longer than max_length leaves for a prompt"),
                "rewards": told,
                **drawn.choices(origin is not None),
            },
            trainer=GroupTrainer,
            arguments=Arguments,
            arguments_defaults={
                **drawn.arguments,
                **defaults,
                "pad_to_multiple_of": padded.value,
                "reward_weights": [one.weight for one in recipe.rewards],
            },
            trainer_settings={"rewards": scores, "ref_model": origin, "untrained": baseline},
            before_training=lambda: choose.try_out(recipe.rewards, scores, tried),
            token_counts=[min(count + drawn.longest, loaded.longest) for count in counts],
            epoch=lambda training: drawn.epoch(training, len(features["train"])),
            # Prompts alone, which are made as long as prompt and completion.
            dryrun_batch=lambda some: loaded.tokenizer.pad(
                {"input_ids": [row["prompt_ids"] for row in some]}, padding_side="left", return_tensors="pt"
            ),
            predicted=(rows["validation"], features["validation"]),
        )

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        from hf_mps.finetune.models.group_trainer import Arguments

        made = super().open(chosen)
        self.drawn = groups.decide(self.recipe.training, self.loaded.longest, adapters=False)
        made.arguments, made.arguments_defaults = Arguments, dict(self.drawn.arguments)
        return made

    def reference(self) -> Any:
        return language.started_from(self.recipe)

    def generates(self) -> language.Generate:
        return language.Generate(max_new_tokens=self.drawn.longest)

    def inputs(self, rows: Rows) -> list[Asked]:
        return asked(rows, lambda row: conversation(row, self.recipe.system_prompt))

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        """Yield each prompt and its answer; after a training the rewards and the divergence."""
        if isinstance(inputs, list):
            yield from super().answers(trainer, rows, inputs)
            return
        names, size = [one.shown for one in self.recipe.rewards], trainer.args.per_device_eval_batch_size
        for start in range(0, len(inputs), size):
            some = [inputs[place] for place in range(start, min(start + size, len(inputs)))]
            for row, found in zip(some, trainer.answers(some), strict=True):
                scores = {f"reward_{name}": score for name, score in zip(names, found["scores"], strict=True)}
                numbers = {"reward": found["reward"], **scores, "kl": found["kl"]}
                yield {
                    "prompt": readable(row["prompt"]),
                    **({"reference": row["answer"]} if "answer" in row else {}),
                    "generated": found["completion"],
                    "tokens": int(found["tokens"]),
                    **{name: value for name, value in numbers.items() if not math.isnan(value)},
                }

    def _measures(self, means: Sequence[str]) -> selection.Chosen:
        """Return the measures with each reward's mean, and without KL where nothing is there to measure it from."""
        recipe = self.recipe
        names = self.measures().names
        if "kl" in names and not self.drawn.refers:
            if recipe.metrics:
                raise UserError(
                    "metrics has kl, and there is no reference to measure it from; next: training.beta=0.04, or lora={}"
                )
            names = tuple(name for name in names if name != "kl")
        chosen = selection.choose(names, self.metrics, recipe.task)
        return replace(chosen, reported=(*chosen.reported, *means))

    def _padding(self) -> Choice[int | None]:
        """Choose the number of tokens whose multiples prompts and completions are padded to; None: their own length."""
        if self.recipe.pad_to_multiple_of is not None:
            return Choice(self.recipe.pad_to_multiple_of, "pad_to_multiple_of in the recipe")
        if not self.recipe.optimizations:
            return Choice(None, "optimizations is false in the recipe")
        if self.device == "cpu":
            return Choice(None, "a CPU compiles nothing for a new shape")
        return Choice(MULTIPLE, "prompts and completions padded to multiples: every new shape costs a compiled graph")

    @staticmethod
    def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Return sums of small numbers and their results, as many as a step takes prompts at least."""
        draw, named = random.Random(recipe.seed), recipe.data.columns
        least = groups.prompts(recipe.training)

        def row() -> dict[str, Any]:
            first, second = draw.randrange(50), draw.randrange(50)
            answer = {named.answer: str(first + second)} if named.answer else {}
            return {named.prompt: f"How much is {first} + {second}?", **answer}

        return {split: [row() for _ in range(max(count, least))] for split, count in synthetic.splits().items()}


def conversation(row: Mapping[str, Any], system_prompt: str | None = None) -> list[dict[str, str]]:
    """Return a row's prompt as messages, behind the system's words. Raises chat.ConversationError for no prompt."""
    prompt = chat.messages(row["prompt"])
    if prompt[-1]["role"] != "user":
        raise chat.ConversationError(f"has a prompt whose last words are the {prompt[-1]['role']}'s, not the user's")
    if system_prompt is None:
        return prompt
    if prompt[0]["role"] == "system":
        raise chat.ConversationError("has a system message beside system_prompt; leave system_prompt out")
    return [{"role": "system", "content": system_prompt}, *prompt]


def _prompts(rows: Rows, loaded: language.Loaded, recipe: Recipe, drawn: groups.Groups) -> Dataset:
    """Return one split's prompts as messages and ids, with their answers; prompts that leave no room are dropped."""
    from datasets import List, Value

    tokenizer, room = loaded.tokenizer, loaded.longest - drawn.longest
    settings = dict(recipe.training.get("chat_template_kwargs") or {})
    text, ids = Value("string"), List(Value("int32"))
    kinds = {"prompt": List({"role": text, "content": text}), "prompt_ids": ids}
    if recipe.data.columns.answer is not None:
        kinds["answer"] = text

    def make(row: Mapping[str, Any]) -> dict[str, Any] | None:
        prompt = conversation(row, recipe.system_prompt)
        rendered = chat.render(tokenizer, prompt, prompt=True, **settings)
        made: dict[str, Any] = {"prompt": prompt}
        if "answer" in kinds:
            answer = row["answer"]
            if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
                raise chat.ConversationError("has no answer; allowed: a text or a number in every row")
            made["answer"] = str(answer)
        made["prompt_ids"] = tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
        return made if len(made["prompt_ids"]) <= room else None

    key = ("grpo", room, recipe.system_prompt, sorted(settings.items()), sorted(kinds))
    empty = (
        f"every prompt has more than {room} tokens, which max_length {loaded.longest} leaves beside completions of"
        f" {drawn.longest}; give a longer max_length"
    )
    return mapped(rows, loaded, key, kinds, make, empty)
