"""Models of images and text: what their processors make of an image, and the part of them that is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.media import images
from hf_mps.finetune.text import chat

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
            raise chat.ConversationError(told)
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
    made, counted = reader.processor.image_processor, 0
    own = {name: value for name, value in dict(made.size).items() if value}
    for size, side, told in _sizes(made, own, most):
        images.resize(made, size)
        reader._blocks.clear()  # they were counted at the size before
        counted = len(reader.block((side, side)))
        if counted <= most:
            kept = " (the checkpoint's own size)" if size == own else ""
            reason = f"max_image_tokens is {most}: {told}{kept}; by {type(made).__name__}, with PIL on any machine"
            return Choice(f"up to {counted} tokens an image", reason)
    least = f"{type(reader.processor).__name__} makes {counted} of an image at least; allowed: {counted} or more"
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
