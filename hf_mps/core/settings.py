"""The environment variables of hf_mps, each read and checked here and nowhere else. Imports nothing heavy."""

from __future__ import annotations

import os

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest

KNOWN = {
    "HF_MPS": "0 keeps the layer off, 1 (the default) on",
    "HF_MPS_DEVICE": "mps, cuda or cpu: the one switch that Trainer, Accelerate and Lightning follow",
    "HF_MPS_FALLBACK": "warn, quiet, error or rescue: what an operator without a Metal kernel does",
    "HF_MPS_FALLBACK_SHARE": "0 to 1: the share of the time above which fallbacks are warned of; default 0.1",
    "HF_MPS_FAULTS": "-name,-name: faults of the simulated device that are to be off",
    "HF_MPS_FUSED_STEP": "1: a script's training steps launch less on Metal, their numbers stay within rounding;"
    " 0 or unset: they are as they are",
    "HF_MPS_GUARDS": "-name,-name: guards against known hazards that are to be off",
    "HF_MPS_KERNELS": "2.13.0: the simulated device computes with that release's own Metal kernels, if it was fetched;"
    " 2.13.0,checked: each access is bounded",
    "HF_MPS_SHADERS": "unchecked: Metal source on the simulated device runs without bounding each access",
    "HF_MPS_PROBE": "1: Metal is tried before any program takes it, 0: never; default: in virtual machines and in CI",
    "HF_MPS_SENTINELS": "-name,-name: sentinels, which look for signs of a wrong training, that are to be off;"
    " stop: a loss or gradient that is NaN or infinite ends the run, and so does GPU work that macOS aborted",
    "HF_MPS_SIMULATE": "1 or a profile name: a simulated Metal device",
    "HF_MPS_TRAINING_KERNELS": "0: none of hf_mps' own Metal kernels, 1: all of them, -name,-name: all but these;"
    " by default each that is exact and fast enough here",
}
DEVICES = ("mps", "cuda", "cpu")
FALLBACKS = ("warn", "quiet", "error", "rescue")
REMOVED = {"HF_MPS_SILENCE": "the key training.ddp_timeout, in seconds, ends a run whose processes do not answer"}
"""Variables that earlier releases had, with what to use instead."""
STOP = "stop"
"""In HF_MPS_SENTINELS, alone or beside names."""


def enabled() -> bool:
    """Return whether the layer is on: True unless HF_MPS=0. Raises UserError for any value but 0 and 1."""
    return _switch("HF_MPS") is not False


def device() -> str | None:
    """Return the device type that HF_MPS_DEVICE asks for, or None where it is unset. Raises UserError otherwise."""
    return _one_of("HF_MPS_DEVICE", DEVICES, "device") or None


def probe() -> bool | None:
    """Return whether the user wants Metal tried before it is taken: HF_MPS_PROBE=1 or 0, None where it is unset.

    Raises UserError for any other value.
    """
    return _switch("HF_MPS_PROBE")


def in_ci() -> bool:
    """Return whether continuous integration runs this: CI=true or 1, as GitHub and the others set it."""
    return os.environ.get("CI", "").strip().lower() in ("1", "true")


def fallback() -> Choice[str]:
    """Return what an operator without a Metal kernel does: warn, quiet, error or rescue, and who says so.

    PYTORCH_ENABLE_MPS_FALLBACK=0 means error and 1 means warn; HF_MPS_FALLBACK, the finer word, wins. Raises UserError
    for any other value, and for an error that PyTorch's own fallback would not let happen.
    """
    own = _one_of("HF_MPS_FALLBACK", FALLBACKS, "value")
    theirs = os.environ.get("PYTORCH_ENABLE_MPS_FALLBACK", "").strip()
    if theirs not in ("", "0", "1"):
        raise UserError(f"PYTORCH_ENABLE_MPS_FALLBACK={theirs} is a value that nobody reads; allowed: 0, 1")
    if own == "error" and theirs == "1":
        raise UserError("HF_MPS_FALLBACK=error and PYTORCH_ENABLE_MPS_FALLBACK=1 contradict each other; unset one")
    if own:
        return Choice(own, f"HF_MPS_FALLBACK={own}")
    if theirs:
        return Choice("warn" if theirs == "1" else "error", f"PYTORCH_ENABLE_MPS_FALLBACK={theirs}")
    return Choice("warn", "the default")


def fallback_share() -> float:
    """Return the share of the time, 0 to 1, above which fallbacks are warned of. Raises UserError for anything else."""
    value = os.environ.get("HF_MPS_FALLBACK_SHARE", "").strip() or "0.1"
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UserError(f"HF_MPS_FALLBACK_SHARE={value} is no share; allowed: a number from 0 to 1, for example 0.1")
    return share


