"""What a guard is."""

from __future__ import annotations

from collections.abc import Callable

from hf_mps.core import notices
from hf_mps.core.choice import Choice
from hf_mps.core.patching import Installed, around

__all__ = ["Guard", "around"]


class Guard(Installed):
    """A known hazard and what is done about it; a subclass fills in the four sentences and the two methods.

    A guard acts only where `on` is true, and only on tensors of the device `mps`. `name` is the guard's in
    HF_MPS_GUARDS, in docs/hazards.md and among the faults of tests/hazards.

    It speaks (`acted`) where something is left for a person: the script gets something else than it asked for, a
    resumed run is not the unbroken one, or the hazard stands and a next step is named. Where the script now does what
    it does on every other device, the line stands in the report and in results.json alone (`aloud=False`).

    What a user made (arguments, models, optimizers, loaders, batches) is as it was when stock returns, also by an
    exception; where a guard has to leave a change, a comment there says why. What it has to remember of a training it
    keeps by identity, or in an attribute `_hf_mps_…` of a Trainer or a loader, which nothing saves.
    """

    kind = "guard"
    issue: str
    """The upstream issue, or the place in the library's source."""
    until: str
    """When this file can be deleted."""
    releases: str | None = None
    """Which releases of torch have the fault, as a specifier; None where it is a library's, or of no known release."""
    cures: str = ""
    """Which of them it can cure, where not all: a kernel can be put before the device's from torch 2.9 on."""
    trying = 0
    """How many trials run now: what a trial makes is no training, and no guard has to look at it."""

    def __init__(self) -> None:
        super().__init__()
        self._verdict: Choice[bool] | None = None

    def applies(self) -> Choice[bool]:
        """Whether the installed libraries have the fault, and how that is known; may use the device."""
        raise NotImplementedError

    def trial(self) -> Choice[bool]:
        """What trying the device says of the fault, whatever its chip and release; by default what `applies` says."""
        return self.applies()

    @property
    def needed(self) -> bool:
        """Whether the guard is on and the fault is there; asks `applies` once."""
        return self.on and self.verdict().value

    def verdict(self) -> Choice[bool]:
        """Return what `applies` found, asked on the first call."""
        if self._verdict is None:
            self._verdict = self._tried(self.applies)
        return self._verdict

    def tried(self) -> Choice[bool]:
        """Return what `trial` finds now, for those who want to know the device; the verdict stays as it is."""
        return self._tried(self.trial)

    @staticmethod
    def _tried(look: Callable[[], Choice[bool]]) -> Choice[bool]:
        Guard.trying += 1
        try:
            return look()
        finally:
            Guard.trying -= 1

    def forget(self) -> None:
        """Also ask `applies` anew when next needed."""
        super().forget()
        self._verdict = None

    def say(self, line: str) -> None:
        """Tell the user, with the upstream issue behind it."""
        notices.say(line if self.failure else f"{line} ({self.name}: {self.issue})")
