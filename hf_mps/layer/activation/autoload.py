"""Switches the layer on at the end of `import torch`, where PyTorch's entry point comes (`hf_mps.autoload`)."""

from __future__ import annotations

import os


def start() -> None:
    """Load the simulated device where one is asked for and switch the layer on; whatever fails ends in one warning."""
    try:
        switch_on()
    except Exception as error:
        from hf_mps.core.notices import warn

        warn(f"hf_mps stays off: {_line(error)}")


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
    from hf_mps.layer.activation.activate import activate

    activate()


def _line(error: Exception) -> str:
    from hf_mps.core.errors import RunError, UserError
    from hf_mps.core.text import first_line, summary

    return first_line(error) if isinstance(error, UserError | RunError) else summary(error)
