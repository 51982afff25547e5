"""Conversations: rows of every usual shape become messages, messages become tokens, the assistant's are marked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, neighbour
from hf_mps.core.text import first_line
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.recipe.schema import PLAIN_TEMPLATE
from hf_mps.finetune.text.lengths import IGNORED
from hf_mps.finetune.text.tokens import special_tokens

Message = Mapping[str, Any]
"""{"role", "content"}; the content is a text, or a list of parts, {"type": "text", "text"} and {"type": "image"}."""

# ShareGPT's names ("from", "value") beside OpenAI's ("role", "content").
ROLES = {"system": "system", **dict.fromkeys(("user", "human"), "user")}
ROLES |= dict.fromkeys(("assistant", "gpt", "model"), "assistant")
PLAIN = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '### Response:\\n' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n\\n' }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
    "{% else %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)
"""Alpaca's headings, for tokenizers without a template: plain words, no token that the model has never seen."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Replaces the assistant's words while their place is searched; no template or text holds it.
_STAND_IN = "hf-mps-words-5b1f09c7"


class ConversationError(ValueError):
    """A conversation that cannot be used; the message is a clause that follows the row's number."""


@contextmanager
def of_row(rows: Rows, index: int) -> Iterator[None]:
    """Turn ConversationError into UserError, which names the row."""
    try:
        yield
    except ConversationError as error:
        raise UserError(f"{rows.place(index)} {error}") from error


def refuse_other_than_text(row: Mapping[str, Any], roles: Iterable[str]) -> None:
    """Raise ConversationError where one of `roles` holds no text, of which a row's conversation is made."""
    for role in roles:
        if row[role] is None:
            raise ConversationError(f"has no {role}; allowed: a text in every row")
        if not isinstance(row[role], str):
            allowed = "allowed: a text, or whole conversations in one column (data.columns.messages)"
            raise ConversationError(f"has a {type(row[role]).__name__} for its {role}; {allowed}")


@dataclass(frozen=True)
class Encoded:
    """One conversation: `input_ids`, and `assistant_mask`, True where a token is the assistant's or ends their turn."""

    input_ids: list[int]
    assistant_mask: list[bool]

    def learned(self) -> dict[str, list[int]] | None:
        """Return the tokens and their labels, IGNORED but on the assistant's; None where no label can be learned."""
        # Nothing precedes the first token, so nothing can predict it.
        if not any(self.assistant_mask[1:]):
            return None
        pairs = zip(self.input_ids, self.assistant_mask, strict=True)
        return {"input_ids": self.input_ids, "labels": [one if said else IGNORED for one, said in pairs]}


def template(tokenizer: Any, requested: str | None) -> Choice[str]:
    """Choose the chat template and set it on `tokenizer`, so that it is saved with the model.

    `requested` is `plain` or the path of a Jinja file; None is the tokenizer's own, or `plain` where it has none.
    Raises UserError for a file that cannot be read, and for a tokenizer without the end token that `plain` needs.
    """
    if requested is None and tokenizer.chat_template:
        if _marks_assistant(tokenizer):
            return Choice("the tokenizer's own", "it marks the assistant's words")
        return Choice("the tokenizer's own", "the assistant's words are found in its text")
    if requested not in (None, PLAIN_TEMPLATE):
        tokenizer.chat_template = read_template(str(requested))
        return Choice(str(requested), "chat_template in the recipe")
    if tokenizer.eos_token is None:
        told = "plain needs an end token, and the model's tokenizer has none"
        raise UserError(f"chat_template: {told}; next: a Jinja file")
    # Llama's tokenizer begins every text with a first token: the template has to write it too.
    bos_first = tokenizer.bos_token_id is not None and special_tokens(tokenizer).before == (tokenizer.bos_token_id,)
    tokenizer.chat_template = "{{ bos_token }}" * bos_first + PLAIN
    reason = "chat_template in the recipe" if requested else "the tokenizer has none; Alpaca's headings in plain words"
    return Choice(PLAIN_TEMPLATE, reason)


def read_template(name: str) -> str:
    """Return the text of the Jinja file `name`. Raises UserError where it cannot be read."""
    path = Path(name).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        problem = f"there is no such file{neighbour(path)}"
        raise UserError(f"chat_template: {name}: {problem}; allowed: {PLAIN_TEMPLATE}, a Jinja file") from error
    except (OSError, UnicodeDecodeError) as error:
        why = "cannot be read: " + (getattr(error, "strerror", None) or "it is not UTF-8 text")
        raise UserError(f"chat_template: {name}: {why}; allowed: {PLAIN_TEMPLATE}, a Jinja file") from error


def messages(raw: Any) -> list[dict[str, str]]:
    """Return a conversation in OpenAI's shape. Raises ConversationError for what is neither OpenAI's nor ShareGPT's.

    `raw` is a list of {"role", "content"} or of {"from", "value"}, one dict of either, or a text (the user's).
    """
    if isinstance(raw, str):
        return [{"role": "user", "content": raw}]
    if isinstance(raw, Mapping):
        raw = [raw]
    if not isinstance(raw, Sequence) or not raw:
        raise ConversationError("has no messages; allowed: a list of {role, content} or {from, value}")
    made = []
    for one in raw:
        if not isinstance(one, Mapping):
            kind = type(one).__name__
            raise ConversationError(f"holds a message that is a {kind}; allowed: {{role, content}} or {{from, value}}")
        role = one.get("role") or one.get("from")
        content = one.get("content") if one.get("content") is not None else one.get("value")
        if role not in ROLES:
            raise ConversationError(f"holds a message of '{role}'; allowed: {', '.join(ROLES)}")
        if one.get("tool_calls"):
            raise ConversationError("holds a message that calls a tool; allowed: messages of text alone")
        if not isinstance(content, str):
            raise ConversationError(f"holds a message of {role} without text")
        made.append({"role": ROLES[role], "content": content})
    return made


