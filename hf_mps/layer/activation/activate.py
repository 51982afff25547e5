"""Switches the layer on, once in a process, and can say everything that it switched on and why.

`start` is called at the end of `import torch`, where PyTorch's entry point comes (`hf_mps.autoload`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hf_mps.core import import_hooks


class Part:
    """One thing that the layer does: what, whether it is on now, and a sentence why (or why it is not)."""

    # A plain class: making a dataclass or a NamedTuple would cost each `import torch` more than the rest of this file.
    def __init__(self, name: str, on: bool, reason: str) -> None:
        self.name = name
        self.on = on
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.name}: {'on' if self.on else 'off'} ({self.reason})"


class Activation:
    """Everything that the layer does in this process; read when asked, since libraries are imported at any time."""

    def parts(self) -> list[Part]:
        """Return each part with its state. Asks nothing of the device."""
        if not _on:
            return [Part("hf_mps", False, "HF_MPS=0")]
        from hf_mps.metal.device import availability

        torch_itself = Part("torch.backends.mps.is_available", True, availability.REASON)
        return [torch_itself, *(Part(name, *state) for name, state in _parts.items()), *_libraries()]

    def lines(self) -> list[str]:
        """Return the chosen device and each part, a line each. Probes Metal; raises what `device.choose` raises."""
        from hf_mps.metal import kernels
        from hf_mps.metal.device.choice import choose

        return [f"device: {kernels.told(choose())}", *map(str, self.parts())]


_on = False
_parts = {
    **dict.fromkeys(("fallback", "guards", "sentinels"), (False, "this PyTorch has no Metal device")),
    "fused step": (False, "scripts ask for it with HF_MPS_FUSED_STEP=1, recipes have it by fused_step"),
}
"""Part -> whether it is on, and why."""


def is_on() -> bool:
    """Return whether the layer was switched on in this process."""
    return _on


def start() -> None:
    """Load the simulated device where one is asked for and switch the layer on; whatever fails ends in one warning."""
    try:
        switch_on()
    except Exception as error:
        from hf_mps.core.errors import RunError, UserError
        from hf_mps.core.notices import warn
        from hf_mps.core.text import first_line, summary

        told = first_line if isinstance(error, UserError | RunError) else summary
        warn(f"hf_mps stays off: {told(error)}")


def switch_on() -> None:
    """Do what `start` does and raise whatever fails: UserError for a value of a variable that nobody knows."""
    # Reading the variables costs a millisecond (difflib, for the nearest name), most programs set none.
    if any(name.startswith("HF_MPS") for name in os.environ):
        from hf_mps.core import settings

        settings.refuse_unknown()
        settings.device()
        if not settings.enabled():
            return
        profile = settings.simulate()
        if profile:
            # Before anybody asks torch for Metal: PyTorch looks its hooks up once in a process.
            from hf_mps.metal import simulator

            simulator.load(profile)
    activate()


def activate() -> Activation:
    """Switch the layer on and return what that is; calling it again changes nothing. Imports torch.

    No library is imported, no environment variable is changed and the device is not touched: each library is switched
    when it is imported, and the probe runs when somebody first asks for the device. Raises UserError for a value of
    HF_MPS that nobody knows, and for kernels that were asked for (HF_MPS_KERNELS) and cannot run.
    """
    if not _on and enabled():
        with import_hooks.uncollected():
            import torch  # noqa: F401  PyTorch's autoload comes back to this function, which then finds the work done

        if not _on:
            # A simulated device that did not come for the sake of its kernels is no reason to train on the CPU.
            if "HF_MPS_KERNELS" in os.environ:
                from hf_mps.core import settings
                from hf_mps.metal import kernels

                if settings.simulate():
                    kernels.requested()
            with import_hooks.uncollected():
                _switch_on()
    return Activation()


def _switch_on() -> None:
    global _on
    import torch

    from hf_mps.layer import integrations
    from hf_mps.metal.device import availability

    # Not whether there is a device: to ask creates it, and bars every child that is forked from then on (Module.cpp).
    metal = torch.backends.mps.is_built()
    availability.install()
    if metal or "HF_MPS_GUARDS" in os.environ or "HF_MPS_SENTINELS" in os.environ:
        _start_guards(metal=metal)
    integrations.start()
    _on = True
    if "HF_MPS_FUSED_STEP" in os.environ:
        _fuse_steps(metal=metal)
    if metal or "HF_MPS_FALLBACK" in os.environ:
        _start_fallback(metal=metal)


def _asked(question: Callable[..., Any], *arguments: Any, says: str) -> tuple[Any, str]:
    """Return what a setting says; for a value that nobody knows nothing, and why, which a warning `says` as well."""
    from hf_mps.core.errors import UserError

    try:
        return question(*arguments), ""
    except UserError as error:
        from hf_mps.core.notices import warn

        warn(says.format(error))
        return None, str(error)


def _start_fallback(*, metal: bool) -> None:
    """Let operators without a Metal kernel run on the CPU; a value that nobody knows costs this part alone."""
    from hf_mps.core import settings
    from hf_mps.metal import fallback

    start = fallback.start if metal else settings.fallback
    mode, refused = _asked(start, says="hf_mps.metal.fallback stays off: {}")
    if refused:
        _parts["fallback"] = False, refused
    elif metal:
        count = len(fallback.registered())
        _parts["fallback"] = count > 0, f"{mode.reason}: {mode.value}; {count} operators run on the CPU"


def _fuse_steps(*, metal: bool) -> None:
    """Let a script's training steps launch less; a value that nobody knows costs this part alone."""
    from hf_mps.core import settings

    asked, refused = _asked(settings.fused_step, says="{}; training steps stay as they are")
    if refused:
        _parts["fused step"] = False, refused
    elif asked and metal:
        from hf_mps.layer.fused_step import switch

        _parts["fused step"] = True, f"HF_MPS_FUSED_STEP=1: {switch.for_scripts()}"


