"""Conversations about images as rows for Trainer: tokens made once, pixels decoded and prepared as they are needed.

How many tokens an image becomes follows from its size and the processor alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import counted
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.media import images
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._language import Labelled
from hf_mps.finetune.text import chat

IMAGE = {"type": "image"}
# An image's place in the text of a message, as LLaVA's files and LLaMA-Factory's have it.
PLACE = re.compile(r"\s*<image>\s*")
# The keys by which apply_chat_template of transformers finds a part's image. Here they would be a second source.
FILES = ("image", "url", "path", "base64")

if TYPE_CHECKING:
    from datasets import Dataset

PIXELS = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
"""What image processors return that batches are made of here; of each row its images', in their order."""
KINDS = "mm_token_type_ids"
"""Which tokens are an image's, as Qwen-VL's positions need it: 1, others 0."""
# Dimensions of pixels that hold a row's images side by side: (1, images, channels, height, width).
SIDE_BY_SIDE = 5


class Columns(schema.Columns):
    """The images, as `image` (one a row) or `images` (a list), and what is said about them: `messages`, or `answer`.

    `question` belongs to `answer`, where every row has another question.
    """

    image: str | None = None
    """The column of the image: a path, or bytes."""
    images: str | None = None
    """The column of lists of images."""
    messages: str | None = None
    """The column of conversations."""
    question: str | None = None
    """The column of the question."""
    answer: str | None = None
    """The column of the answer."""

    def wrong(self) -> Iterator[str]:
        if self.image and self.images:
            yield "has image beside images; give one or the other"
        if self.messages and (self.answer or self.question):
            yield "has messages beside question or answer; give one or the other"
        if self.question and not self.answer:
            yield "has question; give answer too, or messages"

    def roles(self) -> dict[str, str]:
        """Return {role: column} of what is read; `images` and `messages` where the recipe names none of a kind."""
        said = {role: name for role, name in self if name}
        if not (self.image or self.images):
            said = {"images": "images", **said}
        return said if self.messages or self.answer else {**said, "messages": "messages"}


def values(row: Mapping[str, Any]) -> list[Any]:
    """Return a row's images as its source has them, in their order."""
    found = row[_role(row)]
    return [one for one in (found if isinstance(found, list) else [found]) if one is not None]


def _role(row: Mapping[str, Any]) -> str:
    return "images" if "images" in row else "image"


def conversation(row: Mapping[str, Any], prompt: str | None) -> list[dict[str, Any]]:
    """Return the conversation of one row, its messages' content in parts, with a place for each of its images.

    `prompt` comes before a question, or asks for the answer where the row has no question. Images that no message
    has a place for come first in the first message of the user. Raises chat.ConversationError for a row that holds no
    conversation, or another number of places than of images.
    """
    count = len(values(row))
    said = _messages(row["messages"]) if "messages" in row else _asked(row, prompt)
    places = sum(part["type"] == "image" for message in said for part in message["content"])
    first = next((message for message in said if message["role"] == "user"), None)
    if not places and count and first is not None:
        first["content"] = [dict(IMAGE) for _ in range(count)] + first["content"]
        places = count
    if places != count:
        told = f"has {counted(count, 'image')} and places for {places} in its messages"
        raise chat.ConversationError(f"{told}; allowed: one for each")
    return said


def asked(row: Mapping[str, Any], prompt: str | None) -> list[dict[str, Any]]:
    """Return what one row asks: its conversation up to the last words of the user, without an answer behind them.

    Raises chat.ConversationError for a row that asks nothing.
    """
    return chat.without_answer(conversation(row if "messages" in row else {**row, "answer": ""}, prompt))


def _asked(row: Mapping[str, Any], prompt: str | None) -> list[dict[str, Any]]:
    chat.refuse_other_than_text(row, [role for role in ("question", "answer") if role in row])
    images = [dict(IMAGE) for _ in values(row)]
    asked = [*_text(prompt), *images, *_text(row["question"])] if "question" in row else [*images, *_text(prompt)]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": [_part_of(row["answer"])]}]


