"""What the parts of a fused step have in common: a switch, words for the header, and faults that are nobody else's."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hf_mps.core import notices
from hf_mps.core.patching import Fallible


class Part(Fallible):
    """One way in which a step launches less; a subclass has the sentences about it, its `patches` and its `words`.

    It acts only on tensors of `devices`, the device types for which it is switched on
    (`hf_mps.layer.fused_step.switch`). The numbers of a step stay within rounding of stock's, and so do the draws'
    distributions; a part says in `what` which of them it changes.
    """

    kind, title = "step", "the fused step's {0.name}"
    what: str
    """What it changes in a step, as the header and the line for scripts say it."""
    why: str
    """What that saves."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: frozenset[str] = frozenset()
        self.line = ""
        self.by_script = False

    @property
    def on(self) -> bool:
        """Return whether it may act on any device."""
        return bool(self.devices) and super().on

    def pays(self, device_type: str) -> str:
        """Return why it saves time on a device of that type; empty where it does not."""
        return self.why if device_type == "mps" else ""

    def words(self, model: Any, device_type: str) -> str:
        """Return what it will do in a training of `model`; empty where that has nothing for it."""
        return self.what

    def acts(self) -> None:
        """To be called where it acts: a script that asked for it by a variable is told once what that changes."""
        if self.line:
            notices.print_notice(self.line)
            self.line = ""

    def unknown(self, module: ModuleType, error: Exception) -> None:
        """This version of the library is not known: that costs this part alone."""
        self.broken = True
        notices.print_notice(
            f"the fused step's {self.name} does not know this version of {module.__name__}"
            f" ({type(error).__name__}: {error}); it is disabled; training continues"
        )
