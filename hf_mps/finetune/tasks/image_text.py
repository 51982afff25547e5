"""Supervised fine-tuning of a model of images and text: it learns the assistant's words about images."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, model_validator

from hf_mps.core.errors import UserError
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.media import image_chats, images
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks import Dataset, Prepared, _language, snippets
from hf_mps.finetune.tasks._language import Asked, LanguageTask, asked, learned, readable
from hf_mps.finetune.text import chat, lengths, tokens

# Room for an image of the default size and a few turns about it.
MAX_LENGTH = 1024
# Width and height in pixels of the images of a smoke run.
SMOKE_SIZE = (96, 64)


class Data(schema.Data):
    """Adds the columns of the images and of the texts about them."""

    columns: image_chats.Columns = image_chats.Columns()

    @model_validator(mode="before")
    @classmethod
    def _in_a_folder(cls, given: Any) -> Any:
        """Name the column of a folder's images, which is always `image`."""
        columns = given.get("columns") or {} if isinstance(given, Mapping) and given.get("folder") else None
        if not isinstance(columns, Mapping) or columns.get("image") or columns.get("images"):
            return given
        return {**given, "columns": {**columns, "image": "image"}}


class Recipe(_language.Recipe):
    """Adds the words before each question, and the most tokens that an image becomes.

    `chat_template` is a Jinja file in place of the processor's own. The language model alone trains, or with `lora` its
    adapters.
    """

    data: Data
    prompt: str | None = Field(default=None, min_length=1)
    """The words that ask for the answer, before the question of a row."""
    max_image_tokens: int = Field(default=384, ge=1)
    """The most tokens that an image becomes."""
    chat_template: str | None = None
    """plain, or a Jinja file; by default the tokenizer's own."""
    generate: _language.Generate = _language.Generate()


