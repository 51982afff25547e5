"""Conversations about images as rows for Trainer: tokens made once, pixels decoded and prepared as they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_mps.core.errors import UserError
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.media import images
from hf_mps.finetune.models.language import Labelled, generated
from hf_mps.finetune.models.vision_language import Reader
from hf_mps.finetune.text import chat, conversations, image_messages, tokens
from hf_mps.finetune.text.padding import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset

PIXELS = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
"""What image processors return that batches are made of here; of each row its images', in their order."""
KINDS = "mm_token_type_ids"
"""Which tokens are an image's, as Qwen-VL's positions need it: 1, others 0."""
Asked = tuple[int, Sequence[chat.Message]]
"""A row's place, and the conversation about its images that is to be answered."""
# Dimensions of pixels that hold a row's images side by side: (1, images, channels, height, width).
SIDE_BY_SIDE = 5


def tokenised(rows: Rows, reader: Reader, longest: int, prompt: str | None, content: str) -> Dataset:
    """Return a split's rows as tokens, labels (IGNORED but on the assistant's words) and the number of their images.

    `row` is each one's place in `rows`. Rows are cut to `longest`, never within an image; a row without any of the
    assistant's words left is dropped. Raises UserError for a row that holds no conversation, or no image file.
    """
    from datasets import Features, List, Value

    def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
        made: dict[str, list[Any]] = {"input_ids": [], "labels": [], "pictures": [], "row": []}
        for place, index in enumerate(indices):
            row = {role: column[place] for role, column in batch.items()}
            try:
                said = image_messages.conversation(row, prompt)
                encoded = reader.encode(said, sizes(rows, index, row), longest)
            except chat.ConversationError as error:
                raise conversations.row_error(rows, index, error) from error
            # Nothing precedes the first token, so nothing can predict it.
            if any(encoded.assistant_mask[1:]):
                pairs = zip(encoded.input_ids, encoded.assistant_mask, strict=True)
                made["input_ids"].append(encoded.input_ids)
                made["labels"].append([one if learned else IGNORED for one, learned in pairs])
                made["pictures"].append(encoded.pictures)
                made["row"].append(index)
        return made

    kinds = {"input_ids": List(Value("int32")), "labels": List(Value("int32"))}
    features = Features({**kinds, "pictures": Value("int32"), "row": Value("int32")})
    key = ("image chats", longest, prompt or "")
    found = tokens.map_cached(rows, encode, content=content, key=key, features=features)
    if len(found) == 0:
        remedy = "give a longer one, or a smaller max_image_tokens"
        raise UserError(f"{rows.where}: no row holds a word of the assistant within max_length {longest}; {remedy}")
    return found


def sizes(rows: Rows, index: int, row: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the (width, height) of a row's images. Raises UserError for what is none."""
    role = image_messages.role(row)
    return [images.dimensions(rows, index, value, role) for value in image_messages.values(row)]


def opened(rows: Rows, index: int, count: int | None = None) -> list[Any]:
    """Return the first `count` images of a row, all of them by default. Raises UserError as `images.opened`."""
    row = rows.dataset[index]
    role = image_messages.role(row)
    return [images.opened_value(rows, index, value, role) for value in image_messages.values(row)[:count]]


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

    batch = {}
    beside = any(row["pixel_values"].ndim == SIDE_BY_SIDE for row in rows if "pixel_values" in row)
    for name in PIXELS:
        tensors = [row.get(name) for row in rows]
        known = [tensor for tensor in tensors if tensor is not None]
        if not known:
            continue
        if not beside:
            batch[name] = torch.cat(known)
            continue
        most = max(tensor.shape[1] for tensor in known)
        batch[name] = known[0].new_zeros(len(rows), most, *known[0].shape[2:])
        for place, tensor in enumerate(tensors):
            if tensor is not None:
                batch[name][place, : tensor.shape[1]] = tensor[0]
    return batch


def refuse_unlike(
    reader: Reader, data: ImageChats, rows: Rows, collator: Any, takes: Sequence[str], prompt: Any
) -> None:
    """Raise UserError where the processor makes something else of the first row with images than is made of it here.

    `takes` are the arguments of the model's forward pass. A row that was cut is passed over.
    """
    import torch

    for index in range(len(data)):
        row = data.features[index]
        said = image_messages.conversation(rows.dataset[row["row"]], prompt)
        shown = opened(rows, row["row"])
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


def answers(
    model: Any, rows: Rows, reader: Reader, collator: Collator, asked: Sequence[Asked], most: int, at_once: int
) -> Iterator[dict[str, str]]:
    """Yield the images of each conversation of `asked`, the conversation as the model reads it, and its answer of at
    most `most` tokens, `at_once` at a time.

    Greedy, so that equal weights answer equally. Raises UserError for a row that cannot be used.
    """
    model.eval()
    for start in range(0, len(asked), at_once):
        some = asked[start : start + at_once]
        prompts, shown = [], []
        for index, said in some:
            places = sum(part["type"] == "image" for message in said for part in message["content"])
            seen = opened(rows, index, places)
            try:
                prompts.append(reader.prompt(said, [one.size for one in seen]))
            except chat.ConversationError as error:
                raise conversations.row_error(rows, index, error) from error
            shown.append(pixels(reader.processor.image_processor, seen))
        beside = collator.beside(left_padded(prompts, reader.tokenizer.pad_token_id), shown)
        beside = {name: value.to(model.device) for name, value in beside.items()}
        texts = generated(model, reader.tokenizer, prompts, most, **beside)
        for (index, said), text in zip(some, texts, strict=True):
            shown_by = ", ".join(map(images.named, image_messages.values(rows.dataset[index])))
            yield {"image": shown_by, "prompt": chat.render(reader.tokenizer, said, prompt=True), "generated": text}


def left_padded(ids: Sequence[Sequence[int]], filler: int) -> Any:
    """Return prompts as a tensor of one width, the way `generated` pads them."""
    import torch

    width = max(map(len, ids))
    return torch.tensor([[filler] * (width - len(row)) + list(row) for row in ids])
