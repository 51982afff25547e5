"""What a piece of a program gives the simulated device to do: launches, copies, and waits with the lines that wait.

A wait ends the head start that a program has on its GPU: it hands over what is queued and stands still until all of it
is done (COMMIT_AND_WAIT in PyTorch's MPSStream.mm). Which calls wait is the installed release's, read from its sources
(native/work.cpp names them). A launch is the call of one operator that computes something; Metal may run several
kernels for it. Views, sizes and empty tensors are none.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hf_mps import kernels
from hf_mps.core.errors import UserError
from hf_mps.simulator import build

OURS = str(Path(__file__).parents[1]) + os.sep
PASS_ON = {f"{OURS}core{os.sep}stock.py", f"{OURS}guards{os.sep}kernel_overrides.py"}
"""Files in which a wrapper of ours calls the function that it wraps. A wait in there is the wrapper's caller's."""


@dataclass(frozen=True)
class Place:
    """Who waits: the line, and for what ("item", "copy to the device", "synchronize", "aten::nonzero", …)."""

    where: str
    """File below its site-packages, line and function of the first caller that is neither torch nor a wrapper of ours
    around one of its functions; "autograd" on the thread of a backward pass, which no Python has called."""
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


@dataclass(frozen=True)
class Figures:
    """Counts; `in` is from the host to the device."""

    launches: int
    waits: int
    copies_in: int
    copies_out: int
    bytes_in: int
    bytes_out: int


class Counted:
    """The counts since it was made, and until it was stopped.

    If asked, `places` says how often each line waited and `operators` how often each ("aten::mm") was launched.
    """

    def __init__(self, *, operators: bool = False) -> None:
        self.places: Counter[Place] = Counter()
        self.operators: Counter[str] = Counter()
        self._named = Counter[str](_extension().named_launches()) if operators else None
        self._start = _figures()
        self._end: Figures | None = None

    def stop(self) -> None:
        """Count no further."""
        self._end = self._end or _figures()
        if self._named is not None:
            self.operators = Counter[str](_extension().named_launches()) - self._named
            self._named = None

    @property
    def figures(self) -> Figures:
        """All counts of this moment."""
        start, now = vars(self._start), vars(self._end or _figures())
        return Figures(**{name: now[name] - start[name] for name in now})

    @property
    def launches(self) -> int:
        """Operators that computed something on the device."""
        return self.figures.launches

    @property
    def waits(self) -> int:
        """How often the program stood still until the device had done everything."""
        return self.figures.waits

    @property
    def copies_in(self) -> int:
        """Copies from the host to the device, those that need not wait among them."""
        return self.figures.copies_in

    @property
    def copies_out(self) -> int:
        """Copies from the device to the host; a number that is read is one."""
        return self.figures.copies_out


@contextmanager
def counted(*, places: bool = False, operators: bool = False) -> Iterator[Counted]:
    """Count what all threads of this process give the device while it is open.

    With `places` each wait is also looked up in Python's stack, by one counter at a time: about 10 microseconds a wait.
    With `operators` each launch is noted by its operator's name, which is there when the block is left. Raises
    UserError where no device is simulated, or where another counter looks places up already.
    """
    global _looking
    metal = _extension()
    if places and _looking:
        raise UserError("somebody counts waits by place already; leave that block first")
    if operators:
        metal.name_launches(True)
    counts = Counted(operators=operators)
    if places:
        _looking = True
        metal.listen(lambda why: counts.places.update([Place(caller(sys._getframe()), why)]))
    try:
        yield counts
    finally:
        counts.stop()
        if operators and kernels.running() is None:  # which count by names for as long as they run
            metal.name_launches(False)
        if places:
            metal.listen(None)
            _looking = False


_looking = False


def caller(frame: FrameType | None) -> str:
    """The first frame from `frame` outwards that is the caller's own, in words; "autograd" where there is none."""
    import torch

    others = (str(Path(torch.__file__).parent) + os.sep, f"{OURS}simulator{os.sep}", "<frozen", "<eval_with_key>")
    passed_on = False  # between the function that something of ours stands around, and its caller
    while frame is not None:
        code = frame.f_code
        if code.co_filename in PASS_ON:
            passed_on = code.co_name != "replacement"
        elif not passed_on and not code.co_filename.startswith(others):
            return f"{short(code.co_filename)}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return "autograd"


def short(file: str) -> str:
    """A path without the folder that its packages lie in."""
    folders = sorted((folder for folder in sys.path if folder and file.startswith(folder + os.sep)), key=len)
    return file.removeprefix(folders[-1] + os.sep) if folders else file


def _figures() -> Figures:
    return Figures(**_extension().work_done())


def _extension() -> Any:
    return build.running("the simulated device counts its work, and none is loaded")
