"""A conversation with a saved instruction model: its history, its words as they come, and the base model beside it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.models import language
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.text import chat, tokens
from hf_mps.tools.saved.adapter import Adapter
from hf_mps.tools.saved.run import SavedRun

Write = Callable[[str], None]
Message = dict[str, str]


@dataclass(frozen=True)
class Manner:
    """How answers are made: at most `max_new_tokens`, greedy or (`temperature` above 0) drawn, from `seed`."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    seed: int = 42

    def settings(self) -> dict[str, Any]:
        """The keywords of transformers' `generate`."""
        return {"do_sample": True, "temperature": self.temperature} if self.temperature > 0 else {}


@dataclass
class Voice:
    """A model that takes part in a conversation, with the history as it went for this one.

    `within` is what its words are made in: without the adapter for a base model that shares its weights.
    """

    name: str
    model: Any
    tokenizer: Any
    manner: Manner
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    system: str | None = None
    history: list[Message] = field(default_factory=list)
    left_out: int = 0
    """How many messages the last answer was made without, as all would not fit the model's positions."""

    def answer(self, words: str, write: Write) -> str:
        """Answer the user's `words`, given to `write` piece by piece, and remember both. Returns the whole answer.

        The oldest messages are left out where all are more than the model has positions for. Raises UserError where the
        words alone are, and where the template refuses the conversation.
        """
        asked = [*self.history, {"role": "user", "content": words}]
        ids = self._prompt(asked)
        with self.within():
            (said,) = language.generated(
                self.model,
                self.tokenizer,
                [ids],
                self.manner.max_new_tokens,
                streamer=_streamer(self.tokenizer, write),
                **self.manner.settings(),
            )
        self.history = [*asked, {"role": "assistant", "content": said.strip()}]
        return said

    def forget(self) -> None:
        """Begin a new conversation; the system prompt stays."""
        self.history, self.left_out = [], 0

    def _prompt(self, asked: list[Message]) -> list[int]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        positions = language.positions(self.model)
        room = positions - min(self.manner.max_new_tokens, positions // 4)
        for self.left_out in range(0, len(asked), 2):
            try:
                text = chat.render(self.tokenizer, [*first, *asked[self.left_out :]], prompt=True)
            except chat.ConversationError as error:
                raise UserError(f"the conversation {error}") from error
            ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) <= room:
                return ids
        raise UserError(f"these words are {len(ids)} tokens; allowed: {room}, the model has {positions} positions")


def voices(run: SavedRun, device: str, manner: Manner, *, base: bool) -> tuple[list[Voice], dict[str, Choice[Any]]]:
    """Load the model of `run` onto `device`, and with `base` the one that it was trained from, to speak in turn.

    An adapter's base is the same weights without it; any other is loaded beside. Returns both, and what was chosen.
    Raises UserError for a model that cannot be used, and where the base model is asked for and not there.
    """
    recipe = _recipe(run)
    loaded = language.load(recipe, run.checkpoint)
    loaded.choices["chat_template"] = chat.template(loaded.tokenizer, getattr(recipe, "chat_template", None))
    model = _on(device, run, run.checkpoint, loaded)
    own = Voice("saved", model, loaded.tokenizer, manner)
    if not base:
        return [own], loaded.choices
    if isinstance(run.checkpoint, Adapter):
        return [own, Voice("base", model, loaded.tokenizer, manner, model.disable_adapter)], loaded.choices
    if run.base is None:
        way_on = "leave --base out" if run.results is None else f"its recipe names {run.recipe.model}; fetch it again"
        raise UserError(f"{run.where}: the model that it was trained from is not there to be compared; next: {way_on}")
    beside = language.load(recipe, run.base)
    # The base model is asked in the template that the saved one learned.
    beside.tokenizer.chat_template = loaded.tokenizer.chat_template
    return [own, Voice("base", _on(device, run, run.base, beside), beside.tokenizer, manner)], loaded.choices


def _recipe(run: SavedRun) -> language.Recipe:
    """Return the recipe of a language model, as those of tasks that chat are."""
    recipe = run.to_use
    assert isinstance(recipe, language.Recipe)
    return recipe


def _on(device: str, run: SavedRun, source: Checkpoint, loaded: language.Loaded) -> Any:
    tokens.set_pad_token(loaded.tokenizer, loaded.config)
    model = language.model(_recipe(run), source, loaded, chunks=False)
    return (model if getattr(model, "hf_quantizer", None) else model.to(device)).eval()


def _streamer(tokenizer: Any, write: Write) -> Any:
    """Return transformers' streamer, whose words go to `write`."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                write(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
