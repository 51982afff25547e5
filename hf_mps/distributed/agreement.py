"""A stop at one moment of all ranks, though its signal may reach one of them alone, and each at another step.

No collective is added to the steps. The rank that got the signal writes it into the store; the thread of each rank that
reads it there answers with how many moments its rank has passed; the stop is the moment behind the highest answer. From
its answer on a rank goes no further than its next moment before it knows all answers. These need nobody's main thread,
so that a rank that waits there and one that waits for it in a collective do not block each other.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_mps.distributed.watch import Watch

_NEVER = 1 << 60


class Agreement:
    """When all ranks stop; alone, without a `watch`, at the moment that follows the signal.

    `moment` is called where a rank could stop, `ask` by a signal's handler, `close` where stops are over, and `say`, in
    another thread, when this rank hears of the signal.
    """

    def __init__(self, watch: Watch | None, say: Callable[[int], None] | None = None) -> None:
        self._say = say
        self.number: int | None = None
        """The signal that somebody got, once this rank knows of it."""
        self._watch = watch
        self._asked: int | None = None
        self._counting = threading.Lock()
        self._passed = 0
        self._answer: int | None = None
        self._stop = _NEVER
        self._known = threading.Event()
        if watch is not None:
            self._key = f"stop/{len(watch.turns)}"  # the runs of a sweep come one after the other, on every rank
            watch.turns.append(self._tell)
            watch.news.append(self._hear)

    def ask(self, number: int) -> None:
        """Ask all ranks to stop; takes no lock, since it interrupts what the main thread does."""
        self._asked = number
        if self._watch is None:
            self.number = number

    def moment(self) -> int | None:
        """The number of the signal where all ranks stop here, else None.

        May wait for a fraction of a second, and only where a stop was asked for. Raises Ended where another rank has
        failed.
        """
        watch = self._watch
        if watch is None:
            return self.number
        watch.look()
        with self._counting:
            if self._passed >= _NEVER:
                return None
            self._passed += 1
            open_question = self._answer is not None and self._passed > self._answer
        if not open_question:
            return None
        while not self._known.wait(0.05):
            watch.look()
        return self.number if self._passed >= self._stop else None

    def close(self) -> None:
        """Stop nowhere any more: what follows is the end of the run."""
        with self._counting:
            if self._answer is None:
                self._passed = _NEVER

    def _tell(self) -> None:
        """In the watch's thread: hand on what was asked for here."""
        if self._asked is not None and self.number is None and self._watch is not None:
            self._watch.publish(self._key, str(self._asked))

    def _hear(self) -> None:
        """In the watch's thread: answer a question, and read the answers of all."""
        watch = self._watch
        if watch is None or self._known.is_set():
            return
        store, world = watch.store, watch.world
        if self.number is None:
            if not store.check([self._key]):
                return
            self.number = int(store.get(self._key))
            with self._counting:
                self._answer = self._passed
            if self._say is not None and self._answer < _NEVER:
                self._say(self.number)
            watch.publish(f"{self._key}/{world.rank}", json.dumps(self._answer))
        keys = [f"{self._key}/{rank}" for rank in range(world.size)]
        if store.check(keys):
            self._stop = max(json.loads(store.get(key)) for key in keys) + 1
            self._known.set()
