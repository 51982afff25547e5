"""A conversation with a saved model: it reads the user's words, obeys commands, and writes answers as they come."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from hf_mps.core import status
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest
from hf_mps.core.notices import on_stderr
from hf_mps.finetune.tasks import _language
from hf_mps.finetune.tasks._language import ChatTask
from hf_mps.finetune.text.chat import ConversationError, render
from hf_mps.tools.saved.run import Adapter, SavedRun, answer_in_utf8, on_device, say

COMMANDS = {
    "/reset": "begin a new conversation",
    "/system": "TEXT: the system prompt of a new conversation; without TEXT none",
    "/help": "show these commands",
    "/exit": "end, as Ctrl-D does",
}

Write = Callable[[str], None]
Message = dict[str, str]


@dataclass(frozen=True)
class Manner:
    """How answers are generated: up to `max_new_tokens`, greedy, or sampled from `seed` at a `temperature` above 0."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    seed: int = 42

    def settings(self) -> dict[str, Any]:
        """The keywords of transformers' `generate`."""
        return {"do_sample": True, "temperature": self.temperature} if self.temperature > 0 else {}


@dataclass
class Voice:
    """A model that takes part in a conversation, with its history of it.

    It generates inside the context `within`, which disables the adapter for a base model that shares the weights.
    """

    name: str
    model: Any
    tokenizer: Any
    manner: Manner
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    system: str | None = None
    history: list[Message] = field(default_factory=list)
    left_out: int = 0
    """How many messages the last prompt left out because they did not fit the model's positions."""

    def answer(self, words: str, write: Write) -> str:
        """Answer the user's `words`, pass the answer to `write` piece by piece, remember both and return the answer.

        The prompt leaves out the oldest messages that do not fit the model's positions. Raises UserError where the
        words alone do not fit, and where the template refuses the conversation.
        """
        from transformers import TextStreamer

        class Streamer(TextStreamer):  # type: ignore[misc]
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                if text:
                    write(text)

        asked = [*self.history, {"role": "user", "content": words}]
        ids = self._prompt(asked)
        settings = self.manner.settings()
        settings["streamer"] = Streamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        with self.within():
            (said,) = _language.generated(self.model, self.tokenizer, [ids], self.manner.max_new_tokens, **settings)
        self.history = [*asked, {"role": "assistant", "content": said.strip()}]
        return said

    def forget(self) -> None:
        """Begin a new conversation with the same system prompt."""
        self.history, self.left_out = [], 0

    def _prompt(self, asked: list[Message]) -> list[int]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        positions = _language.positions(self.model)
        room = positions - min(self.manner.max_new_tokens, positions // 4)
        # In pairs, so that what is left begins with the user.
        for self.left_out in range(0, len(asked), 2):
            try:
                text = render(self.tokenizer, [*first, *asked[self.left_out :]], prompt=True)
            except ConversationError as error:
                raise UserError(f"the conversation {error}") from error
            ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) <= room:
                return ids
        allowed = f"up to {room} of the model's {positions} positions"
        raise UserError(f"this message has {len(ids)} tokens; allowed: {allowed}")


def voices(run: SavedRun, device: str, manner: Manner, *, base: bool) -> tuple[list[Voice], dict[str, Choice[Any]]]:
    """Load the model of `run` onto `device`, and with `base` also the model that it was trained from.

    The base of an adapter shares its weights; any other base is loaded as well. Returns the voices and the choices.
    Raises UserError for a model that cannot be used, and for a `base` that is missing.
    """
    task = ChatTask[Any](run.to_use, run.checkpoint)
    task.begin()

    def voice(name: str, opened: ChatTask[Any], *within: Any) -> Voice:
        model = opened.model
        model = (model if getattr(model, "hf_quantizer", None) else model.to(device)).eval()
        return Voice(name, model, opened.tokenizer, manner, *within)

    task.load_language(chunks=False)
    own = voice("saved", task)
    if not base:
        return [own], task.choices
    if isinstance(run.checkpoint, Adapter):
        return [own, voice("base", task, own.model.disable_adapter)], task.choices
    if run.base is None:
        named = f" {run.recipe.model}" if run.results is not None else ""
        raise UserError(f"{run.where}: its base model{named} is not here to compare with; leave --base out")
    beside = ChatTask[Any](run.to_use, run.base)
    beside.open_tokenizer()
    # The base model gets the chat template of the saved model.
    beside.tokenizer.chat_template = task.tokenizer.chat_template
    beside.load_language(chunks=False)
    return [own, voice("base", beside)], task.choices


