"""Each rank watches the others: whichever fails, goes away or is killed, all end within seconds, and one line says why.

A thread of each rank looks into the launcher's store a few times a second, over a connection of its own: it sees what
another rank has written there while its own main thread is blocked in a collective. Where there are several hosts
another thread looks at that one: of a store whose host sleeps or is unplugged it would wait for an answer for ever.
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from hf_mps.core.errors import FAILED, INTERRUPTED, RunError, UserError, chain
from hf_mps.core.text import first_line, summary
from hf_mps.distributed import neighbours
from hf_mps.distributed.world import World

LOOK = 0.2
"""Seconds between two looks into the store."""
BEAT = 5
"""Looks between two signs of life."""
GRACE = 6.0
"""Seconds that a rank has to end by itself, once it is known that all do."""
OF_ALL = 1.0
"""Seconds that another rank waits for the main process to say what all of them end by."""
END, NEWS = "end", "news"


@dataclass(frozen=True)
class End:
    """How a run of several processes ends before its time: at which rank that began, why, and the exit code of all."""

    rank: int
    host: str
    words: str
    code: int = FAILED
    at: float = 0.0
    """Seconds since 1970, by that rank's clock."""
    named: bool = True
    """Whether the line names rank and host: an interruption, or what the user gave, is of all of them."""
    whole: bool = True
    """Whether the words say what the run leaves; else the rank that prints them adds it."""

    @property
    def line(self) -> str:
        """The words, with the rank and its host."""
        return f"rank {self.rank} on {self.host}: {self.words}" if self.named else self.words


class Ended(RunError):
    """All ranks end, as `Watch.end` says; `quiet` in every process but the one of each host that prints the line."""

    def __init__(self, end: End, *, line: str | None = None) -> None:
        super().__init__(line or end.line)
        self.exit_code = end.code
        self.quiet = line is None


class Terminated(KeyboardInterrupt):
    """A SIGTERM that came where nothing could be saved."""

    exit_code = 128 + signal.SIGTERM


