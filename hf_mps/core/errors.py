"""Errors for people: one line on stderr and an exit code; a traceback means a bug of ours."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING
from unicodedata import category

if TYPE_CHECKING:
    from pathlib import Path

MISUSE = 2
FAILED = 1
# 128 and the number of SIGINT, as a shell reports it.
INTERRUPTED = 130
# Unicode's control letters, line and paragraph separators, and halves of a letter, which no terminal can take.
BREAKING = ("Cc", "Zl", "Zp", "Cs")
# The letters that an error shows of a name or value: a cell of a table may hold a whole text.
SHOWN = 60
# Rows of a batch at most: more is a slip of the keyboard, and would be noticed after a minute.
LARGEST_BATCH = 1_000_000


class _OneLine(Exception):
    """An error whose words are one line, whatever somebody's file or command line holds that they show.

    Where several processes end by one error, it is `quiet` in all but the one that prints it.
    """

    quiet = False
    named = False
    """Whether the words say already at which rank it came about."""

    def __str__(self) -> str:
        return "".join(ascii(letter)[1:-1] if category(letter) in BREAKING else letter for letter in super().__str__())


class UserError(_OneLine):
    """What the user gave cannot be used: one line that says what came, what is allowed, the next command. Exit 2."""

    exit_code = MISUSE


class RunError(_OneLine):
    """A run that was asked for rightly and failed (no space left, a diverged loss, …): one line. Exit 1."""

    exit_code = FAILED


class Notice(UserWarning):
    """Something that the layer says; an exception only where the user turned warnings into errors."""


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, innermost last, each once."""
    seen: set[int] = set()
    here: BaseException | None = error
    while here is not None and id(here) not in seen:
        seen.add(id(here))
        yield here
        here = here.__cause__ or here.__context__


def brief(text: str) -> str:
    """Return a name or value of somebody's data as a line has room for it."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest of `allowed`, or an empty string where none is near."""
    near = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""


def user_path(word: str | Path) -> Path:
    """Return the path that somebody typed, with the home folder for ~.

    Raises UserError for what the system takes for no path: too long a name, an unknown user's home, a folder that is
    closed to this user.
    """
    from pathlib import Path  # the start of every program imports this module

    try:
        path = Path(word).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{brief(str(word))} cannot be opened: {why}; allowed: the path of a file or folder") from error
    return path


def neighbour(path: Path) -> str:
    """Return a clause for a path that is not there: the nearest name in its folder, or a word about the folder."""
    if not path.parent.is_dir():
        return f"; the folder {path.parent} is not there either"
    return nearest(path.name, [other.name for other in path.parent.iterdir()])


def run_command(command: Callable[[], None], *, debug: bool = False) -> int:
    """Run `command` and return the process's exit code, with a person's error on stderr in one line.

    With `debug` every exception is shown whole. Ctrl-C returns 130, as a shell reports it.
    """
    try:
        command()
        print(end="", flush=True)  # by print, as sys.stdout is None where the shell has closed it
    except (UserError, RunError) as error:
        if debug:
            raise
        if not error.quiet:
            print(f"hf-mps: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `| head` has read what it wanted
        # Python flushes stdout once more at exit, and would fail there (docs.python.org, "Note on SIGPIPE").
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt as error:
        if debug:
            raise
        # A second Ctrl-C may come while the first one's line is on its way here.
        told = next((cause for cause in chain(error) if isinstance(cause, RunError)), RunError("interrupted"))
        print(f"hf-mps: {told}", file=sys.stderr)
        return INTERRUPTED
    return 0
