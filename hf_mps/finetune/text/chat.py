"""Conversations: rows of every usual shape to messages, messages to tokens, and which of them the assistant says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, neighbour
from hf_mps.finetune.recipe.schema import PLAIN_TEMPLATE
from hf_mps.finetune.text.blocks import frame

Message = Mapping[str, str]

# ShareGPT's names ("from", "value") beside OpenAI's ("role", "content").
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}
PLAIN = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '### Response:\\n' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n\\n' }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
    "{% else %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)
"""Alpaca's headings for tokenizers that bring no template: plain words, no token that the model has never seen."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Stands for the assistant's words while their place is looked for; no template or text holds it.
_STAND_IN = "hf-mps-words-5b1f09c7"


class Misfit(ValueError):
    """A conversation that cannot be used, in a clause that follows the row's number."""


@dataclass(frozen=True)
class Encoded:
    """One conversation: `input_ids`, and `words`, True where a token is the assistant's own (or ends their turn)."""

    input_ids: list[int]
    words: list[bool]


def template(tokenizer: Any, said: str | None) -> Choice[str]:
    """Settle which chat template `tokenizer` uses, and give it that one, so that it is saved with the model.

    `said` is `plain` or the path of a Jinja file; None is the tokenizer's own, or `plain` where it has none. Raises
    UserError for a file that cannot be read, and for a tokenizer without the end token that `plain` needs.
    """
    if said is None and tokenizer.chat_template:
        marked = (
            "it marks the assistant's words" if _marked(tokenizer) else "the assistant's words are found in its text"
        )
        return Choice("the tokenizer's own", marked)
    if said not in (None, PLAIN_TEMPLATE):
        tokenizer.chat_template = written(str(said))
        return Choice(str(said), "chat_template in the recipe")
    if tokenizer.eos_token is None:
        raise UserError(
            "chat_template: plain needs an end token, and the model's tokenizer has none; give a Jinja file"
        )
    # A first token that the tokenizer puts before every text of its own, as Llama's does, belongs here too.
    begun = tokenizer.bos_token_id is not None and frame(tokenizer).before == (tokenizer.bos_token_id,)
    tokenizer.chat_template = "{{ bos_token }}" * begun + PLAIN
    reason = "chat_template in the recipe" if said else "the tokenizer has none; Alpaca's headings in plain words"
    return Choice(PLAIN_TEMPLATE, reason)


def written(said: str) -> str:
    """The text of the Jinja file `said`. Raises UserError where it cannot be read."""
    path = Path(said).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        told = f"there is no such file{neighbour(path)}"
        raise UserError(f"chat_template: {said}: {told}; allowed: {PLAIN_TEMPLATE}, a Jinja file") from error
    except (OSError, UnicodeDecodeError) as error:
        why = "cannot be read: " + (getattr(error, "strerror", None) or "it is not UTF-8 text")
        raise UserError(f"chat_template: {said}: {why}; allowed: {PLAIN_TEMPLATE}, a Jinja file") from error


def messages(raw: Any) -> list[dict[str, str]]:
    """A conversation in OpenAI's shape from OpenAI's or ShareGPT's. Raises Misfit for anything else.

    `raw` is a list of {"role", "content"} or of {"from", "value"}, one dict of either, or a text (the user's).
    """
    if isinstance(raw, str):
        return [{"role": "user", "content": raw}]
    if isinstance(raw, Mapping):
        raw = [raw]
    if not isinstance(raw, Sequence) or not raw:
        raise Misfit("has no messages; allowed: a list of {role, content} or {from, value}")
    return [_message(one) for one in raw]


def instruction(asked: str, given: str | None, answer: str, system: str | None = None) -> list[dict[str, str]]:
    """An Alpaca row as a conversation: the instruction with its input after an empty line, and the answer."""
    first = [{"role": "system", "content": system}] if system else []
    question = f"{asked}\n\n{given}" if given else asked
    return [*first, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def encode(tokenizer: Any, conversation: Sequence[Message]) -> Encoded:
    """The tokens of a conversation in the tokenizer's template, and which of them the assistant says.

    A template with `{% generation %}` marks them itself. For any other one they are found in its text, see `_spans`.
    Raises Misfit where the template refuses the conversation or does not show the assistant's words as they are.
    """
    if not any(message["role"] == "assistant" for message in conversation):
        raise Misfit("has no words of the assistant; allowed: at least one message of role assistant (or gpt)")
    # quiet: a warning of rows longer than the model's positions, which are cut by whoever asked for the tokens.
    quiet = {"verbose": False}
    if _marked(tokenizer):
        asked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = _rendered(tokenizer, conversation, **asked, tokenizer_kwargs=quiet)
        return Encoded(list(found["input_ids"]), [bool(one) for one in found["assistant_masks"]])
    text = render(tokenizer, conversation)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, **quiet)
    ids, offsets = list(found["input_ids"]), found["offset_mapping"]
    return Encoded(
        ids, _within(text, _spans(tokenizer, conversation, text), ids, offsets, set(tokenizer.all_special_ids))
    )