def safeguards_off(kind: str, names: tuple[str, ...]) -> frozenset[str]:
    """Return the guards that HF_MPS_GUARDS, or the sentinels that HF_MPS_SENTINELS, switches off, as `-name,-name`.

    `kind` is guard or sentinel, `names` all that there are; sentinels may also be told to `stop`. Raises UserError for
    another name.
    """
    return switched_off(f"HF_MPS_{kind.upper()}S", kind, names, beside=STOP if kind == "sentinel" else "")


def sentinels_stop() -> bool:
    """Whether HF_MPS_SENTINELS, which `safeguards_off` checks, has a loss that is NaN or infinite end the run."""
    return STOP in _words("HF_MPS_SENTINELS")


def simulate() -> str | None:
    """What HF_MPS_SIMULATE says, or None where unset or 0; `hf_mps.metal.device.profiles` knows which profiles there
    are."""
    value = os.environ.get("HF_MPS_SIMULATE", "").strip()
    return None if value in ("", "0") else value


def fused_step() -> bool | None:
    """Return whether scripts are to have their training steps fused: HF_MPS_FUSED_STEP=1 or 0, None where it is unset.

    Raises UserError for any other value.
    """
    return _switch("HF_MPS_FUSED_STEP")


def training_kernels(names: tuple[str, ...]) -> bool | frozenset[str]:
    """Return whether all or none of hf_mps' own Metal kernels are used, or those that HF_MPS_TRAINING_KERNELS refuses.

    Raises UserError for a name that is not in `names`.
    """
    value = os.environ.get("HF_MPS_TRAINING_KERNELS", "").strip()
    if value in ("", "0", "1"):  # asked before each launch
        return value == "1" if value else frozenset()
    return switched_off("HF_MPS_TRAINING_KERNELS", "kernel", names)


def kernels() -> tuple[str, bool] | None:
    """Return the release that HF_MPS_KERNELS names and whether its accesses are to be checked; None where unset or 0.

    Raises UserError for words after the release but `checked`.
    """
    value = os.environ.get("HF_MPS_KERNELS", "").strip()
    release, *others = [word.strip() for word in value.split(",")]
    if release in ("", "0"):
        return None
    if others not in ([], ["checked"]):
        raise UserError(f"HF_MPS_KERNELS={value} is not a value it knows; allowed: RELEASE or RELEASE,checked")
    return release, bool(others)


def shaders_checked() -> bool:
    """Return whether accesses of compiled Metal source are bounded: yes, unless HF_MPS_SHADERS=unchecked.

    Raises UserError for another value.
    """
    return _one_of("HF_MPS_SHADERS", ("checked", "unchecked"), "value") != "unchecked"


def _switch(variable: str) -> bool | None:
    """Return whether a variable is 1, None where it is unset. Raises UserError for any value but 0 and 1."""
    value = os.environ.get(variable, "").strip()
    if value not in ("", "0", "1"):
        raise UserError(f"{variable}={value} is not a value it knows; allowed: 0, 1")
    return value == "1" if value else None


def _one_of(variable: str, allowed: tuple[str, ...], noun: str) -> str:
    """Return the value of a variable, empty where it is unset. Raises UserError for one that is not `allowed`."""
    value = os.environ.get(variable, "").strip()
    if value and value not in allowed:
        words = f"{', '.join(allowed)}{nearest(value, allowed)}"
        raise UserError(f"{variable}={value} is not a {noun} it knows; allowed: {words}")
    return value


def _words(variable: str) -> list[str]:
    return [word for word in (part.strip() for part in os.environ.get(variable, "").split(",")) if word]


def switched_off(variable: str, kind: str, names: tuple[str, ...], beside: str = "") -> frozenset[str]:
    """Return the names that `variable` switches off as `-name,-name`, a list in which the word `beside` may stand too.

    `names` are all that there are of that kind. Raises UserError for another name, and for one without its minus.
    """
    value = os.environ.get(variable, "")
    off = set()
    for word in _words(variable):
        name = word.removeprefix("-")
        if word == beside:
            continue
        if name not in names:
            known = ", ".join(names) + (f"; {beside} is the one word beside them" if beside else "")
            near = nearest(name, (*names, beside) if beside else names)
            raise UserError(f"{variable}={value}: {name} is no {kind}; there are {known}{near}")
        if name == word:
            raise UserError(f"{variable}={value}: {kind}s are on by themselves; -{name} switches one off")
        off.add(name)
    return frozenset(off)


def refuse_unknown() -> None:
    """Raise UserError for a variable that starts with HF_MPS and that nobody reads."""
    for name in sorted(os.environ):
        if name in REMOVED:
            raise UserError(f"{name} was removed; {REMOVED[name]}; next: unset {name}")
        if (name == "HF_MPS" or name.startswith("HF_MPS_")) and name not in KNOWN:
            raise UserError(f"{name} is no variable of hf_mps; it reads {', '.join(KNOWN)}{nearest(name, KNOWN)}")
