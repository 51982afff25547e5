"""What one block after the other gives the simulated device, and limits for it: for tests of anybody's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from hf_mps.metal.simulator.counters import Counted, counted

LIMITED = ("launches", "blits", "encoders", "waits", "copies_in", "copies_out")
"""The counts that a test may set a limit to."""
SHOWN = 8
"""How many operators or lines a failure names."""


class Work:
    """Counts over a block, and over the next one anew: `with work: step()`, then `work.at_most(launches=120, waits=0)`.

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

    @property
    def launches(self) -> int:
        """Dispatches of kernels and runs of MPSGraphs, as many as the installed release's host makes on a Mac."""
        return self.counts.launches

    @property
    def blits(self) -> int:
        """Copies by Metal's blit encoder, those between the host and the device among them."""
        return self.counts.blits

    @property
    def encoders(self) -> int:
        """Command encoders: kernels share one until a graph or a blit comes."""
        return self.counts.figures.encoders

    @property
    def waits(self) -> int:
        """How often the program stood still until the device had done everything."""
        return self.counts.waits

    @property
    def copies_in(self) -> int:
        """Copies from the host to the device."""
        return self.counts.copies_in

    @property
    def copies_out(self) -> int:
        """Copies from the device to the host; a number that is read is one."""
        return self.counts.copies_out

    @property
    def operators(self) -> Mapping[str, int]:
        """The launches of each operator ("aten::mm")."""
        return self.counts.operators

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
        figures = vars(self.counts.figures)
        lines = []
        for name, most in limits.items():
            if figures[name] > most:
                lines.append(f"{name}: {figures[name]}, and {most} allowed")
                lines += _most({"launches": self.operators, "waits": self.places}.get(name, {}))
        if lines:
            raise AssertionError("\n".join(lines))


def _most(counts: Mapping[str, int]) -> list[str]:
    """The most frequent of some names, a line each."""
    first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    told = [f"{times:8}  {name}" for name, times in first[:SHOWN]]
    return [*told, f"{sum(times for _, times in first[SHOWN:]):8}  others"] if len(first) > SHOWN else told