def chat(run: SavedRun, manner: Manner, *, system: str | None = None, base: bool = False) -> None:
    """Talk with the model of `run` until the input ends.

    A terminal gets prompts; each line of a pipe is a message, and stdout gets only the answers. With `base` the model
    before its training answers as well, with its own history. Raises UserError for a model that does not chat or cannot
    be used, RunError for a failure of the machine.
    """
    if not run.task_class.chats:
        problem = f"{run.where} is a model for {run.task.value} ({run.task.reason}), which does not chat"
        raise UserError(f"{problem}; next: hf-mps predict {run.where} FILE")
    with on_device(run) as (run, device, _, weights), status.shown("loading the model …"):
        import torch

        torch.manual_seed(manner.seed)
        speaking, choices = voices(run, device.value, manner, base=base)
        say(run, device, {"model": choices["model"], "template": choices["chat_template"], **weights})
        status.over()
        for voice in speaking:
            voice.system = system
        conversation(speaking, at_keyboard=bool(sys.stdin and sys.stdin.isatty()))


def conversation(speaking: list[Voice], *, at_keyboard: bool) -> None:
    """Answer line after line; where a line fails, print why on stderr and read the next."""
    if at_keyboard:
        on_stderr("/help shows the commands, Ctrl-D ends")
    if isinstance(sys.stdin, io.TextIOWrapper):
        # UTF-8 in any locale, and one bad line ends no conversation.
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    answer_in_utf8()
    for line in _lines(at_keyboard):
        try:
            if any("\udc80" <= letter <= "\udcff" for letter in line):
                raise UserError("a line that is not UTF-8 text is left out; next: iconv -f latin1 -t utf-8 FILE")
            if line.startswith("/"):
                if _obey(line, speaking):
                    return
            elif line:
                _answers(line, speaking, at_keyboard)
        except UserError as error:
            on_stderr(str(error))


def _answers(line: str, speaking: list[Voice], at_keyboard: bool) -> None:
    before = [voice.history for voice in speaking]
    for voice in speaking:
        if at_keyboard or len(speaking) > 1:
            print(f"{voice.name}> ", end="", flush=True)
        try:
            voice.answer(line, lambda piece: print(piece, end="", flush=True))
        except (KeyboardInterrupt, UserError) as error:
            for speaker, history in zip(speaking, before, strict=True):
                speaker.history = history
            if isinstance(error, UserError) or not at_keyboard:
                raise
            print(" …", flush=True)
            on_stderr("stopped; the conversation forgets this message and its answer")
            return
        print(flush=True)
        if voice.left_out:
            on_stderr(f"the first {voice.left_out} messages no longer fit the model's positions; /reset begins anew")


def _obey(line: str, speaking: list[Voice]) -> bool:
    """Do what a line that begins with / says; return whether it ends the conversation. Raises UserError."""
    word, _, rest = line.partition(" ")
    if word == "/exit":
        return True
    if word == "/help":
        for name, what in COMMANDS.items():
            on_stderr(f"{name}  {what}")
    elif word in ("/reset", "/system"):
        for voice in speaking:
            voice.forget()
            voice.system = voice.system if word == "/reset" else rest.strip() or None
        on_stderr("a new conversation begins")
    else:
        raise UserError(f"{word} is not a command; allowed: {', '.join(COMMANDS)}{nearest(word, COMMANDS)}")
    return False


def _lines(at_keyboard: bool) -> Iterator[str]:
    """Yield the user's lines without white space around them."""
    if not at_keyboard:
        for line in sys.stdin or ():  # None where the shell has closed it
            yield line.strip()
        return
    with suppress(ImportError):
        import readline  # noqa: F401  arrow keys and a history for `input`
    while True:
        try:
            yield input("you> ").strip()
        except EOFError:
            print()
            return
