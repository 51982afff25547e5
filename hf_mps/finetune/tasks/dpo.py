"""Preference tuning (DPO): a model learns to prefer one of two answers, measured against itself before training."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_mps.core import extras
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import language
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.models.language import Loaded
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.text import chat, lengths, tokens
from hf_mps.finetune.text.conversations import row_error
from hf_mps.metrics import Baseline
from hf_mps.metrics.selection import choose

if TYPE_CHECKING:
    from datasets import Dataset

ARGUMENTS = ("trl/trainer/dpo_config.py", "DPOConfig")
SETTLED = {
    "max_length": "it stands at the top level of a recipe: max_length: N",
    "truncation_mode": "the task cuts the answers' ends itself; leave it out",
    "pad_to_multiple_of": "it stands at the top level of a recipe: pad_to_multiple_of: N",
    "model_init_kwargs": "the runner loads the model itself; leave it out",
    "use_weighting": "the rewards that are measured are those of the unweighted loss; leave it out",
    "ld_alpha": "the rewards that are measured are those of whole answers; leave it out",
}
METRICS = ("rewards/accuracies", "rewards/margins")
# TRL's default for all weights; adapters take ten times that (TRL's documentation, "Training adapters").
RATE, RATE_OF_ADAPTERS = 1e-6, 1e-5
# A row to be answered has a pair, whose rewards are measured, or a prompt alone.
OPTIONAL = ("prompt", "chosen", "rejected")
ASKED = {"prompt": "prompt"}
CHATS = True
IDS = ("prompt_ids", "chosen_ids", "rejected_ids")


class Columns(schema.Columns):
    """The two answers, and the prompt where they do not hold it: texts, messages, or whole conversations."""

    prompt: str | None = None
    chosen: str = "chosen"
    rejected: str = "rejected"


class Data(schema.Data):
    """Adds the columns."""

    columns: Columns = Columns()


class Recipe(language.Decoder):
    """Adds the chat template (`plain`, or a Jinja file). `training` takes DPOConfig's `beta`, `loss_type` and so on."""

    task: Literal["dpo"]
    data: Data
    chat_template: str | None = None


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make features, model, collator and metrics. Raises UserError for unusable input, and without TRL."""
    if find_spec("trl") is None:
        raise UserError(f"task dpo: trl is not installed; next: {extras.install('preference')}")
    from hf_mps.finetune.models.preference_trainer import Arguments, PreferenceTrainer, measured

    chosen = choose(recipe.metrics, METRICS, recipe.task)
    loaded = language.load(recipe, checkpoint)
    loaded.tokenizer.padding_side = "right"  # as TRL's collator pads
    loaded.choices["chat_template"] = chat.template(loaded.tokenizer, recipe.chat_template)
    loaded.content = tokens.digest(loaded.tokenizer)
    features = {split: _tokenised(rows[split], loaded) for split in rows}
    counts = {split: _counts(some) for split, some in features.items()}
    length = lengths.decide(recipe, counts["train"], loaded.longest, others=[n for c in counts.values() for n in c])
    # TRL takes its log-probabilities in chunks itself.
    model = language.model(recipe, checkpoint, loaded, chunks=False, device=device)
    rate = RATE_OF_ADAPTERS if recipe.lora else RATE
    return Prepared(
        splits=features,
        model=model,
        processing_class=loaded.tokenizer,
        collator=_collator(loaded, length.value),
        metrics=chosen,
        compute_metrics=lambda evaluated: measured(evaluated.predictions, chosen),
        baseline=_longer(features["validation"]),
        auto_class=language.AUTO_CLASS,
        pipeline_tag="text-generation",
        choices={"lengths": length, **loaded.choices, "pairs": _left_out(rows, features)},
        trainer=PreferenceTrainer,
        arguments=Arguments,
        arguments_defaults={"max_length": None, "learning_rate": rate},
        token_counts=counts["train"],
        predict=lambda trainer: _preferred(trainer, features["validation"], loaded.tokenizer),
        **language.saved(recipe),
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved model rewards pairs of answers, and how it answers prompts alone.

    Raises UserError for a checkpoint that cannot be used.
    """
    from hf_mps.finetune.models.preference_trainer import Arguments

    loaded = language.load(recipe, checkpoint)
    loaded.tokenizer.padding_side = "right"  # as TRL's collator pads
    loaded.choices["chat_template"] = chat.template(loaded.tokenizer, recipe.chat_template)
    loaded.content = tokens.digest(loaded.tokenizer)
    length = lengths.kept(recipe, chosen, loaded.tokenizer, loaded.config)
    model = language.model(recipe, checkpoint, loaded, chunks=False, device=device)
    rewarding: list[Any] = []

    def answers(trainer: Any, rows: Rows) -> Iterator[dict[str, Any]]:
        if not {"chosen", "rejected"} <= set(rows.dataset.column_names):
            return language.answered(trainer, loaded.tokenizer, list(_prompts(rows)), language.Generate())
        features = _tokenised(rows, loaded)
        if not rewarding:
            collator = _collator(loaded, length.value)
            rewarding.append(_rewarding(recipe, model, trainer, collator, features))
        return _preferred(rewarding[0], features, loaded.tokenizer, truth=False)

    made = language.answering(model, loaded, answers)
    made.arguments, made.arguments_defaults = Arguments, {"max_length": None}
    made.choices = {"lengths": length, **made.choices}
    return made


reference = language.started_from


