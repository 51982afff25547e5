"""What a piece of a program gives the simulated device to do: launches, copies, and waits with the lines that wait.

A wait ends the head start that a program has on its GPU: it hands over what is queued and does nothing until all of it
is done (COMMIT_AND_WAIT in PyTorch's MPSStream.mm). Which calls wait is the installed release's, read from its sources
(native/work.cpp names them). A launch is a dispatch of a kernel or the run of an MPSGraph, as many as the installed
release's host makes for a call (`hf_mps.metal.operators.launch_class`); a blit is a copy by Metal's blit encoder,
between the host and the device or on it; an encoder is begun wherever kernels, graphs and blits take turns. Views,
sizes and empty tensors are none.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hf_mps.core.errors import UserError
from hf_mps.metal.simulator import build

if TYPE_CHECKING:
    from hf_mps.metal.operators.launch_class import Call, LaunchTable

PACKAGE = Path(__file__).parents[2]
PASS_ON = {str(PACKAGE / "core/patching.py"), str(PACKAGE / "layer/guards/kernel_overrides.py")}
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
    """Dispatches of kernels and runs of MPSGraphs, as many as the installed release's host makes on a Mac."""
    blits: int
    """Copies by Metal's blit encoder, those between the host and the device among them."""
    encoders: int
    """Command encoders: kernels share one until a graph or a blit comes."""
    waits: int
    """How often the program waited until the device had done everything."""
    copies_in: int
    """Copies from the host to the device, those that need not wait among them."""
    copies_out: int
    """Copies from the device to the host; a number that is read is one."""
    bytes_in: int
    bytes_out: int


class Counted:
    """The counts since it was made, and until it was stopped: `figures`, and each of them by its name.

    If asked, `places` says how often each line waited.
    """

    def __init__(self) -> None:
        self.places: Counter[Place] = Counter()
        self._metal = _extension()
        self._metal.record_calls(True)
        # The record of calls grows while anybody counts: one that was never stopped must not keep it growing.
        self._forget = weakref.finalize(self, self._metal.record_calls, False)
        self._first, self._start = self._metal.calls_recorded(), self._metal.work_done()
        self._end: tuple[dict[str, int], list[Call]] | None = None

    def __getattr__(self, name: str) -> int:
        if name not in Figures.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return int(getattr(self.figures, name))

    def stop(self) -> None:
        """Count no further."""
        self._end = self._counted()
        self._forget()

    def _counted(self) -> tuple[dict[str, int], list[Call]]:
        """Return the device's own counts, and the calls in their order."""
        from hf_mps.metal.operators.calls import read

        if self._end is not None:
            return self._end
        texts, numbers = self._metal.recorded_calls(self._first)
        now = self._metal.work_done()
        return {name: now[name] - self._start[name] for name in now}, [read(texts[number]) for number in numbers]

    @property
    def calls(self) -> list[Call]:
        """The operators and compiled kernels that were called, in their order; results are not recorded."""
        return self._counted()[1]

    @property
    def figures(self) -> Figures:
        """All counts of this moment."""
        from hf_mps.metal.operators.launch_class import encoders

        counts, calls = self._counted()
        encoded = [_table().encoded(call) for call in calls]
        kinds = Counter(kind for parts in encoded for kind in parts)
        return Figures(kinds.total() - kinds["blit"], kinds["blit"], encoders(encoded), **counts)

    @property
    def operators(self) -> Counter[str]:
        """The launches of each operator ("aten::mm")."""
        table, found = _table(), Counter[str]()
        for call, times in Counter(self.calls).items():
            found[call.operator] += times * sum(kind != "blit" for kind in table.encoded(call))
        return +found


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

    folders = (f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))
    others = (*folders, "<frozen", "<eval_with_key>")
    passed_on = False  # between a function that we wrap, and its caller
    while frame is not None:
        code = frame.f_code
        if code.co_filename in PASS_ON:
            passed_on = code.co_name != "replacement"
        elif not passed_on and not code.co_filename.startswith(others):
            return f"{short(code.co_filename)}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return "autograd"


def short(file: str) -> str:
    """Return a path without the folder of its packages."""
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


LIMITED = ("launches", "blits", "encoders", "waits", "copies_in", "copies_out")
"""The counts that a test may set a limit to."""
SHOWN = 8
"""How many operators or lines a failure names."""


class Work:
    """Counts over a block, and over the next one anew: `with work: step()`, then `work.at_most(launches=120, waits=0)`.

    It has what the block's Counted has (`figures`, `launches`, …, and `operators`, the launches of each).

    pytest gives one by the fixture `metal_work` (`hf_mps.metal.pytest_plugin`). Raises UserError, when a block is
    entered, where no device is simulated, and where somebody counts by place already.
    """

    def __init__(self) -> None:
        self._open = ExitStack()
        self._counts: Counted | None = None

    def __enter__(self) -> Work:
        self._counts = self._open.enter_context(counted(places=True))
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @property
    def counts(self) -> Counted:
        """All of the last block's. Raises RuntimeError before the first."""
        if self._counts is None:
            raise RuntimeError("nothing was counted yet; next: with metal_work: step()")
        return self._counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.counts, name)

    @property
    def places(self) -> Mapping[str, int]:
        """How often each line waited, and for what ("train.py:12 step: item")."""
        return {str(place): times for place, times in self.counts.places.items()}

    def at_most(self, **limits: int) -> None:
        """Raise AssertionError where the block had more of the counts in LIMITED than allowed.

        It names the operators and the lines that there were most of. Raises TypeError for another name.
        """
        __tracebackhide__ = True  # pytest then shows the test's own line
        unknown = sorted(limits.keys() - set(LIMITED))
        if unknown:
            raise TypeError(f"at_most({unknown[0]}=): there is no such count; allowed: {', '.join(LIMITED)}")
        figures = vars(self.figures)
        lines = []
        for name, most in limits.items():
            if figures[name] > most:
                lines.append(f"{name}: {figures[name]}, and {most} allowed")
                lines += _most({"launches": self.operators, "waits": self.places}.get(name, {}))
        if lines:
            raise AssertionError("\n".join(lines))


def _most(counts: Mapping[str, int]) -> list[str]:
    """Return the most frequent of some names, a line each."""
    first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    told = [f"{times:8}  {name}" for name, times in first[:SHOWN]]
    return [*told, f"{sum(times for _, times in first[SHOWN:]):8}  others"] if len(first) > SHOWN else told
