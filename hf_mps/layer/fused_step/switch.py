"""What the parts of a fused step have in common, and who switches them on.

A script does by HF_MPS_FUSED_STEP=1, for good; a recipe by its plan, while it trains.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hf_mps.core import notices, settings
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.patching import Fallible
from hf_mps.layer.fused_step.parts import PARTS, registry

OFF = "off"
REASON = "a small operation takes longer to start than to compute"
PLAIN = "fused_step=false launches as the plain Trainer does"


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

    devices: frozenset[str] = frozenset()
    line = ""
    by_script = False

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


@dataclass(frozen=True)
class Fused:
    """What a fused step does, in the words of its parts: results.json has them all, a person reads how many."""

    parts: tuple[str, ...]

    def __str__(self) -> str:
        return self.parts[0] if len(self.parts) == 1 else f"fewer, larger GPU operations, by {len(self.parts)} changes"


def parts() -> list[Part]:
    """Return all parts, in the catalogue's order."""
    return registry().each(PARTS.kind)


def arm() -> None:
    """Put every part around what it patches in the libraries that were imported, and in others as they come.

    None acts until it is switched on. Called again, it changes nothing.
    """
    registry().start()
    for name in PARTS.after:
        if name in sys.modules:
            registry().install(PARTS.kind, sys.modules[name])


def for_scripts(
    device_type: str = "mps", *, asked: str = "HF_MPS_FUSED_STEP=1", names: Collection[str] = PARTS.names
) -> str:
    """Switch on, for the rest of the process, what saves time on `device_type`; returns what that changes.

    `asked` is what the script said for it, `names` the parts that this means; what is on stays as it is.
    """
    arm()
    off = (part for part in parts() if part.name in names and device_type not in part.devices)
    acting = [part for part in off if part.pays(device_type)]
    changed = "; ".join(part.what for part in acting)
    for part in acting:
        part.devices |= {device_type}
        part.by_script = True
        part.line = f"{asked}: training steps on {device_type} launch less: {changed}"
    return changed


def choose(asked: bool | None, model: Any, device_type: str) -> Choice[Any]:
    """Decide for a recipe whose key `fused_step` is `asked`: `Fused` with the parts that will act, or OFF, and why.

    Raises UserError for a value of HF_MPS_FUSED_STEP that nobody knows, and for True where no part can act.
    """
    script = settings.fused_step()
    if asked is False:
        return Choice(OFF, "fused_step in the recipe")
    if asked is None and script is False:
        return Choice(OFF, "HF_MPS_FUSED_STEP=0")
    # On the CPU none pays, so none is imported to say so.
    paying = [part for part in parts() if part.pays(device_type)] if device_type != "cpu" else []
    acting = {words: part for part in paying if (words := part.words(model, device_type))}
    if acting:
        # Several save the same, launches; one alone has its own reason.
        reasons = [part.pays(device_type) for part in acting.values()]
        return Choice(Fused(tuple(acting)), f"{REASON if len(reasons) > 1 else reasons[0]}; {PLAIN}")
    nothing = f"on {device_type} PyTorch's own foreach and fused functions save as much"
    if asked:
        raise UserError(f"fused_step is true, and {nothing}; leave it out")
    return Choice(OFF, nothing)


@contextmanager
def running(chosen: Choice[Any], device_type: str) -> Iterator[None]:
    """Switch on what `choose` decided while it is open, and nothing else."""
    # A recipe decides alone: what a script had switched on is off meanwhile, and comes back.
    concerned = parts() if chosen.value != OFF else registry().made(PARTS.kind)
    before = [(part, part.devices, part.by_script) for part in concerned]
    if chosen.value != OFF:
        arm()
    for part in concerned:
        part.by_script = False
        part.devices = frozenset({device_type} if chosen.value != OFF and part.pays(device_type) else ())
    try:
        yield
    finally:
        for part, devices, by_script in before:
            part.devices, part.by_script = devices, by_script