def _rewarding(recipe: Recipe, model: Any, trainer: Any, collator: Any, features: Dataset) -> Any:
    """Return the trainer that rewards, beside `trainer`, which has put the model on its device."""
    from hf_mps.finetune.models.preference_trainer import PreferenceTrainer

    return PreferenceTrainer(
        model=model,
        ref_model=reference(recipe),
        args=trainer.args,
        data_collator=collator,
        train_dataset=features,
        processing_class=trainer.processing_class,
    )


def _prompts(rows: Rows) -> Iterator[list[dict[str, str]]]:
    for index, row in enumerate(rows.dataset):
        try:
            if row.get("prompt") is None:
                raise chat.ConversationError("has no prompt; name its column with data.columns.prompt")
            yield chat.messages(row["prompt"])
        except chat.ConversationError as error:
            raise row_error(rows, index, error) from error


def _collator(loaded: Loaded, length: lengths.Lengths) -> Any:
    """Return TRL's collator, its batches padded to the lengths."""
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    inner = DataCollatorForPreference(loaded.tokenizer.pad_token_id)
    return length.collator(inner, loaded.tokenizer, filled={"completion_mask": 0})


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return made-up sentences: the chosen answer is another sentence, the rejected one its words in disorder."""
    draw = random.Random(recipe.seed)
    return {
        split: [_smoke_row(recipe.data.columns, *synthetic.sentences(draw, 2)) for _ in range(count)]
        for split, count in synthetic.splits().items()
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
    prompt = before or (chat.messages(row["prompt"]) if "prompt" in row else [])
    if not prompt:
        raise chat.ConversationError("has no prompt; name its column with data.columns.prompt")
    return prompt, answer["content"], worse["content"]


def _tokenised(rows: Rows, loaded: Loaded) -> Dataset:
    """Return prompt and answers of one split as ids, cut at their ends; rows whose prompt fills the length are
    dropped.
    """
    from datasets import Features, List, Value

    def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
        complete: dict[str, list[list[int]]] = {name: [] for name in IDS}
        for place, index in enumerate(indices):
            row = {role: column[place] for role, column in batch.items()}
            try:
                prompt, better, worse = conversation(row)
                (asked, chosen), (_, rejected) = (_split(loaded.tokenizer, prompt, one) for one in (better, worse))
            except chat.ConversationError as error:
                raise row_error(rows, index, error) from error
            room = loaded.longest - len(asked)
            if room > 0:
                for name, ids in zip(IDS, (asked, chosen[:room], rejected[:room]), strict=True):
                    complete[name].append(ids)
        return complete

    kinds = Features({name: List(Value("int32")) for name in IDS})
    key = ("dpo", loaded.longest)
    features = tokens.map_cached(rows, encode, content=loaded.content, key=key, features=kinds)
    if len(features) == 0:
        raise UserError(f"{rows.where}: every prompt is {loaded.longest} tokens or longer; give a longer max_length")
    return features


def _split(tokenizer: Any, prompt: Sequence[chat.Message], answer: str) -> tuple[list[int], list[int]]:
    """Return the ids before the answer and the answer's own: the last run of the assistant's words, with its end."""
    found = chat.encode(tokenizer, [*prompt, {"role": "assistant", "content": answer}])
    if not any(found.assistant_mask):
        raise chat.ConversationError("has an empty answer")
    end = len(found.assistant_mask) - found.assistant_mask[::-1].index(True)
    start = next((at for at in range(end - 1, -1, -1) if not found.assistant_mask[at]), -1) + 1
    return found.input_ids[:start], found.input_ids[start:end]


def _counts(features: Dataset) -> list[int]:
    """Return the length of each pair's longer side, prompt included."""
    each = [tokens.counts(features, name) for name in IDS]
    return [prompt + max(chosen, rejected) for prompt, chosen, rejected in zip(*each, strict=True)]


def _longer(features: Dataset) -> Baseline:
    """Return the score of preferring the longer answer, the habit that preferences teach most easily."""
    chosen, rejected = (tokens.counts(features, name) for name in IDS[1:])
    right = sum(one > other for one, other in zip(chosen, rejected, strict=True))
    return Baseline("always prefers the longer answer", {"rewards/accuracies": right / len(chosen)})


def _left_out(rows: Mapping[str, Rows], features: Mapping[str, Dataset]) -> Choice[str]:
    left = {split: len(rows[split].dataset) - len(features[split]) for split in features}
    told = ", ".join(f"{count} {split} rows" for split, count in left.items() if count)
    out = f"left out, their prompt alone is max_length or longer: {told}" if told else "no row is left out"
    return Choice(" + ".join(str(len(some)) for some in features.values()), f"pairs of answers to one prompt; {out}")


def _preferred(trainer: Any, features: Dataset, tokenizer: Any, *, truth: bool = True) -> Iterator[dict[str, Any]]:
    """Yield each pair with the trained model's rewards, and with `truth` whether it prefers the chosen answer."""
    rewards = trainer.predict(features).predictions.tolist()
    for row, (better, worse) in zip(features, rewards, strict=True):
        texts = {
            name: tokenizer.decode(row[f"{name}_ids"], skip_special_tokens=True)
            for name in ("prompt", "chosen", "rejected")
        }
        right = {"right": better > worse} if truth else {}
        yield {**texts, "reward_chosen": better, "reward_rejected": worse, **right}


def _smoke_row(named: Columns, question: str, answer: str) -> dict[str, Any]:
    asked = {"role": "user", "content": f"Say it in other words: {question}"}
    sides = {named.chosen: answer, named.rejected: " ".join(sorted(answer.split()))}
    if named.prompt:
        return {named.prompt: asked["content"], **sides}
    return {side: [asked, {"role": "assistant", "content": text}] for side, text in sides.items()}
