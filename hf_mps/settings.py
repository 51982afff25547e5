"""The environment variables of hf_mps, each read and checked here and nowhere else. Imports nothing heavy."""

from __future__ import annotations

import os

from hf_mps.errors import UserError, nearest

KNOWN = {
    "HF_MPS": "0 keeps the layer off, 1 (the default) on",
    "HF_MPS_DEVICE": "mps, cuda or cpu: the one switch that Trainer, Accelerate and Lightning follow",
    "HF_MPS_SIMULATE": "1 or a profile name: a simulated Metal device",
}
DEVICES = ("mps", "cuda", "cpu")


def enabled() -> bool:
    """Whether the layer is on: True unless HF_MPS=0. Raises UserError for any value but 0 and 1."""
    value = os.environ.get("HF_MPS", "1").strip() or "1"
    if value not in ("0", "1"):
        raise UserError(f"HF_MPS={value} is not a value it knows; allowed: 0, 1")
    return value == "1"


def device() -> str | None:
    """The device type that HF_MPS_DEVICE asks for, or None where it is unset. Raises UserError otherwise."""
    value = os.environ.get("HF_MPS_DEVICE", "").strip()
    if value and value not in DEVICES:
        raise UserError(
            f"HF_MPS_DEVICE={value} is not a device it knows; allowed: {', '.join(DEVICES)}{nearest(value, DEVICES)}"
        )
    return value or None


def simulate() -> str | None:
    """The profile that HF_MPS_SIMULATE asks for ("1" is the default profile), or None where unset or 0."""
    value = os.environ.get("HF_MPS_SIMULATE", "").strip()
    return None if value in ("", "0") else value


def refuse_unknown() -> None:
    """Raise UserError for a variable that starts with HF_MPS and that nobody reads."""
    for name in sorted(os.environ):
        if (name == "HF_MPS" or name.startswith("HF_MPS_")) and name not in KNOWN:
            raise UserError(f"{name} is no variable of hf_mps; it reads {', '.join(KNOWN)}{nearest(name, KNOWN)}")
