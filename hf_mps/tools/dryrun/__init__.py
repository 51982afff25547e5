"""A dry run: one training step of a recipe, a model or a script, looked at without a Mac and mostly without weights.

`resolve` reads the user's words, `prepare` makes model and rows of them (in real size without weights, or with weights
on a device), `step` lets transformers' Trainer take its steps over them, `modules` tells which module is at work.
`audit`, `memory` (the verb plan) and `parity` watch the step, and `render` prints what they found.
"""

from __future__ import annotations

import os
import sys

from hf_mps.core import settings
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.metal.device import choose, profiles, simulated


def metal_device() -> Choice[str]:
    """Import torch with a Metal device, real or simulated, and the layer on; "mps" and which one it is.

    Raises UserError where HF_MPS_DEVICE asks for another device or HF_MPS=0 switches the layer off, where the real
    device does not pass its probe, and where the simulated one cannot be had.
    """
    settings.refuse_unknown()
    if settings.device() not in (None, "mps"):
        raise UserError(f"HF_MPS_DEVICE={settings.device()} switches Metal off; next: unset HF_MPS_DEVICE")
    if not settings.enabled():
        raise UserError("HF_MPS=0 switches hf_mps off; next: unset HF_MPS")
    if sys.platform != "darwin" and profiles.requested() is None and "torch" not in sys.modules:
        os.environ["HF_MPS_SIMULATE"] = "1"  # PyTorch's autoload then does all in the right order
    import torch

    from hf_mps.layer.activation.activate import activate
    from hf_mps.metal import simulator

    if sys.platform != "darwin" and simulator.loaded() is None:
        simulator.load(settings.simulate())
    activate()
    chosen = choose()
    if chosen.value != "mps":
        raise UserError(f"there is no Metal device to look at: {chosen.reason}")
    if simulated():
        return Choice("mps", f"simulated Metal, torch {torch.__version__}; no claim about a Mac's speed")
    return Choice("mps", chosen.reason)