class ImageText(LanguageTask[Recipe]):
    """Learns the assistant's words about images."""

    auto_class = image_chats.AUTO_CLASS
    pipeline_tag = "image-text-to-text"
    shape = None
    truth = ("answer",)
    optional = ("question",)
    at_a_time = 64  # answers take long, and each should be there soon
    batch = 4  # their images fill memory
    longest_default = MAX_LENGTH
    architectures = tuple(
        f"{name}ForConditionalGeneration" for name in ("Idefics3", "SmolVLM", "VL", "Llava", "InternVL")
    )
    family = ("idefics3", "image and text")
    shows = "texts"

    def begin(self) -> None:
        """Open processor and configuration, with the size of images and the chat template that the recipe asks for."""
        recipe, config = self.recipe, self.checkpoint.config()
        self.reader = reader = image_chats.Reader(self.checkpoint.processor(config))
        processor, tokenizer, text = reader.processor, reader.tokenizer, config.get_text_config()
        self.choices["images"] = image_chats.budget(reader, recipe.max_image_tokens)
        if recipe.chat_template is None and not processor.chat_template:
            told = f"model {recipe.model}: its processor has no chat template; next: chat_template=FILE, a Jinja file"
            other = "a model that was trained on conversations (its name often ends with Instruct)"
            raise UserError(f"{told}, or {other}")
        # `chat.template` looks at the tokenizer's, and the processor, which renders, keeps another.
        tokenizer.chat_template = processor.chat_template
        self.choices["chat_template"] = chat.template(tokenizer, recipe.chat_template)
        processor.chat_template = tokenizer.chat_template
        self.read_by(tokenizer, text)
        self.choices |= tokens.set_pad_token(tokenizer, text)
        self.content = f"{tokens.digest(tokenizer)} {type(processor).__name__} {processor.image_processor.to_dict()}"
        self.config, self.processing_class = config, processor

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe = self.recipe
        chosen = self.measures()
        self.begin()
        reader = self.reader
        tables = {split: self._tokenised(some) for split, some in rows.items()}
        counts = {split: tokens.counts(table) for split, table in tables.items()}
        self.choices["learned"] = learned(rows, tables)
        self.load_language(only=image_chats.language_part)
        seen = reader.processor.image_processor
        splits = {split: image_chats.ImageChats(rows[split], tables[split], seen) for split in rows}
        joining = self._joining()
        image_chats.refuse_unlike(reader, splits["train"], joining, self._takes(), recipe.prompt)
        length = lengths.decide(recipe, counts, self.longest)
        if recipe.lora is not None and recipe.lora.export == "adapter":
            self.snippet = snippets()[f"{self.name} adapter"].format(base=recipe.model)
        return self.made(
            splits=splits,
            collator=length.value.collator(joining, reader.tokenizer, filled={image_chats.KINDS: 0}),
            choices={"lengths": length, **self.choices},
            token_counts=counts["train"],
            snippet=self.snippet,
            predict=self.answers_to(
                rows["validation"], recipe.generate.rows, lambda row: image_chats.conversation(row, recipe.prompt)
            ),
            **self.by_token(chosen),
        )

    def _tokenised(self, rows: Rows) -> Dataset:
        """Return a split's rows as tokens, labels (IGNORED but on the assistant's words) and how many images they have.

        `row` is each one's place in `rows`. Rows are cut to the longest length, never within an image; a row without
        any of the assistant's words left is dropped. Raises UserError for a row that holds no conversation, or no image
        file.
        """
        reader, longest, prompt = self.reader, self.longest, self.recipe.prompt

        def make(row: Mapping[str, Any], index: int) -> dict[str, Any] | None:
            said = image_chats.conversation(row, prompt)
            encoded = reader.encode(said, image_chats.sizes(rows, index, row), longest)
            made = encoded.learned()
            return made and {**made, "pictures": encoded.pictures, "row": index}

        kinds = {**_language.LABELLED, "pictures": "int32", "row": "int32"}
        empty = f"no row holds a word of the assistant within max_length {longest}; give a longer one, or a smaller"
        return self.mapped(rows, ("image chats", longest, prompt or ""), kinds, make, f"{empty} max_image_tokens")

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        self.begin()
        self.load(self.config)
        return self.made()

    def inputs(self, rows: Rows) -> list[Asked]:
        return asked(rows, lambda row: image_chats.asked(row, self.recipe.prompt))

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        """Yield each conversation up to its last answer, the answer in the data, and the model's own."""
        import torch

        reader, model, joining = self.reader, trainer.model.eval(), self._joining()
        at_once = self.batch if trainer.train_dataset is not None else trainer.args.eval_batch_size
        for start in range(0, len(inputs), at_once):
            some = inputs[start : start + at_once]
            prompts, shown = [], []
            for index, (messages, _) in enumerate(some, start):
                places = sum(part["type"] == "image" for message in messages for part in message["content"])
                seen = image_chats.opened(rows, index, places)
                with chat.of_row(rows, index):
                    prompts.append(reader.prompt(messages, [one.size for one in seen]))
                shown.append(image_chats.pixels(reader.processor.image_processor, seen))
            width, filler = max(map(len, prompts)), reader.tokenizer.pad_token_id
            padded = torch.tensor([[filler] * (width - len(ids)) + ids for ids in prompts])  # as `generated` pads them
            beside = {name: value.to(model.device) for name, value in joining.beside(padded, shown).items()}
            most = self.recipe.generate.max_new_tokens
            texts = _language.generated(model, reader.tokenizer, prompts, most, **beside)
            for index, ((messages, truth), text) in enumerate(zip(some, texts, strict=True), start):
                files = ", ".join(map(images.named, image_chats.values(rows.dataset[index])))
                known = {} if truth is None else {"reference": truth}
                yield {"image": files, "prompt": readable(messages), **known, "generated": text}

    def _takes(self) -> tuple[str, ...]:
        """Return the arguments of the model's forward pass, of the one inside adapters."""
        inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        return tuple(inspect.signature(inner.forward).parameters)

    def _joining(self) -> Any:
        """Return the collator of images and texts."""
        return image_chats.Collator(self.reader.tokenizer, self.reader.place, image_chats.KINDS in self._takes())

    @staticmethod
    def smoke_row(recipe: Recipe, made: synthetic.MadeUp) -> dict[str, Any]:
        """Write an image of one colour; the answer names the colour, in the shape of the columns."""
        name, asked = f"{made.split}/{made.number:03}.png", "What colour is this?"
        colour = synthetic.plain_image(made.draw, made.folder, name, SMOKE_SIZE)
        answer = f"{colour.capitalize()}, {synthetic.sentences(made.draw, 1)[0].lower()}"
        said = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        return {"image": name, "images": [name], "messages": said, "question": asked, "answer": answer}