def render(tokenizer: Any, conversation: Sequence[Message], *, prompt: bool = False) -> str:
    """The text of a conversation; `prompt` adds the words after which the assistant speaks. Raises Misfit."""
    return str(_rendered(tokenizer, conversation, tokenize=False, add_generation_prompt=prompt))


def _marked(tokenizer: Any) -> bool:
    return isinstance(tokenizer.chat_template, str) and _GENERATION.search(tokenizer.chat_template) is not None


def _message(raw: Any) -> dict[str, str]:
    if not isinstance(raw, Mapping):
        raise Misfit(f"holds a message that is a {type(raw).__name__}; allowed: {{role, content}} or {{from, value}}")
    who = raw.get("role") or raw.get("from")
    words = raw.get("content") if raw.get("content") is not None else raw.get("value")
    if who not in ROLES:
        raise Misfit(f"holds a message of '{who}'; allowed: {', '.join(ROLES)}")
    if not isinstance(words, str):
        raise Misfit(f"holds a message of {who} without text")
    return {"role": ROLES[who], "content": words}


def _rendered(tokenizer: Any, conversation: Sequence[Message], **settings: Any) -> Any:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template([dict(message) for message in conversation], **settings)
    except (TemplateError, TypeError) as error:  # a template's own raise_exception, or roles that it cannot take
        raise Misfit(f"is refused by the chat template: {str(error).strip().splitlines()[0]}") from error


def _spans(tokenizer: Any, conversation: Sequence[Message], text: str) -> list[tuple[int, int]]:
    """Where in `text` each message of the assistant stands, as [start, end) in characters.

    The end is found with a stand-in for the words: the text around it must be that of the whole conversation, or the
    template changes the words and Misfit is raised. The start is where the prompt for this turn ends, wherever that
    prompt is how the whole begins: what a template puts between the two (an empty <think></think>) is the
    assistant's to say. The prefix is the prompt's, never that of the turns up to here without what follows, because
    templates such as Qwen3's write the last turn otherwise than the earlier ones.
    """
    spans = []
    for place, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, conversation[:place], prompt=True) if place else ""
        spans.append(_span(tokenizer, conversation, place, text, prompt))
    return spans


def _span(tokenizer: Any, conversation: Sequence[Message], place: int, text: str, prompt: str) -> tuple[int, int]:
    """[start, end) of the message at `place`; `prompt` is the text that asks for it."""
    message = conversation[place]
    other = [*conversation[:place], {**message, "content": _STAND_IN}, *conversation[place + 1 :]]
    before, _, after = render(tokenizer, other).partition(_STAND_IN)
    said = message["content"]
    for words in (said, said.strip(), said.lstrip(), said.rstrip()):
        if before + words + after == text:
            # A template that asks for nothing leaves the role's heading to the turn itself, and it is no one's words.
            asks = bool(prompt) and prompt != render(tokenizer, conversation[:place])
            start = len(prompt) if asks and before.startswith(prompt) else len(before)
            return start, len(before) + len(words)
    if place == len(conversation) - 1 and prompt and text.startswith(prompt):
        # The last turn is all that follows its prompt, as where a template sets reasoning apart from the answer.
        return len(prompt), len(text.rstrip())
    raise Misfit(f"has words of the assistant that the chat template changes (message {place + 1})")


def _within(
    text: str, spans: Sequence[tuple[int, int]], ids: Sequence[int], offsets: Sequence[Any], special: set[int]
) -> list[bool]:
    """True for each token inside a span, and for the special token that ends the turn right behind it.

    A token that begins before a span counts where only white space stands before (" Hello" of one piece).
    """
    words = [False] * len(ids)
    for start, end in spans:
        inside = [
            place
            for place, (left, right) in enumerate(offsets)
            if left < end and right > start and not text[left:start].strip() and left < right
        ]
        for place in inside:
            words[place] = True
        following = (
            inside[-1] + 1 if inside else next((p for p, (left, _) in enumerate(offsets) if left >= end), len(ids))
        )
        if following < len(ids) and ids[following] in special and not text[end : offsets[following][0]].strip():
            words[following] = True
    return words
