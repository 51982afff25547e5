"""Supervised fine-tuning of an instruction model: it learns the assistant's words in conversations and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import language
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.models.language import Loaded
from hf_mps.finetune.recipe import schema, training_section
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.text import chat, conversations, lengths, packing, tokens
from hf_mps.finetune.text.padding import IGNORED
from hf_mps.metrics.selection import choose

if TYPE_CHECKING:
    from datasets import Dataset

METRICS = ("perplexity", "accuracy")
TRUTH = ("output",)
OPTIONAL = ("input", "system")
CHATS = True
ASK = "Say it in other words: "


class Data(schema.Data):
    """Adds the columns of the conversations."""

    STREAMS = True

    columns: conversations.Columns = conversations.Columns()


class Recipe(language.Decoder):
    """Adds the chat template (`plain`, or a Jinja file; the tokenizer's own by default) and predictions.

    `packing` puts several conversations into a row of `max_length` tokens; none of them sees another.
    """

    task: Literal["sft"]
    data: Data
    chat_template: str | None = None
    generate: language.Generate = language.Generate()
    packing: bool | None = None


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make features, model, collator and metrics. Raises UserError for rows or a checkpoint that cannot be used."""
    from hf_mps.finetune.models.token_trainer import TokenTrainer, measured

    chosen = choose(recipe.metrics, METRICS, recipe.task)
    loaded = language.load(recipe, checkpoint)
    template = chat.template(loaded.tokenizer, recipe.chat_template)
    loaded.content = tokens.digest(loaded.tokenizer)
    features = {split: _tokenised(rows[split], loaded) for split in rows}
    counts = {split: tokens.counts(features[split]) for split in features}
    loaded.choices |= {"chat_template": template, "learned": conversations.learned(rows, features)}
    model = language.model(recipe, checkpoint, loaded, device=device)
    defaults, baseline = language.untrained(recipe)
    train, trained = features["train"], counts["train"]
    packed = packing.decide(recipe, recipe.packing, model, trained, loaded.longest)
    if packed.value:
        train = packing.Packed(train, trained, loaded.longest, loaded.tokenizer.pad_token_id)
        trained = [loaded.longest] * len(train)
        defaults["per_device_train_batch_size"] = train.batch(training_section.DEFAULT_BATCH)
    train = _streamed(rows["train"], train, loaded, packed=packed.value)
    others = [count for some in counts.values() for count in some]
    length = lengths.decide(
        recipe,
        counts["validation" if packed.value else "train"],
        loaded.longest,
        others=others,
        grouped=False if packed.value else None,
    )
    if packed.value:
        length = Choice(length.value, f"of validation rows, which are not packed; {length.reason}")
    return Prepared(
        splits={**features, "train": train},
        model=model,
        processing_class=loaded.tokenizer,
        collator=packing.Collator(length.value.collator(language.Labelled(loaded.tokenizer), loaded.tokenizer)),
        metrics=chosen,
        compute_metrics=lambda evaluated: measured(evaluated.predictions, chosen),
        baseline=baseline,
        auto_class=language.AUTO_CLASS,
        pipeline_tag="text-generation",
        choices={"packing": packed, "lengths": length, **loaded.choices},
        trainer=TokenTrainer,
        arguments_defaults=defaults,
        trainer_settings={"untrained": baseline},
        token_counts=trained,
        predict=(lambda trainer: _answered(trainer, rows["validation"], loaded.tokenizer, recipe.generate))
        if recipe.generate.rows
        else None,
        **language.saved(recipe),
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved model answers conversations. Raises UserError for a checkpoint that cannot be used."""
    loaded = language.load(recipe, checkpoint)
    loaded.choices["chat_template"] = chat.template(loaded.tokenizer, recipe.chat_template)
    model = language.model(recipe, checkpoint, loaded, chunks=False, device=device)

    def answers(trainer: Any, rows: Rows) -> Iterator[dict[str, Any]]:
        asked = [conversations.prompt(rows, row, index) for index, row in enumerate(rows.dataset)]
        return language.answered(trainer, loaded.tokenizer, asked, recipe.generate)

    return language.answering(model, loaded, answers)


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return made-up sentences, each with another one as its answer."""
    draw = random.Random(recipe.seed)

    def row() -> dict[str, Any]:
        asked, answer = synthetic.sentences(draw, 2)
        return conversations.smoke_row(recipe.data.columns, ASK + asked, answer)

    return {split: [row() for _ in range(n)] for split, n in synthetic.splits().items()}


def _tokenised(rows: Rows, loaded: Loaded) -> Dataset:
    """Return one split's conversations, with labels -100 for all but the assistant's words.

    Rows are cut to the longest length; a row without any of the assistant's words left is dropped.
    """
    tokenizer, longest = loaded.tokenizer, loaded.longest
    if not getattr(tokenizer, "is_fast", False):
        raise UserError("the model's tokenizer is no fast one (tokenizer.json), so words cannot be found in its tokens")

    def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
        usable: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
        for place, index in enumerate(indices):
            row = {role: column[place] for role, column in batch.items()}
            try:
                example = _encoded(tokenizer, longest, conversations.conversation(row))
            except chat.ConversationError as error:
                raise conversations.row_error(rows, index, error) from error
            for name, values in (example or {}).items():
                usable[name].append(values)
        return usable

    key = ("sft", longest)
    features = tokens.map_cached(rows, encode, content=loaded.content, key=key, features=language.labelled())
    if len(features) == 0:
        raise UserError(
            f"{rows.where}: no row holds a word of the assistant within max_length {longest}; give a longer one"
        )
    return features


def _encoded(tokenizer: Any, longest: int, conversation: list[dict[str, str]]) -> dict[str, list[int]] | None:
    """Return a conversation's tokens and labels; None where none of the assistant's words is within `longest`."""
    encoded = chat.encode(tokenizer, conversation)
    ids, mask = encoded.input_ids[:longest], encoded.assistant_mask[:longest]
    # Nothing precedes the first token, so nothing can predict it.
    if not any(mask[1:]):
        return None
    return {"input_ids": ids, "labels": [one if said else IGNORED for one, said in zip(ids, mask, strict=True)]}


def _streamed(rows: Rows, sample: Any, loaded: Loaded, *, packed: bool) -> Any:
    """Return the rows to train on: `sample`, or the stream of all rows where they have one, packed or not."""
    from hf_mps.finetune.stream.batches import Encoded, Making
    from hf_mps.finetune.stream.dataset import train
    from hf_mps.finetune.stream.readers import Broken

    tokenizer, longest = loaded.tokenizer, loaded.longest

    def encode(some: Sequence[Mapping[str, Any]]) -> list[Encoded]:
        made: list[Encoded] = []
        for row in some:
            try:
                example = _encoded(tokenizer, longest, conversations.conversation(row))
                made.append([example] if example else [])
            except chat.ConversationError as error:
                made.append(Broken(str(error)))
        return made

    def pack(examples: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
        fitted = packing.best_fit([len(one["input_ids"]) for one in examples], longest)
        return [[examples[place] for place in row] for row in fitted]

    filler = tokenizer.pad_token_id
    return train(sample, rows, Making(encode, longest, pack=pack if packed else None, filler=filler))


def _answered(trainer: Any, rows: Rows, tokenizer: Any, settings: language.Generate) -> Iterator[dict[str, Any]]:
    """Yield the first validation rows: the last answer's prompt, the answer in the data, and the model's own."""
    prompts, truths = [], []
    for index in range(min(settings.rows, len(rows.dataset))):
        conversation = conversations.read(rows, rows.dataset[index], index)
        last = max(place for place, message in enumerate(conversation) if message["role"] == "assistant")
        prompts.append(chat.render(tokenizer, conversation[:last], prompt=True))
        truths.append(conversation[last]["content"])
    answers = language.answers(trainer, tokenizer, prompts, settings)
    for prompt, truth, answer in zip(prompts, truths, answers, strict=True):
        yield {"prompt": prompt, "reference": truth, "generated": answer}
