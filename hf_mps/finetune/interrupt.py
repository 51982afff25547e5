"""A Ctrl-C that cannot be lost: Python drops a KeyboardInterrupt that is raised inside a destructor."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from transformers import TrainerCallback


class CtrlC(TrainerCallback):  # type: ignore[misc]
    """A context manager that remembers a SIGINT, and a callback that raises it again at the end of the step.

    A handler that the user's program set is left alone, and so is a thread other than the main one.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    def __enter__(self) -> CtrlC:
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._asked:
            raise KeyboardInterrupt

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        raise KeyboardInterrupt
