"""Supervised fine-tuning of a model of images and text: it learns the assistant's words about images."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hf_mps.core.errors import UserError
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.media.image_chats import Collator
from hf_mps.finetune.models import language, vision_language
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.models.language import Loaded
from hf_mps.finetune.models.vision_language import Reader
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.text import chat, conversations, image_messages, lengths, tokens
from hf_mps.metrics.selection import choose

METRICS = ("perplexity", "accuracy")
TRUTH = ("answer",)
OPTIONAL = ("question",)
# Room for an image of the default size and a few turns about it.
MAX_LENGTH = 1024
# Conversations that are answered at once: their images fill memory.
ANSWERED = 4
COLOURS = {"red": (200, 40, 40), "blue": (40, 80, 200), "green": (40, 180, 60), "yellow": (220, 200, 40)}
# Width and height in pixels of the images of a smoke run.
SMOKE_SIZE = (96, 64)
SNIPPET = """from transformers import pipeline

asked = [{"type": "image", "path": "photo.jpg"}, {"type": "text", "text": "What is this?"}]
answer = pipeline("image-text-to-text", model=".")
print(answer(text=[{"role": "user", "content": asked}], max_new_tokens=32))"""
ADAPTER_SNIPPET = """from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

model, processor = AutoModelForImageTextToText.from_pretrained("{base}"), AutoProcessor.from_pretrained(".")
model = PeftModel.from_pretrained(model, ".")"""


class Data(schema.Data):
    """Adds the columns of the images and of what is said about them."""

    columns: image_messages.Columns = image_messages.Columns()


class Recipe(language.Recipe):
    """Adds what is said before each question (`prompt`), and the most tokens that an image becomes.

    `chat_template` is a Jinja file in place of the processor's own. The language model alone trains, or with `lora` its
    adapters; what sees the images is frozen.
    """

    task: Literal["image-text"]
    data: Data
    prompt: str | None = Field(default=None, min_length=1)
    max_image_tokens: int = Field(default=384, ge=1)
    chat_template: str | None = None
    generate: language.Generate = language.Generate()


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make features, model, collator and metrics. Raises UserError for rows or a checkpoint that cannot be used."""
    from hf_mps.finetune.media import image_chats
    from hf_mps.finetune.models.token_trainer import TokenTrainer, measured

    chosen = choose(recipe.metrics, METRICS, recipe.task)
    reader, loaded = _load(recipe, checkpoint)
    tables = {
        split: image_chats.tokenised(rows[split], reader, loaded.longest, recipe.prompt, loaded.content)
        for split in rows
    }
    counts = {split: tokens.counts(table) for split, table in tables.items()}
    loaded.choices["learned"] = conversations.learned(rows, tables)
    model = language.model(recipe, checkpoint, loaded, vision_language.AUTO_CLASS, only=vision_language.language_part)
    seen = reader.processor.image_processor
    splits = {split: image_chats.ImageChats(rows[split], tables[split], seen) for split in rows}
    joining = _collator(reader, model)
    image_chats.refuse_unlike(reader, splits["train"], rows["train"], joining, _takes(model), recipe.prompt)
    others = [count for some in counts.values() for count in some]
    length = lengths.decide(recipe, counts["train"], loaded.longest, others=others)
    defaults, baseline = language.untrained(recipe)
    return Prepared(
        splits=splits,
        model=model,
        processing_class=reader.processor,
        collator=length.value.collator(joining, reader.tokenizer, filled={image_chats.KINDS: 0}),
        metrics=chosen,
        compute_metrics=lambda evaluated: measured(evaluated.predictions, chosen),
        baseline=baseline,
        auto_class=vision_language.AUTO_CLASS,
        pipeline_tag="image-text-to-text",
        choices={"lengths": length, **loaded.choices},
        trainer=TokenTrainer,
        arguments_defaults=defaults,
        trainer_settings={"untrained": baseline},
        token_counts=counts["train"],
        predict=(lambda trainer: _answered(trainer, rows["validation"], reader, joining, recipe))
        if recipe.generate.rows
        else None,
        **{**language.saved(recipe), "snippet": _snippet(recipe)},
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved model answers about images. Raises UserError for a checkpoint that cannot be used."""
    import transformers

    from hf_mps.finetune.media import image_chats

    reader, loaded = _load(recipe, checkpoint)
    model, loaded.choices["model"] = checkpoint.model(
        getattr(transformers, vision_language.AUTO_CLASS), config=loaded.config
    )
    joining = _collator(reader, model)

    def answers(trainer: Any, rows: Rows) -> Iterator[dict[str, Any]]:
        asked = []
        for index, row in enumerate(rows.dataset):
            try:
                asked.append((index, image_messages.asked(row, recipe.prompt)))
            except chat.ConversationError as error:
                raise conversations.row_error(rows, index, error) from error
        at_once, most = trainer.args.eval_batch_size, recipe.generate.max_new_tokens
        return image_chats.answers(trainer.model, rows, reader, joining, asked, most, at_once)

    return Answering(
        model=model,
        processing_class=reader.processor,
        collator=None,
        answers=answers,
        choices=loaded.choices,
        at_a_time=language.AT_A_TIME,
        batch=ANSWERED,
    )


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Write images of one colour into `folder`; the answer names the colour, in the shape of the recipe's columns."""
    from PIL import Image

    draw, named = random.Random(recipe.seed), recipe.data.columns.roles()

    def row(split: str, number: int) -> dict[str, Any]:
        colour = draw.choice(list(COLOURS))
        file = folder / split / f"{number:03}.png"
        file.parent.mkdir(exist_ok=True)
        Image.new("RGB", SMOKE_SIZE, COLOURS[colour]).save(file)
        name, asked = f"{split}/{file.name}", "What colour is this?"
        answer = f"{colour.capitalize()}, {synthetic.sentences(draw, 1)[0].lower()}"
        if "messages" in named:
            said = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            texts: dict[str, Any] = {"messages": said}
        else:
            texts = {"question": asked, "answer": answer}
        values = {"image": name, "images": [name], **texts}
        return {column: values[role] for role, column in named.items()}

    return {split: [row(split, number) for number in range(n)] for split, n in synthetic.splits().items()}


def _load(recipe: Recipe, checkpoint: Checkpoint) -> tuple[Reader, Loaded]:
    """Open processor and configuration, with the size of images and the chat template that the recipe asks for."""
    config = checkpoint.config()
    reader = vision_language.Reader(checkpoint.processor(config))
    processor, tokenizer, text = reader.processor, reader.tokenizer, config.get_text_config()
    choices = {"images": vision_language.budget(reader, recipe.max_image_tokens)}
    if recipe.chat_template is None and not processor.chat_template:
        raise UserError(
            f"model {recipe.model}: its processor has no chat template; next: chat_template=FILE, a Jinja file, or a"
            " model that was trained on conversations (its name often ends with Instruct)"
        )
    tokenizer.chat_template = processor.chat_template
    choices["chat_template"] = chat.template(tokenizer, recipe.chat_template)
    processor.chat_template = tokenizer.chat_template
    longest = lengths.limit(recipe, tokenizer, text, MAX_LENGTH)
    choices |= tokens.set_pad_token(tokenizer, text)
    sizes = str(processor.image_processor.to_dict())
    content = f"{tokens.digest(tokenizer)} {type(processor).__name__} {sizes}"
    return reader, language.Loaded(tokenizer, config, longest, content, choices)


def _takes(model: Any) -> tuple[str, ...]:
    """Return the arguments of a model's forward pass, of the one inside adapters."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return tuple(inspect.signature(inner.forward).parameters)


def _collator(reader: Reader, model: Any) -> Collator:
    from hf_mps.finetune.media import image_chats

    return image_chats.Collator(reader.tokenizer, reader.place, image_chats.KINDS in _takes(model))


def _snippet(recipe: Recipe) -> str:
    if recipe.lora is not None and recipe.lora.export == "adapter":
        return ADAPTER_SNIPPET.format(base=recipe.model)
    return SNIPPET


def _answered(trainer: Any, rows: Rows, reader: Reader, joining: Collator, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield the first validation rows: the last answer's prompt, the answer in the data, and the model's own."""
    from hf_mps.finetune.media import image_chats

    asked, truths = [], []
    for index in range(min(recipe.generate.rows, len(rows.dataset))):
        said = image_messages.conversation(rows.dataset[index], recipe.prompt)
        last = max(place for place, message in enumerate(said) if message["role"] == "assistant")
        asked.append((index, said[:last]))
        truths.append(said[last]["content"][0]["text"])
    most = recipe.generate.max_new_tokens
    found = image_chats.answers(trainer.model, rows, reader, joining, asked, most, ANSWERED)
    for truth, row in zip(truths, found, strict=True):
        yield {"image": row["image"], "prompt": row["prompt"], "reference": truth, "generated": row["generated"]}
