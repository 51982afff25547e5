"""Guards by which a resumed training is the unbroken one: in scripts on Metal, in a recipe's run on every device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from inspect import unwrap

from hf_mps.core import settings
from hf_mps.layer.guards.catalogue import GUARDS, registry

EVERYWHERE = (
    "atomic-checkpoint",
    "node-weights",
    "resume-batches",
    "resume-end",
    "resume-epoch",
    "resume-loss",
    "resume-names",
    "torn-checkpoint",
)
"""Those whose fault is not Metal's. The other, resume-rng, keeps the random numbers of Metal itself."""
_recipes = 0


def exact_on(device_type: str) -> bool:
    """Return whether a training on a device of this type is resumed exactly."""
    return in_recipe() or device_type == "mps"


def in_recipe() -> bool:
    """Return whether the training that is going on is a recipe's."""
    return _recipes > 0


@contextmanager
def recipe() -> Iterator[None]:
    """Have the trainings of the block resumed exactly on any device."""
    global _recipes
    _recipes += 1
    try:
        yield
    finally:
        _recipes -= 1


def arm_everywhere() -> None:
    """Arm these guards where no Metal device has armed all of them; imports Trainer.

    Modules that have imported skip_first_batches by name, whenever they did, get the patched one too. Raises UserError
    for an unknown name in HF_MPS_GUARDS.
    """
    if registry().started:
        return
    import_module("torch")  # which nothing has imported yet where HF_MPS=0 keeps the layer off
    off = settings.safeguards_off("guard", GUARDS.names)
    registry().start(off, only=frozenset(EVERYWHERE))
    # A module that is imported now is armed by its import hook, and not a second time here.
    for name in (
        "accelerate.data_loader",
        "accelerate.accelerator",
        "transformers.training_args",
        "transformers.trainer_utils",
        "transformers.trainer",
    ):
        registry().install("guard", import_module(name))
    if (mixin := sys.modules.get("transformers.distributed.mixin")) is not None:  # not in older releases
        registry().install("guard", mixin)
    patched = sys.modules["accelerate.data_loader"].skip_first_batches
    for module in tuple(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("skip_first_batches") is unwrap(patched):
            module.skip_first_batches = patched  # type: ignore[attr-defined]
