"""What a piece of a program gives the simulated device to do: launches, copies, and waits with the lines that wait.

A wait ends the head start that a program has on its GPU: it hands over what is queued and stands still until all of it
is done (COMMIT_AND_WAIT in PyTorch's MPSStream.mm). Which calls wait is the installed release's, read from its sources
(native/work.cpp names them). A launch is a dispatch of a kernel or the run of an MPSGraph, as many as the installed
release's host makes for a call (`hf_mps.metal.operators.dispatches`); a blit is a copy by Metal's blit encoder, between
the host and the device or on it; an encoder is begun wherever kernels, graphs and blits take turns. Views, sizes and
empty tensors are none.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hf_mps.core.errors import UserError
from hf_mps.metal.simulator import build

if TYPE_CHECKING:
    from hf_mps.metal.operators.launch_class import Call, LaunchTable

OURS = str(Path(__file__).parents[2]) + os.sep
PASS_ON = {OURS + file.replace("/", os.sep) for file in ("core/original_call.py", "layer/guards/kernel_overrides.py")}
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
    blits: int
    encoders: int
    waits: int
    copies_in: int
    copies_out: int
    bytes_in: int
    bytes_out: int


class Counted:
    """The counts since it was made, and until it was stopped; if asked, `places` says how often each line waited."""

    def __init__(self) -> None:
        self.places: Counter[Place] = Counter()
        self._metal = _extension()
        self._metal.record_calls(True)
        self._forget = weakref.finalize(self, self._metal.record_calls, False)
        self._first, self._start = self._metal.calls_recorded(), self._metal.work_done()
        self._end: tuple[dict[str, int], list[Call]] | None = None

    def stop(self) -> None:
        """Count no further."""
        self._end = self._counted()
        self._forget()

    def _counted(self) -> tuple[dict[str, int], list[Call]]:
        """The device's own counts, and the calls in their order."""
        from hf_mps.metal.operators.calls import read

        if self._end is not None:
            return self._end
        texts, numbers = self._metal.recorded_calls(self._first)
        calls = [read(text) for text in texts]
        now = self._metal.work_done()
        return {name: now[name] - self._start[name] for name in now}, [calls[number] for number in numbers]

    @property
    def figures(self) -> Figures:
        """All counts of this moment."""
        from hf_mps.metal.operators.dispatches import encoders

        counts, calls = self._counted()
        encoded = [_table().encoded(call) for call in calls]
        kinds = Counter(kind for parts in encoded for kind in parts)
        return Figures(kinds.total() - kinds["blit"], kinds["blit"], encoders(encoded), **counts)

    @property
    def operators(self) -> Counter[str]:
        """The launches of each operator ("aten::mm")."""
        calls, table = self._counted()[1], _table()
        found = Counter[str]()
        for call, times in Counter(calls).items():
            found[call.operator] += times * sum(kind != "blit" for kind in table.encoded(call))
        return +found

    @property
    def launches(self) -> int:
        """Dispatches of kernels and runs of graphs."""
        return self.figures.launches

    @property
    def blits(self) -> int:
        """Copies by the blit encoder, those between the host and the device among them."""
        return self.figures.blits

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
def counted(*, places: bool = False) -> Iterator[Counted]:
    """Count what all threads of this process give the device while it is open.

    With `places` each wait is also looked up in Python's stack, by one counter at a time: about 10 microseconds a wait.
    Raises UserError where no device is simulated, or where another counter looks places up already.
    """
    global _looking
    metal = _extension()
    if places and _looking:
        raise UserError("somebody counts waits by place already; leave that block first")
    counts = Counted()
    if places:
        _looking = True
        metal.listen(lambda why: counts.places.update([Place(caller(sys._getframe()), why)]))
    try:
        yield counts
    finally:
        counts.stop()
        if places:
            metal.listen(None)
            _looking = False


_looking = False


def caller(frame: FrameType | None) -> str:
    """The first frame from `frame` outwards that is the caller's own, in words; "autograd" where there is none."""
    import torch

    others = (
        str(Path(torch.__file__).parent) + os.sep,
        f"{OURS}metal{os.sep}simulator{os.sep}",
        "<frozen",
        "<eval_with_key>",
    )
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


@lru_cache(maxsize=1)
def _table() -> LaunchTable:
    """What the installed release launches on the simulated Mac; of a release that is not known, the next older one."""
    import torch

    from hf_mps.metal.operators import launch_class

    system = (15, 0) if torch.backends.mps.is_macos_or_newer(15, 0) else (14, 0)  # the rules ask no more of it
    return launch_class.nearest(str(torch.__version__), macos=system)


def _extension() -> Any:
    return build.running("the simulated device counts its work, and none is loaded")
