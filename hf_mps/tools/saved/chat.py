"""A conversation at the keyboard or through a pipe: reads the user's words, obeys commands, writes answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from hf_mps.core import status
from hf_mps.core.errors import UserError, nearest
from hf_mps.tools.saved import on_device
from hf_mps.tools.saved.run import SavedRun
from hf_mps.tools.saved.talk import Manner, Voice, voices

COMMANDS = {
    "/reset": "begin a new conversation",
    "/system": "TEXT: the system prompt of a new conversation; without TEXT none",
    "/help": "show these commands",
    "/exit": "end, as Ctrl-D does",
}
ASK = "you> "


def chat(run: SavedRun, manner: Manner, *, system: str | None = None, base: bool = False) -> None:
    """Talk with the model of `run` until the input ends.

    A terminal gets prompts; of a pipe each line is the user's, and answers alone are printed on stdout. With `base` the
    model before its training answers too, each by its own history. Raises UserError for a model that does not chat or
    cannot be used, RunError for a failure of the machine.
    """
    refuse_silent(run)
    with on_device.on_device(run) as (run, device, _, weights), status.shown("loading the model …"):
        import torch

        torch.manual_seed(manner.seed)
        speaking, choices = voices(run, device.value, manner, base=base)
        on_device.say(run, device, {"model": choices["model"], "template": choices["chat_template"], **weights})
        status.over()
        for voice in speaking:
            voice.system = system
        conversation(speaking, at_keyboard=sys.stdin.isatty())


def refuse_silent(run: SavedRun) -> None:
    """Raise UserError for a model of a task that does not chat."""
    if not getattr(run.module, "CHATS", False):
        raise UserError(
            f"{run.where} is of the task {run.task.value} ({run.task.reason}), which does not chat; next:"
            f" hf-mps predict {run.where} FILE"
        )


def conversation(speaking: list[Voice], *, at_keyboard: bool) -> None:
    """Answer line after line; a failure that concerns one line is told on stderr, and the next one is read."""
    if at_keyboard:
        _tell("/help shows the commands, Ctrl-D ends")
    for line in _lines(at_keyboard):
        try:
            if line.startswith("/"):
                if _obey(line, speaking):
                    return
            elif line:
                _answers(line, speaking, at_keyboard)
        except UserError as error:
            _tell(str(error))


def _answers(line: str, speaking: list[Voice], at_keyboard: bool) -> None:
    before = [voice.history for voice in speaking]
    for voice in speaking:
        if at_keyboard or len(speaking) > 1:
            print(f"{voice.name}> ", end="", flush=True)
        try:
            voice.answer(line, lambda piece: print(piece, end="", flush=True))
        except KeyboardInterrupt:
            if not at_keyboard:
                raise
            print(" …", flush=True)
            for each, history in zip(speaking, before, strict=True):
                each.history = history
            _tell("stopped; these words and the answer are forgotten")
            return
        print(flush=True)
        if voice.left_out:
            _tell(f"the first {voice.left_out} messages no longer fit the model's positions; /reset begins anew")


def _obey(line: str, speaking: list[Voice]) -> bool:
    """Do what a line that begins with / says; return whether it ends the conversation. Raises UserError."""
    word, _, rest = line.partition(" ")
    if word == "/exit":
        return True
    if word == "/help":
        for name, what in COMMANDS.items():
            _tell(f"{name}  {what}")
    elif word in ("/reset", "/system"):
        for voice in speaking:
            voice.forget()
            voice.system = voice.system if word == "/reset" else rest.strip() or None
        _tell("a new conversation begins")
    else:
        raise UserError(f"{word} is no command; allowed: {', '.join(COMMANDS)}{nearest(word, COMMANDS)}")
    return False


def _lines(at_keyboard: bool) -> Iterator[str]:
    """Yield the user's lines without white space around them."""
    if not at_keyboard:
        for line in sys.stdin:
            yield line.strip()
        return
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  arrow keys and a history for `input`
    while True:
        try:
            yield input(ASK).strip()
        except EOFError:
            print()
            return


def _tell(words: str) -> None:
    print(f"hf-mps: {words}", file=sys.stderr, flush=True)