class Watch:
    """The look of one rank at the others, as long as the context lasts; `leave` ends the process at once."""

    def __init__(self, world: World, store: Any, *, leave: Callable[[int], Any] = os._exit) -> None:
        self.world = world
        self.store = store
        self.end: End | None = None
        """Why all end, once this rank knows it."""
        self.left: Callable[[], str] = str
        """A clause about what the run leaves, for a line that a dead rank cannot finish."""
        self.turns: list[Callable[[], None]] = []
        """What else the thread does at each look."""
        self.news: list[Callable[[], None]] = []
        """What it does where some rank has published something."""
        self.on_sigterm = self._terminated
        """The handler of SIGTERM while nothing else has one."""
        self._process = os.getpid()
        self._leave = leave
        self._beside = neighbours.Neighbours(world, store)
        self._concluding = False
        self._closed = threading.Event()
        self._learning = threading.Lock()
        self._deadline = float("inf")
        self._seen = 0
        self._turned = 0  # how often the store has answered
        self._deaf = False  # it does not any more
        self._listener = threading.Thread(target=self._listen, name="hf_mps-listener", daemon=True)
        self._thread = threading.Thread(target=self._run, name="hf_mps-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._beside.introduce()
        self._thread.start()
        if self.world.hosts > 1:
            self._listener.start()
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self.on_sigterm)
        return self

    def __exit__(self, *_: object) -> None:
        """Look no more; the others hear that this rank left on its own."""
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) is self.on_sigterm:
            # torchrun's agent still sends one to each rank where all end: it would take the place of the exit code.
            ending = self.end is not None and self._leave is os._exit
            signal.signal(signal.SIGTERM, signal.SIG_IGN if ending else signal.SIG_DFL)
        self._closed.set()
        self._thread.join(timeout=2.0)
        if not self._beside.orphaned() and not self._deaf:
            self._quietly(self._beside.leave)

    def look(self) -> None:
        """Raise Ended where all end: to be called between two steps, and while something is waited for."""
        if self.end is not None:
            raise Ended(self.end)

    def fail(self, words: str, code: int = FAILED, *, named: bool = True) -> End:
        """Let all ranks end because of this one, unless another was first; returns the end that holds for all."""
        here = End(self.world.rank, platform.node(), words, code, time.time(), named)
        return self._announce(here)

    def publish(self, key: str, value: str) -> str:
        """Write a key that the others are to look at, unless it is there already; what it holds then."""
        kept = self.store.compare_set(key, "", value)
        self.store.add(NEWS, 1)
        return bytes(kept).decode()

    def explain(self, error: BaseException) -> End | None:
        """Why `error` ended this rank, where that began elsewhere; may take seconds for one that lost a connection."""
        if self.end is None:
            self._quietly(self._hear_end)
        if self.end is not None:
            return self.end
        signalled = any(isinstance(one, Terminated) for one in chain(error))
        if signalled or neighbours.lost(error):
            # torchrun's agent ends the others by SIGTERM where one of them died: the watchers say which.
            self._wait(2 * BEAT * LOOK)
            if self.end is None and not signalled and (gone := self._beside.silent(2 * BEAT * LOOK)) is not None:
                self._announce(_gone(*gone, neighbours.SILENT))
        return self.end

    @contextmanager
    def concluding(self) -> Iterator[None]:
        """Turn what ends this rank into the end of all: Ended, with the one line in one process of each host.

        A bug's traceback goes through, behind the line. What is `quiet` has been told to all, and is said elsewhere.
        """
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            self._concluding = True
            if getattr(error, "quiet", False) and not isinstance(error, Ended):
                self._wait(GRACE / 2)  # the rank that says it still speaks to this one
                raise
            end = self.explain(error)
            ours = end is None
            if end is None:
                end = self._own(error)
            told = self.told(end)
            if ours and not isinstance(error, UserError | RunError | KeyboardInterrupt):
                self._print(told)
                raise
            raise told from error

    def _own(self, error: BaseException) -> End:
        """What this rank's own error is to all."""
        person = isinstance(error, UserError | RunError)
        words = str(error) if person else summary(error)
        code = int(getattr(error, "exit_code", INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED))
        of_all = code != FAILED or (person and not any(not isinstance(one, RunError) for one in chain(error)))
        if isinstance(error, KeyboardInterrupt):
            words = "interrupted"
        if of_all and not self.world.main:  # the main process says what all of them see
            self._wait(OF_ALL)
        if self.end is not None:
            return self.end
        named = not getattr(error, "named", False) and not (of_all and (self.world.main or code >= INTERRUPTED))
        return self.fail(words, code, named=named)

    def told(self, end: End) -> Ended:
        """The error that ends this process: with the line, where no other process of this host has taken that over."""
        torchruns_table(end, end.line if end.rank == self.world.rank else f"ended with rank {end.rank}")
        if not self._claim(end):
            return Ended(end)
        return Ended(end, line=f"{end.line}{'' if end.whole else self.left()}")

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            if not self._concluding:  # then the end is known, or being asked for
                raise Terminated
            return
        signal.signal(number, signal.SIG_DFL)  # a process that was forked from this one ends as it would have
        os.kill(os.getpid(), number)

    def _run(self) -> None:
        looks = 0
        while not self._closed.wait(LOOK):
            try:
                self._turn(looks)
            except Exception as error:
                # The store is in the launcher's process, or in that of rank 0, and went away with it: a moment earlier
                # than the process itself.
                time.sleep(LOOK)
                lost = _gone(0, platform.node(), f"the ranks lost their store ({first_line(error)})")
                self._learn(_orphan() if self._beside.orphaned() else lost)
            if time.monotonic() > self._deadline and self.end is not None:
                self._force(self.end)
                return
            looks += 1
            self._turned = looks

    def _listen(self) -> None:
        """End this host's ranks where the store does not answer one of the looks, which then never ends.

        Counts looks of its own and no seconds: while Python stands still, as in a long call of a library, none is due.
        """
        silent, seen = 0, 0
        while not self._closed.wait(LOOK):
            silent = silent + 1 if self._turned == seen else 0
            seen = self._turned
            if silent * LOOK > self._beside.silence and not self._deaf:
                self._deaf = True
                words = neighbours.DEAF.format(os.environ.get("MASTER_ADDR", "of rank 0"))
                self._learn(replace(_gone(0, platform.node(), words), named=False))
            if self._deaf and time.monotonic() > self._deadline and self.end is not None:
                self._force(self.end)
                return

    def _turn(self, looks: int) -> None:
        # First: what is written to a store that has gone makes PyTorch print a page.
        if self._beside.orphaned():
            self._learn(_orphan())
        if self.end is not None:
            return
        for turn in self.turns:
            turn()
        news = self.store.add(NEWS, 0)
        if news != self._seen:
            self._seen = news
            self._hear_end()
            for each in self.news:
                each()
        if looks % BEAT == 0:
            self._beside.beat()
            if (dead := self._beside.dead()) is not None:
                self._announce(_gone(*dead, neighbours.DEAD))
            elif self.world.main and (away := self._beside.away(time.monotonic())) is not None:
                self._announce(_gone(*away, neighbours.SILENT))

    def _hear_end(self) -> None:
        if self.store.check([END]):
            self._learn(End(**json.loads(self.store.get(END))))

    def _announce(self, end: End) -> End:
        try:
            end = End(**json.loads(self.publish(END, json.dumps(asdict(end)))))
        except Exception:  # without a store each rank ends for itself
            end = self.end or end
        return self._learn(end)

    def _learn(self, end: End) -> End:
        with self._learning:
            if self.end is None:
                self.end = end
                self._deadline = time.monotonic() + GRACE
                self._bound()
            return self.end

    def _bound(self) -> None:
        """Let the process end even where Python cannot: faulthandler's own thread needs no interpreter."""
        if self._leave is os._exit:
            self._nowhere = Path(os.devnull).open("w")  # noqa: SIM115  as long as the process lives
            faulthandler.dump_traceback_later(3 * GRACE, exit=True, file=self._nowhere)

    def _force(self, end: End) -> None:
        """End the process whose main thread does not: it waits in a collective for a rank that is gone."""
        self._print(self.told(end))
        self._leave(end.code)

    def _print(self, told: Ended) -> None:
        if not told.quiet:
            print(f"hf-mps: {told}", file=sys.__stderr__, flush=True)

    def _claim(self, end: End) -> bool:
        """Whether this is the process of its host that prints the line."""
        if self._beside.orphaned() or self._deaf:
            return self.world.local_main
        try:
            return bool(self.store.add(f"said/{self.world.node}", 1) == 1)
        except Exception:
            return self.world.local_main

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.end is None and time.monotonic() < until:
            time.sleep(LOOK / 4)

    def _quietly(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception:  # the store is gone
            return


def _gone(rank: int, host: str, words: str) -> End:
    return End(rank, host, words, at=time.time(), whole=False)


def _orphan() -> End:
    return replace(_gone(0, platform.node(), neighbours.ORPHANED), named=False)


def torchruns_table(end: End, line: str) -> None:
    """Give torchrun's table of failed processes a line where it has a traceback, the first cause as the oldest.

    In the form of torch/distributed/elastic/multiprocessing/errors/error_handler.py.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    extra = {"py_callstack": line, "timestamp": str(int(end.at) + (line != end.line))}
    with suppress(OSError):  # a full disk may be why all this ends
        Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}), encoding="utf-8")


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