def without_answer(conversation: list[Any]) -> list[Any]:
    """Return a conversation up to the last words of the user. Raises ConversationError for one that asks nothing."""
    asking = [place for place, message in enumerate(conversation, 1) if message["role"] != "assistant"]
    if not asking:
        raise ConversationError("asks nothing; allowed: words of the user")
    return conversation[: asking[-1]]


def encode(tokenizer: Any, conversation: Sequence[Message]) -> Encoded:
    """Return a conversation's tokens in the tokenizer's template, and which of them are the assistant's.

    A template with `{% generation %}` marks them; for any other template `_spans` finds them in the text. Raises
    ConversationError where the template refuses the conversation or changes the assistant's words.
    """
    if not any(message["role"] == "assistant" for message in conversation):
        allowed = "at least one message of role assistant (or gpt)"
        raise ConversationError(f"has no words of the assistant; allowed: {allowed}")
    # quiet: the tokenizer would warn of rows longer than the model's positions, and the caller cuts those.
    quiet = {"verbose": False}
    if _marks_assistant(tokenizer):
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoding = _rendered(tokenizer, conversation, **options, tokenizer_kwargs=quiet)
        return Encoded(list(encoding["input_ids"]), [bool(one) for one in encoding["assistant_masks"]])
    text = render(tokenizer, conversation)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, **quiet)
    ids, offsets = list(encoding["input_ids"]), encoding["offset_mapping"]
    spans = _spans(tokenizer, conversation, text)
    return Encoded(ids, _assistant_mask(text, spans, ids, offsets, set(tokenizer.all_special_ids)))


def render(tokenizer: Any, conversation: Sequence[Message], *, prompt: bool = False, **settings: Any) -> str:
    """Return the text of a conversation; `prompt` adds the words after which the assistant speaks.

    `settings` are the template's own (enable_thinking). Raises ConversationError where the template refuses the
    conversation.
    """
    return str(_rendered(tokenizer, conversation, tokenize=False, add_generation_prompt=prompt, **settings))


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the special token with which the template ends the assistant's words; None where it ends them otherwise.

    A base model that learned a template may have another end in its generation configuration, and would talk on.
    """
    try:
        encoded = encode(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    except ConversationError:
        return None
    said = [token for token, own in zip(encoded.input_ids, encoded.assistant_mask, strict=True) if own]
    return said[-1] if said and said[-1] in tokenizer.all_special_ids else None


def _marks_assistant(tokenizer: Any) -> bool:
    return isinstance(tokenizer.chat_template, str) and _GENERATION.search(tokenizer.chat_template) is not None


def _rendered(tokenizer: Any, conversation: Sequence[Message], **settings: Any) -> Any:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template([dict(message) for message in conversation], **settings)
    except (TemplateError, TypeError) as error:  # a template's own raise_exception, or roles that it cannot take
        raise ConversationError(f"is refused by the chat template: {first_line(error)}") from error


def _spans(tokenizer: Any, conversation: Sequence[Message], text: str) -> list[tuple[int, int]]:
    """Return where each message of the assistant is in `text`, as [start, end) in characters.

    Raises ConversationError where the template changes the words.
    """
    spans = []
    for turn, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, conversation[:turn], prompt=True) if turn else ""
        content, in_parts = message["content"], not isinstance(message["content"], str)
        stands_in = [{"type": "text", "text": _STAND_IN}] if in_parts else _STAND_IN
        # With the turns that follow: templates such as Qwen3's write the last turn in another way than earlier ones.
        replaced = [*conversation[:turn], {**message, "content": stands_in}, *conversation[turn + 1 :]]
        before, _, after = render(tokenizer, replaced).partition(_STAND_IN)
        content = "".join(part["text"] for part in content) if in_parts else content
        written = (content, content.strip(), content.lstrip(), content.rstrip())
        # Around the stand-in the text must be the whole conversation's, or the template changes the words.
        words = next((one for one in written if before + one + after == text), None)
        if words is not None:
            # A template without a generation prompt writes the role's heading in the turn; the heading is not learned.
            asks = bool(prompt) and prompt != render(tokenizer, conversation[:turn])
            # What a template writes between prompt and words (an empty <think></think>) is the assistant's to say.
            start = len(prompt) if asks and before.startswith(prompt) else len(before)
            spans.append((start, len(before) + len(words)))
        elif turn == len(conversation) - 1 and prompt and text.startswith(prompt):
            # All that follows the prompt is the last turn: some templates set reasoning apart from the answer.
            spans.append((len(prompt), len(text.rstrip())))
        else:
            raise ConversationError(f"has words of the assistant that the chat template changes (message {turn + 1})")
    return spans


def _assistant_mask(
    text: str, spans: Sequence[tuple[int, int]], ids: Sequence[int], offsets: Sequence[Any], special: set[int]
) -> list[bool]:
    """Mark each token inside a span, and the special token right behind it that ends the turn.

    A token that begins before a span counts where it holds only white space there (" Hello" as one token).
    """
    mask = [False] * len(ids)
    for start, end in spans:
        inside = [
            place
            for place, (left, right) in enumerate(offsets)
            if left < end and right > start and not text[left:start].strip() and left < right
        ]
        for place in inside:
            mask[place] = True
        behind = next((place for place, (left, _) in enumerate(offsets) if left >= end), len(ids))
        following = inside[-1] + 1 if inside else behind
        if following < len(ids) and ids[following] in special and not text[end : offsets[following][0]].strip():
            mask[following] = True
    return mask