def _start_guards(*, metal: bool) -> None:
    """Arm guards and sentinels: torch's now, those of libraries when they are imported.

    A name that nobody knows switches nothing off.
    """
    from hf_mps.layer.guards.catalogue import registry

    names = {kind: catalogue.names for kind, catalogue in registry().catalogues.items()}
    off = {kind: _switched_off(kind, names[kind]) for kind in names}
    if not metal:
        return
    registry().start(frozenset().union(*off.values()))

    for kind, words in (("guard", "known hazards of Metal"), ("sentinel", "signs of a wrong training")):
        without = f", without {', '.join(sorted(off[kind]))}" if off[kind] else ""
        count = len(names[kind]) - len(off[kind])
        _parts[f"{kind}s"] = True, f"{count} {words}{without}; hf_mps.guards.report() lists them"


def _switched_off(kind: str, names: tuple[str, ...]) -> frozenset[str]:
    """Return those of `names` that the user wants off; none where the variable has a name that there is not."""
    if f"HF_MPS_{kind.upper()}S" not in os.environ:  # spares the others the reading
        return frozenset()
    from hf_mps.core import settings

    return _asked(settings.safeguards_off, kind, names, says=f"{{}}; every {kind} stays on")[0] or frozenset()


def enabled() -> bool:
    """Return whether the layer is to be on."""
    if "HF_MPS" not in os.environ:  # spares the programs that set no variable the millisecond that reading them costs
        return True
    from hf_mps.core import settings

    return settings.enabled()


def _libraries() -> list[Part]:
    from hf_mps.layer import integrations

    parts = []
    for library in dict.fromkeys(who for several in integrations.table().values() for who in several):
        # Parts that are more than what they do to libraries.
        if library in ("guards", "sentinels", "step", "trainer_logs"):
            continue
        states = [state for (_, who), state in import_hooks.applied.items() if who == library]
        failed = next((state for state in states if state != "on"), None)
        on = bool(states) and not failed
        parts.append(Part(library, on, integrations.reason(library) if on else failed or "waits for its import"))
    return parts
