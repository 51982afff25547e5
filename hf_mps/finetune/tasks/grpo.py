"""Learning from rewards (GRPO): a model answers each prompt several times, and what scores above the rest wins."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from hf_mps.core import extras
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import counted
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import groups, language
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.models.language import Loaded
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.rewards import choose
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.text import chat, lengths, tokens
from hf_mps.finetune.text.conversations import row_error
from hf_mps.metrics import selection
from hf_mps.metrics.selection import Chosen

if TYPE_CHECKING:
    from datasets import Dataset

ARGUMENTS = ("trl/trainer/grpo_config.py", "GRPOConfig")
SETTLED = groups.SETTLED
TRUTH = ("answer",)
CHATS = True
SMOKE = {"num_generations": 4, "max_completion_length": 8, "steps_per_generation": None, "generation_batch_size": None}
METRICS = ("reward", "completions/mean_length", "completions/clipped_ratio", "kl")
# Rows on which the rewards are tried before a run trains.
TRIED = 2
# Shapes of prompts and completions on a GPU: few enough for Metal to compile, close enough for little padding.
MULTIPLE = 32


class Columns(schema.Columns):
    """The prompt, a text or messages, and the reference answer where the data has one, a text or a number."""

    prompt: str = "prompt"
    answer: str | None = None


class Data(schema.Data):
    """Adds the columns."""

    columns: Columns = Columns()


class Recipe(language.Decoder):
    """Adds `rewards`, the system's words before each prompt, and the chat template (`plain`, or a Jinja file).

    `trust_reward_code=true`, on the command line alone, allows a reward that is any importable function.

    `max_length` holds prompt and completion; the longest completion is `training.max_completion_length`. `training`
    takes GRPOConfig's `num_generations`, `temperature`, `beta` (the weight of KL) and so on.
    """

    TYPED_ALONE: ClassVar[tuple[str, ...]] = (choose.AGREEMENT,)

    task: Literal["grpo"]
    data: Data
    rewards: list[choose.Reward] = Field(min_length=1)
    trust_reward_code: bool = Field(default=False, exclude=True)
    system_prompt: str | None = Field(default=None, min_length=1)
    chat_template: str | None = None

    @field_validator("rewards", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """Return a name alone as the section that it stands for; `rewards: number` is one reward."""
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


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make prompts, rewards, model and metrics. Raises UserError for unusable input, and without TRL."""
    if find_spec("trl") is None:
        raise UserError(f"task grpo: trl is not installed; next: {extras.install('preference')}")
    from hf_mps.finetune.models.group_trainer import Arguments, GroupTrainer, mean_of, measured

    chosen = selection.choose(recipe.metrics, METRICS, recipe.task)
    loaded = _loaded(recipe, checkpoint)
    drawn = groups.decide(recipe.training, loaded.longest, adapters=recipe.lora is not None)
    features = {split: _prompts(rows[split], loaded, recipe, drawn) for split in rows}
    names = [one.shown for one in recipe.rewards]
    scores, told = choose.choose(recipe.rewards, tried := _tried(features["train"]), agreed=recipe.trust_reward_code)
    chosen = _measures(recipe, chosen, [mean_of(name) for name in names], drawn)
    # TRL takes its log-probabilities in chunks itself.
    model = language.model(recipe, checkpoint, loaded, chunks=False, device=device)
    origin = copy.deepcopy(model) if drawn.beta and recipe.lora is None else None
    defaults, baseline = language.untrained(recipe)
    counts, padded = tokens.counts(features["train"], "prompt_ids"), _padding(recipe, device)
    return Prepared(
        splits=features,
        model=model,
        processing_class=loaded.tokenizer,
        collator=None,
        metrics=chosen,
        compute_metrics=lambda evaluated: measured(evaluated.predictions, names, chosen, drawn.beta),
        baseline=baseline,
        auto_class=language.AUTO_CLASS,
        pipeline_tag="text-generation",
        choices={
            "lengths": _lengths(loaded.longest, padded, drawn, counts),
            **loaded.choices,
            "prompts": _left_out(rows, features),
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
        dryrun_batch=lambda some: _whole(loaded.tokenizer, some),
        predict=lambda trainer: _answered(trainer, features["validation"], names, loaded.tokenizer),
        **language.saved(recipe),
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved model answers prompts. Raises UserError for a checkpoint that cannot be used."""
    from hf_mps.finetune.models.group_trainer import Arguments

    loaded = _loaded(recipe, checkpoint)
    model = language.model(recipe, checkpoint, loaded, chunks=False, device=device)
    drawn = groups.decide(recipe.training, loaded.longest, adapters=False)

    def asked(rows: Rows) -> Iterator[list[dict[str, str]]]:
        for index, row in enumerate(rows.dataset):
            try:
                yield conversation(row, recipe.system_prompt)
            except chat.ConversationError as error:
                raise row_error(rows, index, error) from error

    def answers(trainer: Any, rows: Rows) -> Iterator[dict[str, Any]]:
        settings = language.Generate(max_new_tokens=drawn.longest)
        return language.answered(trainer, loaded.tokenizer, list(asked(rows)), settings, **_template(recipe))

    made = language.answering(model, loaded, answers)
    made.arguments, made.arguments_defaults = Arguments, dict(drawn.arguments)
    return made


reference = language.started_from


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return sums of small numbers and their results, as many as a step takes prompts at least."""
    draw = random.Random(recipe.seed)
    least = groups.prompts(recipe.training)
    return {
        split: [_smoke_row(recipe.data.columns, draw) for _ in range(max(count, least))]
        for split, count in synthetic.splits().items()
    }


def conversation(row: Mapping[str, Any], system_prompt: str | None = None) -> list[dict[str, str]]:
    """Return a row's prompt as messages, behind the system's words. Raises chat.ConversationError for no prompt."""
    prompt = chat.messages(row["prompt"])
    if prompt[-1]["role"] != "user":
        raise chat.ConversationError(f"has a prompt whose last words are the {prompt[-1]['role']}'s, not the user's")
    if system_prompt is None:
        return prompt
    if prompt[0]["role"] == "system":
        raise chat.ConversationError("has a system's message of its own beside system_prompt; leave system_prompt out")
    return [{"role": "system", "content": system_prompt}, *prompt]


def _loaded(recipe: Recipe, checkpoint: Checkpoint) -> Loaded:
    """Open the checkpoint, its tokenizer with the recipe's chat template."""
    loaded = language.load(recipe, checkpoint)
    loaded.choices["chat_template"] = chat.template(loaded.tokenizer, recipe.chat_template)
    loaded.content = tokens.digest(loaded.tokenizer)
    return loaded


def _whole(tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return the batch of a step that is looked at: prompts, which are made as long as prompt and completion."""
    ids = [row["prompt_ids"] for row in rows]
    return tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")


def _prompts(rows: Rows, loaded: Loaded, recipe: Recipe, drawn: groups.Groups) -> Dataset:
    """Return one split's prompts as messages and ids, with their answers; prompts that leave no room are dropped."""
    from datasets import Features, List, Value

    tokenizer, room = loaded.tokenizer, loaded.longest - drawn.longest
    settings = _template(recipe)
    text, ids = Value("string"), List(Value("int32"))
    kinds = {"prompt": List({"role": text, "content": text}), "prompt_ids": ids}
    if recipe.data.columns.answer is not None:
        kinds["answer"] = text

    def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
        complete: dict[str, list[Any]] = {name: [] for name in kinds}
        for place, index in enumerate(indices):
            row = {role: column[place] for role, column in batch.items()}
            try:
                prompt = conversation(row, recipe.system_prompt)
                rendered = chat.render(tokenizer, prompt, prompt=True, **settings)
                made = {"prompt": prompt} | ({"answer": _answer(row)} if "answer" in kinds else {})
            except chat.ConversationError as error:
                raise row_error(rows, index, error) from error
            made["prompt_ids"] = tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
            if len(made["prompt_ids"]) <= room:
                for name, value in made.items():
                    complete[name].append(value)
        return complete

    key = ("grpo", room, recipe.system_prompt, sorted(settings.items()), sorted(kinds))
    features = tokens.map_cached(rows, encode, content=loaded.content, key=key, features=Features(kinds))
    if len(features) == 0:
        raise UserError(
            f"{rows.where}: every prompt has more than {room} tokens, which max_length {loaded.longest} leaves beside"
            f" completions of {drawn.longest}; give a longer max_length"
        )
    return features


def _answer(row: Mapping[str, Any]) -> str:
    answer = row["answer"]
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise chat.ConversationError("has no answer; allowed: a text or a number in every row")
    return str(answer)


def _tried(features: Dataset) -> list[dict[str, Any]]:
    """Return the rows that the rewards are tried on."""
    some = features.select(range(min(TRIED, len(features)))).remove_columns("prompt_ids")
    return [dict(row) for row in some]


def _measures(recipe: Recipe, chosen: Chosen, means: Sequence[str], drawn: groups.Groups) -> Chosen:
    """Return the measures with each reward's mean, and without KL where nothing is there to measure it from."""
    names = chosen.names
    if "kl" in names and not drawn.refers:
        if recipe.metrics:
            raise UserError(
                "metrics has kl, and there is no reference to measure it from; next: training.beta=0.04, or lora={}"
            )
        names = tuple(name for name in names if name != "kl")
    chosen = selection.choose(names, METRICS, recipe.task)
    return replace(chosen, reported=(*chosen.reported, *means))


def _padding(recipe: Recipe, device: str) -> Choice[int | None]:
    """Choose the number of tokens whose multiples prompts and completions are padded to; None is their own length."""
    if recipe.pad_to_multiple_of is not None:
        return Choice(recipe.pad_to_multiple_of, "pad_to_multiple_of in the recipe")
    if not recipe.optimizations:
        return Choice(None, "optimizations is false in the recipe")
    if device == "cpu":
        return Choice(None, "a CPU compiles nothing for a new shape")
    return Choice(MULTIPLE, "prompts and completions padded to multiples: every new shape costs a compiled graph")


def _lengths(
    longest: int, padded: Choice[int | None], drawn: groups.Groups, counts: Sequence[int]
) -> Choice[lengths.Lengths]:
    room = longest - drawn.longest
    reason = f"a prompt of up to {room}, a completion of up to {drawn.longest}; {padded.reason}"
    summary = lengths.summary(counts, room)
    return Choice(lengths.Lengths(longest, "longest", multiple=padded.value), f"{reason}; {summary}")


def _left_out(rows: Mapping[str, Rows], features: Mapping[str, Dataset]) -> Choice[str]:
    left = {split: len(rows[split].dataset) - len(features[split]) for split in features}
    told = ", ".join(counted(count, f"{split} row") for split, count in left.items() if count)
    out = f"left out, longer than max_length leaves for a prompt: {told}" if told else "no row is left out"
    return Choice(" + ".join(str(len(some)) for some in features.values()), out)


def _template(recipe: Recipe) -> dict[str, Any]:
    """Return what the chat template is told beside the messages (`enable_thinking: false`)."""
    return dict(recipe.training.get("chat_template_kwargs") or {})


def _answered(trainer: Any, features: Dataset, names: Sequence[str], tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield each validation prompt as the model reads it, with its answer, the rewards, and the divergence."""
    size = trainer.args.per_device_eval_batch_size
    for start in range(0, len(features), size):
        rows = [features[place] for place in range(start, min(start + size, len(features)))]
        for row, found in zip(rows, trainer.answers(rows), strict=True):
            scores = {f"reward_{name}": score for name, score in zip(names, found["scores"], strict=True)}
            numbers = {"reward": found["reward"], **scores, "kl": found["kl"]}
            yield {
                "prompt": tokenizer.decode(row["prompt_ids"]),
                **({"reference": row["answer"]} if "answer" in row else {}),
                "generated": found["completion"],
                "tokens": int(found["tokens"]),
                **{name: value for name, value in numbers.items() if not math.isnan(value)},
            }


def _smoke_row(named: Columns, draw: random.Random) -> dict[str, Any]:
    first, second = draw.randrange(50), draw.randrange(50)
    answer = {named.answer: str(first + second)} if named.answer else {}
    return {named.prompt: f"How much is {first} + {second}?", **answer}
