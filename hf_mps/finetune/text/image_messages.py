"""Conversations about images: rows of the usual shapes become messages whose content is parts of text and images."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import model_validator

from hf_mps.finetune.recipe import schema
from hf_mps.finetune.text import chat
from hf_mps.finetune.text.chat import ConversationError

IMAGE = {"type": "image"}
# An image's place in the text of a message, as LLaVA's files and LLaMA-Factory's have it.
PLACE = re.compile(r"\s*<image>\s*")


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

    @model_validator(mode="after")
    def _one_shape(self) -> Columns:
        if self.image and self.images:
            raise ValueError("has image beside images; give one or the other")
        if self.messages and (self.answer or self.question):
            raise ValueError("has messages beside question or answer; give one or the other")
        if self.question and not self.answer:
            raise ValueError("has question; give answer too, or messages")
        return self

    def roles(self) -> dict[str, str]:
        """Return {role: column} of what is read; `images` and `messages` where the recipe names none of a kind."""
        said = {role: name for role, name in self if name}
        if not (self.image or self.images):
            said = {"images": "images", **said}
        return said if self.messages or self.answer else {**said, "messages": "messages"}


def values(row: Mapping[str, Any]) -> list[Any]:
    """Return a row's images as its source has them, in their order."""
    found = row["images"] if "images" in row else row["image"]
    found = found if isinstance(found, list) else [found]
    return [one for one in found if one is not None]


def role(row: Mapping[str, Any]) -> str:
    """Return the role of the column that holds a row's images."""
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
        raise ConversationError(f"has {count} images and places for {places} in its messages; allowed: one for each")
    return said


def asked(row: Mapping[str, Any], prompt: str | None) -> list[dict[str, Any]]:
    """Return what one row asks: its conversation up to the last words of the user, without an answer behind them.

    Raises chat.ConversationError for a row that asks nothing.
    """
    whole = conversation(row if "messages" in row else {**row, "answer": ""}, prompt)
    while whole and whole[-1]["role"] == "assistant":
        whole.pop()
    if not whole:
        raise ConversationError("asks nothing; allowed: words of the user")
    return whole


def _asked(row: Mapping[str, Any], prompt: str | None) -> list[dict[str, Any]]:
    for name in ("question", "answer"):
        if name in row and not isinstance(row[name], str):
            raise ConversationError(f"has no {name}; allowed: a text in every row")
    images = [dict(IMAGE) for _ in values(row)]
    asked = [*_text(prompt), *images, *_text(row["question"])] if "question" in row else [*images, *_text(prompt)]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": [_part_of(row["answer"])]}]


def _messages(raw: Any) -> list[dict[str, Any]]:
    """Return messages of OpenAI's or ShareGPT's shape, each content as parts. Raises chat.ConversationError."""
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        raise ConversationError("has no messages; allowed: a list of {role, content} or {from, value}")
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
                    parts.append(dict(IMAGE))
                elif kind == "text" and isinstance(part.get("text"), str):
                    parts.append(_part_of(part["text"]))
                else:
                    problem = f"a part of type {kind}" if kind else f"a part that is a {type(part).__name__}"
                    allowed = "{type: text, text} and {type: image}"
                    raise ConversationError(f"holds {problem}; allowed: {allowed}")
        else:
            message = chat.messages([one])[0]
            named, parts = message["role"], []
            for number, piece in enumerate(PLACE.split(message["content"])):
                parts += [dict(IMAGE)] * (number > 0) + _text(piece)
            parts = parts or [_part_of("")]
        if named == "assistant" and any(part["type"] == "image" for part in parts):
            raise ConversationError("has an image among the assistant's words; allowed: images in the user's messages")
        # Chat templates write the parts of a message one behind the other.
        joined = [_part_of("".join(part["text"] for part in parts))] if named == "assistant" else parts
        made.append({"role": named, "content": joined})
    return made


def _text(text: str | None) -> list[dict[str, Any]]:
    return [_part_of(text)] if text else []


def _part_of(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