def _messages(raw: Any) -> list[dict[str, Any]]:
    """Return messages of OpenAI's or ShareGPT's shape, each content as parts. Raises chat.ConversationError."""
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        raise chat.ConversationError("has no messages; allowed: a list of {role, content} or {from, value}")
    made = []
    for one in raw:
        content = one.get("content") if isinstance(one, Mapping) else None
        if isinstance(content, Sequence) and not isinstance(content, str):
            # chat.messages knows the roles and what is wrong with them; the parts are told here.
            named = chat.messages([{**one, "content": ""}])[0]["role"]
            parts = []
            for part in content:
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind == "image":
                    if own := next((key for key in FILES if part.get(key) is not None), None):
                        told = f"holds an image part with '{own}'"
                        raise chat.ConversationError(
                            f"{told}; allowed: {{type: image}}, its file in the images' column"
                        )
                    parts.append(dict(IMAGE))
                elif kind == "text" and isinstance(part.get("text"), str):
                    parts.append(_part_of(part["text"]))
                else:
                    problem = f"a part of type {kind}" if kind else f"a part that is a {type(part).__name__}"
                    allowed = "{type: text, text} and {type: image}"
                    raise chat.ConversationError(f"holds {problem}; allowed: {allowed}")
        else:
            message = chat.messages([one])[0]
            named, parts = message["role"], []
            for number, piece in enumerate(PLACE.split(message["content"])):
                parts += [dict(IMAGE)] * (number > 0) + _text(piece)
            parts = parts or [_part_of("")]
        if named == "assistant" and any(part["type"] == "image" for part in parts):
            told = "has an image among the assistant's words"
            raise chat.ConversationError(f"{told}; allowed: images in the user's messages")
        # Chat templates write the parts of a message one behind the other.
        joined = [_part_of("".join(part["text"] for part in parts))] if named == "assistant" else parts
        made.append({"role": named, "content": joined})
    return made


def _text(text: str | None) -> list[dict[str, Any]]:
    return [_part_of(text)] if text else []


