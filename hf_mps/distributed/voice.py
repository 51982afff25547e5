"""One voice for all processes of a run: the main one prints, and what ends them is one line on each host.

torchrun and mpirun end the other processes where one fails, and torchrun starts them again where it is told to
(`--max-restarts`). What is done here is words: a rank that lost another one says so, and not what Gloo makes of it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TextIO

from hf_mps.core.errors import FAILED, INTERRUPTED, RunError, UserError, chain
from hf_mps.core.text import summary
from hf_mps.distributed.ranks import Ranks, separate_restarts
from hf_mps.distributed.world import World

GRACE = 1.0
"""Seconds that a rank leaves to the one that knows the cause, or to the main one, before it says why it ends."""
KEPT = 200
"""Lines of a rank's stderr that are kept until the end."""
_process = os.getpid()
# What Gloo, NCCL and the store say to the ranks that are left. Gloo's transport/tcp/pair.cc has the first three.
LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting|Socket Timeout"
    r"|[Nn]o route to host|Connection refused|Network is unreachable|NCCL error|gloo[/:]"
)


class Terminated(KeyboardInterrupt):
    """A SIGTERM that came where nothing could be saved: a launcher sends it where another process has failed."""

    exit_code = 128 + signal.SIGTERM


def on_sigterm(number: int, frame: FrameType | None) -> None:
    """Raise Terminated in the process of a rank; a loader's worker, which was forked from it, ends as it would have."""
    if os.getpid() == _process:
        raise Terminated("another process of this run has failed, or the launcher was told to end")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def lost(error: BaseException) -> str | None:
    """Return in a clause that another process of the run is gone, where an exception says so; else None."""
    if World.here().alone:
        return None
    distributed = sys.modules.get("torch.distributed")
    kinds = (ConnectionError, *((distributed.DistError,) if distributed is not None else ()))
    for one in chain(error):
        words = LOST.findall(str(one)) if isinstance(one, RuntimeError) else []
        if isinstance(one, kinds) or words:
            said = f" ({words[-1]})" if words else ""  # behind the file's name, which begins with gloo/
            return f"another process of this run has ended, or its machine does not answer{said}"
    return None


class _Kept:
    """A text stream that keeps each line, once, and hands it on where there is a stream `beside` it."""

    encoding = "utf-8"

    def __init__(self, beside: TextIO | None = None) -> None:
        self.lines: dict[str, None] = {}
        self._beside = beside
        self._begun = ""

    def write(self, text: str) -> int:
        if self._beside is not None:
            self._beside.write(text)
        *whole, self._begun = (self._begun + text).split("\n")
        for line in whole:
            if line.strip() and len(self.lines) < KEPT:
                self.lines.setdefault(line)
        return len(text)

    def flush(self) -> None:
        if self._beside is not None:
            self._beside.flush()

    def isatty(self) -> bool:
        return self._beside is not None and self._beside.isatty()

    def fileno(self) -> int:
        return (self._beside or sys.__stderr__ or sys.stderr).fileno()


@contextmanager
def one_voice() -> Iterator[None]:
    """Let only the main process print while the context lasts; alone nothing is changed.

    What another rank writes to stderr is kept: at the end the main process shows the lines that it did not write
    itself, and a rank that fails shows its own.
    """
    world = World.here()
    if world.alone:
        yield
        return
    # PyTorch's C++ says on each rank's stderr, past Python's, that a store went away, in a page, and what DDP found of
    # parameters that a step did not use; errors stay. It is read where torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    ranks, stderr = Ranks.here(), sys.stderr
    kept = _Kept(stderr if world.main else None)
    separate_restarts(world.restarts)
    if _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        global _process
        _process = os.getpid()
        signal.signal(signal.SIGTERM, on_sigterm)
    try:
        with ExitStack() as silent:
            if not world.main:
                nowhere = silent.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
                silent.enter_context(redirect_stdout(nowhere))
            silent.enter_context(redirect_stderr(kept))
            yield
    except (Exception, KeyboardInterrupt) as error:
        told = _ending(ranks, error)
        for line in kept.lines if not world.main and not told.quiet else ():
            print(f"[rank {world.rank}] {line}", file=stderr)
        if isinstance(error, UserError | RunError | KeyboardInterrupt) or told.quiet or lost(error):
            raise told from error
        print(f"hf-mps: {told}", file=stderr, flush=True)
        raise  # a bug, with its traceback
    for rank, lines in enumerate(ranks.gather(list(kept.lines))):
        if world.main:
            for line in lines:
                if line not in kept.lines:
                    print(f"[rank {rank}] {line}", file=stderr)
    ranks.leave()


class _End(NamedTuple):
    """Why all processes end, in the words of one of them, and their exit code."""

    rank: int
    line: str
    code: int


def _ending(ranks: Ranks, error: BaseException) -> UserError | RunError:
    """Return what ends this process: the cause that was told first, `quiet` unless this process prints it."""
    if _in_main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which would take the place of the exit code
    if isinstance(error, UserError | RunError) and error.quiet:
        time.sleep(2 * GRACE)  # torchrun ends the others when the first one ends, and one of them says it
        return error
    world, person = ranks.world, isinstance(error, UserError | RunError)
    code = int(getattr(error, "exit_code", INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED))
    gone = lost(error)
    words = str(error) if person or isinstance(error, Terminated) else gone or summary(error)
    if code == INTERRUPTED and not person:
        words = "interrupted"
    of_all = code != FAILED or (person and not any(not isinstance(one, RunError) for one in chain(error)))
    if gone or (of_all and not world.main):
        time.sleep(GRACE)
    if not (gone or getattr(error, "named", False) or (of_all and (world.main or code >= INTERRUPTED))):
        words = f"rank {world.rank} on {platform.node()}: {words}"
    end, prints = _first(ranks, _End(world.rank, words, code))
    told = RunError(end.line)
    told.exit_code = end.code
    told.quiet = not prints
    # torchrun's table of failed processes has a line where it has a traceback, the first cause as the oldest; in the
    # form of torch/distributed/elastic/multiprocessing/errors/error_handler.py.
    if (file := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
        first = end.rank == world.rank
        line = end.line if first else f"ended with rank {end.rank}"
        extra: dict[str, Any] = {"py_callstack": line, "timestamp": str(int(time.time()) + (0 if first else 60))}
        with suppress(OSError):  # a full disk may be why all this ends
            Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}), encoding="utf-8")
    return told


def _first(ranks: Ranks, own: _End) -> tuple[_End, bool]:
    """Return the end that was told first, and whether this process prints it for its host.

    A store whose machine sleeps or is unplugged never answers, and one that is gone raises: then each host's first
    process says what it knows.
    """
    answers = [(own, ranks.world.local_main)]

    def ask() -> None:
        with suppress(Exception):
            end = _End(*json.loads(ranks.store.compare_set("end", "", json.dumps(own))))
            answers.append((end, ranks.store.add(f"said/{ranks.world.node}", 1) == 1))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    # Not longer: a store whose machine sleeps never answers.
    asking.join(timeout=2 * GRACE)
    return answers[-1]


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
