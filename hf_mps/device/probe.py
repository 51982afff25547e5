"""Whether Metal really computes here: a small allocation, a matrix product and its result read back, once a process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hf_mps.choice import Choice
from hf_mps.device import machine
from hf_mps.device.machine import Machine

# What torch asks of the system: aten/src/ATen/mps/MPSDevice.mm takes a device only where MPSGraph knows a selector that
# came with macOS 14.0 (pytorch#159275). torch 2.8 still took 13; there PyTorch finds the device and nobody reads this.
OLDEST_MACOS = (14, 0)

ON_THE_CPU = "to train on the CPU: HF_MPS_DEVICE=cpu"


@dataclass(frozen=True)
class Readings:
    """What the verdict is reached from. `trial` returns whether the product was right and raises where Metal failed."""

    machine: Machine
    torch: str  # the version of PyTorch
    built: bool  # PyTorch was built with Metal
    found: bool  # PyTorch itself says that a Metal device is there
    trial: Callable[[], bool]


_lock = threading.Lock()
_known: tuple[Machine, Choice[bool]] | None = None


def metal() -> Choice[bool]:
    """Whether Metal may be taken, with the reason; probed on the first call in a process. Never raises.

    The device is used here, so a process that only asks initialises Metal: nobody may call this at import.
    """
    import torch  # noqa: F401  first: what loads with it may say which machine this is

    global _known
    here = machine.present()
    with _lock:
        if _known is None or _known[0] != here:
            _known = (here, verdict(read(here)))
        return _known[1]


def untried() -> Choice[bool]:
    """PyTorch's own word on whether Metal is there, which the libraries take where hf_mps is off."""
    here = machine.present()
    readings = read(here)
    if readings.found:
        return Choice(
            True,
            f"HF_MPS=0 switches hf_mps off, and the libraries take the Metal that PyTorch sees on {here.chip}, untried",
        )
    return Choice(False, verdict(readings).reason)


def read(here: Machine) -> Readings:
    """Ask PyTorch. Imports torch."""
    import torch

    return Readings(
        machine=here,
        torch=str(torch.__version__),
        built=torch.backends.mps.is_built(),
        # Not torch.backends.mps.is_available: the layer makes that one answer with this probe.
        found=torch.mps.device_count() > 0,
        trial=_trial,
    )


def verdict(readings: Readings) -> Choice[bool]:
    """Return whether Metal may be taken; each way in which it can be absent has its own sentence."""
    here = readings.machine
    if here.rosetta:
        return Choice(
            False,
            f"this Python is an x86-64 build that runs under Rosetta on {here.chip}, where PyTorch has no Metal; "
            f"make an arm64 environment: {_arm64_command()}",
        )
    if not readings.built:
        return Choice(False, _not_built(readings))
    if not readings.found:
        return Choice(False, _not_found(here))
    try:
        right = readings.trial()
    except Exception as error:
        return Choice(False, _failed(here, error))
    if not right:
        return Choice(
            False,
            f"a matrix product computed on {here.chip}'s Metal GPU differs from the CPU's, so its results cannot be "
            f"trusted; look for a system update: softwareupdate --list",
        )
    return Choice(True, f"Metal passed its probe on {here.chip}, macOS {here.macos}")


def _arm64_command() -> str:
    if (Path(sys.prefix) / "conda-meta").is_dir():
        return "CONDA_SUBDIR=osx-arm64 conda create -n metal python=3.12"
    return "arch -arm64 python3 -m venv metal"


def _not_built(readings: Readings) -> str:
    here = readings.machine
    if not here.mac:
        return (
            f"this is {here.system}, not a Mac, and PyTorch {readings.torch} is built without Metal; "
            f"for a simulated Metal device: HF_MPS_SIMULATE=1"
        )
    if here.processor == "x86_64":
        return (
            f"this Mac has an Intel processor and PyTorch {readings.torch} is built without Metal; "
            f"PyTorch publishes no such build for it any more; {ON_THE_CPU}"
        )
    return (
        f"PyTorch {readings.torch} is built without Metal, though this is a Mac with {here.chip}; "
        f"install the official build: pip install --force-reinstall torch"
    )


def _not_found(here: Machine) -> str:
    oldest = ".".join(map(str, OLDEST_MACOS))
    if here.macos is not None and not here.macos_at_least(*OLDEST_MACOS):
        return (
            f"macOS {here.macos} is too old: PyTorch's Metal backend needs macOS {oldest} or newer; "
            f"look for an update: softwareupdate --list"
        )
    if here.virtual:
        return f"this is a virtual machine that offers no Metal GPU; {ON_THE_CPU}"
    # A process in a sandbox, or outside the login session, sees no GPU: PyTorch then blames the macOS version.
    return (
        f"macOS {here.macos} is new enough and PyTorch has Metal, but this process sees no Metal GPU, as in a sandbox "
        f"or outside a login session; see what the Mac has: system_profiler SPDisplaysDataType"
    )


def _failed(here: Machine, error: Exception) -> str:
    line = (str(error).strip().splitlines() or [""])[0].rstrip(". ")
    what = f"{type(error).__name__}: {line}" if line else type(error).__name__
    if here.virtual:
        return (
            f"this is a virtual machine whose Metal GPU fails at its first use ({what}), "
            f"as hosted runners do (actions/runner-images#9918); {ON_THE_CPU}"
        )
    return f"the Metal GPU of {here.chip} fails at its first use ({what}); {ON_THE_CPU}"


def _trial() -> bool:
    """Multiply two matrices on Metal and on the CPU; in a thread of its own, and without random numbers.

    Whoever asks may stand inside a FakeTensorMode, `with torch.device(…)`, autocast or inference mode: all of them
    belong to a thread. Drawing random numbers here would change the user's.
    """
    outcome: list[bool | BaseException] = []

    def work() -> None:
        try:
            outcome.append(_product_is_right())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="hf_mps probe", daemon=True)
    thread.start()
    thread.join()
    result = outcome[0]
    if isinstance(result, BaseException):
        raise result
    return result


def _product_is_right() -> bool:
    import torch

    # Small whole numbers: every sum stays below 2^11, so the product is exact in any precision that Metal may use.
    ramp = torch.arange(32 * 32, dtype=torch.float32, device="cpu").reshape(32, 32)
    left, right = ramp % 7 - 3, ramp % 5 - 2
    there = left.to("mps") @ right.to("mps")
    return bool(torch.equal(there.cpu(), left @ right))
