"""One voice for all processes: what the others print is not shown, what they warn of is, where the main one does not.

The one switch: a command opens it around all that it does, and nobody below asks whether it is the main process before
it prints.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

from hf_mps.core import status
from hf_mps.distributed.ranks import Ranks
from hf_mps.distributed.watch import Watch
from hf_mps.distributed.world import World

GRACE = 1.0
"""Seconds that the main process has to say by what all of them end."""
KEPT = 200
"""Lines of a rank's stderr that are kept until the end."""


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

    What another rank writes to stderr is kept, and shown when it ends: by the main process, with the rank before each
    line that it did not write itself; by the rank itself where it fails, for its last words help nobody in a store.
    """
    world = World.here()
    if world.alone:
        yield
        return
    # PyTorch's C++ says on each rank's stderr, past Python's, that a store went away, in a page, and what DDP found of
    # parameters that a step did not use; errors stay. It is read where torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with Ranks.here().watched() as watch, _of_rank(world, watch):
        yield
    Ranks.here().leave()


@contextmanager
def _of_rank(world: World, watch: Watch) -> Iterator[None]:
    lines: list[str] = []
    if world.main:
        own = _Kept(sys.stderr)
        with redirect_stderr(own), watch.concluding():
            yield
        for rank, theirs in enumerate(Ranks.here().gather(lines)):
            for line in theirs:
                if line not in own.lines:
                    print(f"[rank {rank}] {line}", file=sys.stderr)
        return
    kept, stderr = _Kept(), sys.stderr
    try:
        with ExitStack() as silent:
            nowhere = silent.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            for each in (status.hidden(), redirect_stdout(nowhere), redirect_stderr(kept)):
                silent.enter_context(each)
            with watch.concluding():
                yield
    except BaseException as error:
        if getattr(error, "quiet", False):  # torchrun ends the others when the first one ends
            time.sleep(GRACE)
        else:
            for line in kept.lines:
                print(f"[rank {world.rank}] {line}", file=stderr)
        raise
    Ranks.here().gather(list(kept.lines))