def _part_of(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def sizes(rows: Rows, index: int, row: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return (width, height) of each image of a row, from its file's header. Raises UserError for no image file."""
    return [images.dimensions(rows, index, value, _role(row)) for value in values(row)]


def opened(rows: Rows, index: int, count: int | None = None) -> list[Any]:
    """Return the first `count` images of a row, all of them by default. Raises UserError as `images.opened`."""
    row = rows.dataset[index]
    return [images.opened_value(rows, index, value, _role(row)) for value in values(row)[:count]]


@dataclass
class ImageChats:
    """A split for Trainer: rows of `input_ids`, `labels` and, where a row has images, their PIXELS."""

    rows: Rows
    features: Dataset
    image_processor: Any

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.features[index]
        shown = opened(self.rows, row["row"], row["pictures"])
        return {"input_ids": row["input_ids"], "labels": row["labels"], **pixels(self.image_processor, shown)}


def pixels(image_processor: Any, shown: Sequence[Any]) -> dict[str, Any]:
    """Return what an image processor makes of a row's PIL images, PIXELS alone; empty of none."""
    if not shown:
        return {}
    made = image_processor(list(shown), return_tensors="pt")
    return {name: made[name] for name in PIXELS if name in made}


@dataclass
class Collator:
    """Pads tokens and labels, and joins the pixels of a batch's rows; `place` is the token of an image's places.

    With `kinds` a batch says which tokens are an image's.
    """

    tokenizer: Any
    place: int
    kinds: bool

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        batch = dict(Labelled(self.tokenizer)(rows))
        return batch | self.beside(batch["input_ids"], rows)

    def beside(self, ids: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what belongs to the images of `rows`, beside their padded tokens `ids`."""
        return joined(rows) | ({KINDS: (ids == self.place).to(ids.dtype)} if self.kinds else {})


def joined(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the PIXELS of rows as a batch's: one behind the other, or where they are side by side, filled with zeros
    up to the most images of a row (Idefics3 takes an image of zeros for none).
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    batch = {}
    beside = any(row["pixel_values"].ndim == SIDE_BY_SIDE for row in rows if "pixel_values" in row)
    for name in PIXELS:
        known = [row[name] for row in rows if name in row]
        if known and beside:
            nothing = known[0][:, :0]
            batch[name] = pad_sequence([row.get(name, nothing)[0] for row in rows], batch_first=True)
        elif known:
            batch[name] = torch.cat(known)
    return batch


def refuse_unlike(reader: Reader, data: ImageChats, collator: Any, takes: Sequence[str], prompt: str | None) -> None:
    """Raise UserError where the processor makes something else of the first row with images than is made of it here.

    `takes` are the arguments of the model's forward pass. A row that was cut is passed over.
    """
    import torch

    for index in range(len(data)):
        row = data.features[index]
        said = conversation(data.rows.dataset[row["row"]], prompt)
        shown = opened(data.rows, row["row"])
        if not shown or len(row["input_ids"]) < len(reader.encode(said, [one.size for one in shown], 2**31).input_ids):
            continue
        text = chat.render(reader.tokenizer, said)
        own = reader.processor(text=[text], images=shown, add_special_tokens=False, return_tensors="pt")
        ours = collator([data[index]])
        wanted = [name for name in own if name in takes]
        unlike = [name for name in wanted if name not in ours or not torch.equal(ours[name], own[name])]
        if unlike:
            told = f"reads images in a way that hf_mps does not know (it also returns {', '.join(unlike)})"
            allowed = "allowed: a model such as SmolVLM, Idefics3, Qwen-VL or LLaVA 1.5"
            raise UserError(f"{type(reader.processor).__name__} {told}; {allowed}")
        return


AUTO_CLASS = "AutoModelForImageTextToText"
# The side in pixels of an image whose tokens are counted where the processor's sizes do not say which is largest.
SQUARE = 512


@dataclass(frozen=True)
class Cut(chat.Encoded):
    """An encoded conversation that may end early, and the number of the images that are in it."""

    pictures: int


class Reader:
    """Makes a processor's tokens of conversations about images without looking at the images: their sizes suffice.

    What a processor writes for an image depends on its size alone (`_get_num_multimodal_tokens` in transformers counts
    the same), and special tokens are at its ends, so that the text around it becomes the tokens that it always is.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.place = int(self.tokenizer.convert_tokens_to_ids(processor.image_token))
        self._blocks: dict[tuple[int, int], list[int]] = {}

    def block(self, size: tuple[int, int]) -> list[int]:
        """Return the tokens of an image of `size`, (width, height) in pixels. Raises ConversationError for one that
        the processor refuses.
        """
        from PIL import Image

        if size not in self._blocks:
            blank = Image.new("RGB", size)
            try:
                made = self.processor(text=[self.processor.image_token], images=[blank], add_special_tokens=False)
            except ValueError as error:  # Qwen-VL: an image 200 times as long as it is wide
                raise chat.ConversationError(f"has an image of {size[0]} x {size[1]} pixels: {error}") from error
            self._blocks[size] = [int(one) for one in made["input_ids"][0]]
        return self._blocks[size]

    def encode(self, conversation: Sequence[chat.Message], sizes: Sequence[tuple[int, int]], longest: int) -> Cut:
        """Return a conversation's tokens, which are the assistant's, and the number of its images, within `longest`.

        Raises ConversationError as `chat.encode`.
        """
        return self._expanded(chat.encode(self.tokenizer, conversation), sizes, longest)

    def prompt(self, conversation: Sequence[chat.Message], sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Return the tokens after which the assistant answers. Raises ConversationError as `chat.render`."""
        text = chat.render(self.tokenizer, conversation, prompt=True)
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return self._expanded(chat.Encoded(ids, [False] * len(ids)), sizes, 2**31).input_ids

    def _expanded(self, encoded: chat.Encoded, sizes: Sequence[tuple[int, int]], longest: int) -> Cut:
        """Return the tokens with each image's in its place, cut to `longest` and before an image that would be cut."""
        if encoded.input_ids.count(self.place) != len(sizes):
            told = f"has {self.processor.image_token}, the model's word for an image, in its text"
            raise chat.ConversationError(f"{told}; allowed: texts without it, and images in their column")
        ids: list[int] = []
        mask: list[bool] = []
        pictures, left = 0, iter(sizes)
        for one, said in zip(encoded.input_ids, encoded.assistant_mask, strict=True):
            tokens = self.block(next(left)) if one == self.place else [one]
            if len(ids) + len(tokens) > longest:
                break
            ids += tokens
            mask += [said] * len(tokens)
            pictures += one == self.place
        return Cut(ids, mask, pictures)


def budget(reader: Reader, most: int) -> Choice[str]:
    """Set the largest size at which an image is read, so that it becomes at most `most` tokens, never a larger one
    than the checkpoint's.

    Idefics3 and SmolVLM read an image in squares beside a small whole one, Qwen-VL in as many patches as it has; others
    make the same number of every image. Raises UserError where even the smallest needs more tokens.
    """
    made, most_tokens = reader.processor.image_processor, 0
    own = {name: value for name, value in dict(made.size).items() if value}
    for size, side, told in _sizes(made, own, most):
        images.resize(made, size)
        reader._blocks.clear()  # they were counted at the size before
        most_tokens = len(reader.block((side, side)))
        if most_tokens <= most:
            kept = " (the checkpoint's own size)" if size == own else ""
            reason = f"max_image_tokens is {most}: {told}{kept}; by {type(made).__name__}, with PIL on any machine"
            return Choice(f"up to {most_tokens} tokens an image", reason)
    least = (
        f"{type(reader.processor).__name__} makes {most_tokens} of an image at least; allowed: {most_tokens} or more"
    )
    raise UserError(f"max_image_tokens is {most}, and {least}")


def _sizes(made: Any, own: dict[str, int], most: int) -> Iterator[tuple[dict[str, int], int, str]]:
    """Yield sizes that the image processor `made` may have, largest first: the side of a square image with the most
    tokens, and words.
    """
    if "longest_edge" in own and getattr(made, "do_image_splitting", False):
        square = dict(made.max_image_size)["longest_edge"]
        for squares in range(max(1, own["longest_edge"] // square), 0, -1):
            told = f"the longer side is {squares * square} pixels, read in squares of {square}"
            yield {"longest_edge": squares * square}, square, told
    elif "longest_edge" in own and getattr(made, "merge_size", None):
        area = min(own["longest_edge"], most * (made.patch_size * made.merge_size) ** 2)
        size = {"shortest_edge": min(own["shortest_edge"], area), "longest_edge": area}
        yield size, math.isqrt(area), f"an area of at most {area:,} pixels"
    else:
        yield own, SQUARE, "every image has the same number"


def language_part(model: Any) -> tuple[str, Choice[str]]:
    """Freeze all of `model` but its language model and output layer; return the language model's name, and the choice.

    Raises UserError for a model whose language model is not a part of it.
    """
    decoder = model.get_decoder()
    name = next((path for path, module in model.named_modules() if module is decoder), "")
    if not name:
        raise UserError(f"{type(model).__name__} has no separate language model (get_decoder) that could be trained")
    kept = {id(one) for module in (decoder, model.get_output_embeddings()) for one in module.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in kept)
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    return name, Choice(f"the language model ({name})", f"{frozen:,} parameters, those that see images, are frozen")
