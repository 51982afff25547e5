"""Which precision a run trains in, and whether one that was asked for can be had: fp32, bf16, fp16 as Trainer says."""

from __future__ import annotations

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest
from hf_mps.device import choice
from hf_mps.device.facts import dtypes, emulates_bfloat16

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def default(device: str | None = None) -> Choice[str]:
    """Return the precision for `device` (by default the chosen one) where nobody asked for another, and why."""
    device = device or choice.choose().value
    if device == "cpu":
        return Choice("fp32", "the CPU's own precision, and the one that others are compared with")
    bf16 = dtypes(device)["bfloat16"]
    if device == "cuda":
        return Choice("bf16" if bf16.value else "fp32", bf16.reason)
    # On Metal half precision is a way to save memory first: M1 and M2 emulate bf16, fp16 needs loss scaling, and the
    # losses of fp32 are the CPU's.
    if not bf16.value:
        return Choice("fp32", f"the one that needs nothing; no bf16: {bf16.reason}")
    if emulates_bfloat16():
        return Choice("fp32", "this chip emulates bf16 in float32, so bf16 would save memory and no time")
    return Choice("fp32", "gives the CPU's losses and needs no loss scaling; bf16 saves memory where it is short")


def requested(name: str, device: str | None = None) -> Choice[str]:
    """Return the precision `name` ('fp32', 'bf16', 'fp16') with its reason on `device`, by default the chosen one.

    Raises UserError where nobody knows the name, or where the device cannot train in it, naming what it would need.
    """
    device = device or choice.choose().value
    if name not in DTYPES:
        raise UserError(f"{name} is no precision; allowed: {', '.join(DTYPES)}{nearest(name, DTYPES)}")
    usable = dtypes(device)[DTYPES[name]]
    if not usable.value:
        raise UserError(f"{name} cannot be used on {device}: {usable.reason}")
    return Choice(name, f"asked for; {usable.reason}")
