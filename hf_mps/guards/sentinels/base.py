"""What a sentinel is."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from hf_mps.core import notices
from hf_mps.guards.base import Safeguard
from hf_mps.guards.sentinels.stream import STREAM


class Sentinel(Safeguard):
    """Looks at every training on the device `mps`, whatever its loop; a subclass fills in the sentences and `look`.

    `what` says what it looks for. It speaks once for each training, in one line.
    """

    kind = "sentinel"
    repeats = True
    why: str
    """When it speaks, and whether it stops the run, with the reason; no final full stop."""

    def install(self, module: ModuleType) -> None:
        """Also see what trainings show (`stream`), which comes with torch."""
        if module.__name__ == "torch":
            STREAM.show(self, module)
        super().install(module)

    def look(self, series: Any, losses: Sequence[tuple[int, float]], norms: Sequence[tuple[int, float]]) -> None:
        """See new losses and gradient norms of one training (a `stream.Series`), each with its optimizer step."""

    def look_at_skipped(self, training: Any, losses: Sequence[float]) -> None:
        """See the losses of several steps in a row that GradScaler skipped; `training` is its series or its scaler."""

    def before_update(self, series: Any, optimizer: Any) -> None:
        """See one of the first `stream.FIRST` optimizer steps, with its gradients, before the weights change."""

    def say(self, line: str) -> None:
        """Tell the user, with the way to switch the sentinel off."""
        off = "" if self.failure else f" (sentinel; HF_MPS_SENTINELS=-{self.name} switches it off)"
        notices.say(f"{line}{off}", notices.SentinelNotice, again=True)

    def reasons(self) -> tuple[str, str, str, str]:
        """What it looks for; it stays."""
        return self.what, "", "", ""
