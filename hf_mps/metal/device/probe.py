"""Whether Metal really computes here: a small allocation, a matrix product and its result read back, once a process.

The trial finds virtual machines whose every allocation fails (actions/runner-images#9918). Elsewhere the probe believes
PyTorch: a trial costs a program that only asks a context on the GPU, and beside a thread that uses the device it is a
second one that encodes, which PyTorch does not survive (pytorch#197805, #197836).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hf_mps.core import settings
from hf_mps.core.choice import Choice
from hf_mps.core.text import summary
from hf_mps.metal.device import faults, machine
from hf_mps.metal.device.machine import Machine
from hf_mps.metal.device.no_modes import no_modes

# What torch asks of the system: aten/src/ATen/mps/MPSDevice.mm takes a device only where MPSGraph knows a selector that
# came with macOS 14.0 (pytorch#159275).
OLDEST_MACOS = (14, 0)
# The page of 2.15 on Metal names 15.0 (docs.pytorch.org/docs/2.15/notes/mps.html; pytorch pull request 188365). Its
# wheel is tagged macosx_14_0 all the same, so pip installs it on macOS 14, where its GPU is not found.
OLDEST_SINCE_2_15 = (15, 0)
FOR_MACOS_14 = "pip install 'torch<2.15'"

HANDED_DOWN = "_HF_MPS_PROBED"
"""The variable that a process which made a trial leaves to those that it starts; not a user's to set."""

ON_THE_CPU = "to train on the CPU: HF_MPS_DEVICE=cpu"


@dataclass(frozen=True)
class Readings:
    """What the verdict is reached from. `trial` returns whether the product was right and raises where Metal failed."""

    machine: Machine
    torch: str  # the version of PyTorch
    built: bool  # PyTorch was built with Metal
    found: bool  # PyTorch itself says that a Metal device is there
    trial: Callable[[], bool]
    untried: str = ""  # why no trial is made; empty where one is


@dataclass(frozen=True)
class _Known:
    machine: Machine
    verdict: Choice[bool]
    settled: bool  # tried, or a process of ours asked


_lock = threading.Lock()
_known: _Known | None = None


def metal(*, owned: bool = False) -> Choice[bool]:
    """Return whether Metal may be taken, with the reason; found out on the first call in a process.

    `owned` says that the process is ours, a verb's and no plain script's: then Metal is tried on every machine.
    Otherwise it is tried in virtual machines, in CI and with HF_MPS_PROBE=1, where nobody uses it yet. A child process
    never tries it, as it has its parent's verdict, and no process does beside a thread that may use it. Raises
    UserError for a value of HF_MPS_PROBE that nobody knows, and nothing else. Asking creates the device: nobody may
    call this at import.
    """
    import torch  # noqa: F401  first: what loads with it may say which machine this is

    global _known
    here = machine.present()
    with _lock:
        if _known is None or _known.machine != here or (owned and not _known.settled):
            _known = _find_out(here, owned)
        return _known.verdict


def _find_out(here: Machine, owned: bool) -> _Known:
    inherited = handed_down(here)
    if inherited is not None:
        return _Known(here, inherited, settled=True)
    readings = read(here, owned=owned)
    outcome = verdict(readings)
    tried = readings.found and not readings.untried
    if tried:
        hand_down(here, outcome)
    return _Known(here, outcome, settled=tried or owned)


def hand_down(here: Machine, verdict: Choice[bool]) -> None:
    """Leave to the processes that are started from now on what a trial on this machine found.

    A spawned DataLoader worker imports the script and its libraries anew, which ask for Metal again; eight of them
    would each open the GPU for a trial.
    """
    left = {"by": os.getpid(), "of": trial_of(here), "value": verdict.value, "reason": verdict.reason}
    os.environ[HANDED_DOWN] = json.dumps(left)


def handed_down(here: Machine) -> Choice[bool] | None:
    """Return what a trial on this machine, with this torch, found in a process that started this one, else None."""
    try:
        left = json.loads(os.environ.get(HANDED_DOWN, ""))
        if left["by"] != os.getpid() and left["of"] == trial_of(here):
            return Choice(bool(left["value"]), str(left["reason"]))
    except (ValueError, KeyError, TypeError):
        pass
    return None


def trial_of(here: Machine) -> list[str | None]:
    """Return what the outcome of a trial holds for: the chip, macOS and torch."""
    return [here.chip, here.macos, metadata.version("torch")]


def known() -> Choice[bool] | None:
    """Return what `metal` last answered in this process, or None where nobody has asked; asks nothing of the device."""
    return None if _known is None else _known.verdict


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


def read(here: Machine, *, owned: bool = False) -> Readings:
    """Read what the verdict needs; `metal` says where a trial is made. Imports torch."""
    import torch

    # Not torch.backends.mps.is_available: the layer makes that one answer with this probe.
    found = torch.mps.device_count() > 0
    return Readings(
        machine=here,
        torch=str(torch.__version__),
        built=torch.backends.mps.is_built(),
        found=found,
        trial=_trial,
        untried=_why_not(here, owned) if found else "",
    )


def _why_not(here: Machine, owned: bool) -> str:
    """Return why the probe makes no trial, or "" where it makes one."""
    import torch

    if multiprocessing.parent_process() is not None:
        return "a child process tries nothing"
    wanted = settings.probe()
    if wanted is False:
        return "HF_MPS_PROBE=0"
    if not (owned or wanted or here.virtual or settings.in_ci()):
        return "this is no virtual machine"
    # What somebody holds was allocated, so allocations succeed. PyTorch has made its device already, to say that it is
    # there, so that to ask this makes none. Metal's own figure (driver_allocated_memory) may count the device itself.
    in_use = torch.mps.current_allocated_memory() > 0
    # A program of ours with one thread is the only one that encodes, so that its trial harms no work of before.
    alone = threading.active_count() == 1
    return "it is in use already" if in_use and not (owned and alone) else ""


def verdict(readings: Readings) -> Choice[bool]:
    """Return whether Metal may be taken; each way in which it can be absent has its own sentence."""
    here = readings.machine
    if here.rosetta:
        conda = (Path(sys.prefix) / "conda-meta").is_dir()
        made = (
            "CONDA_SUBDIR=osx-arm64 conda create -n metal python=3.12" if conda else "arch -arm64 python3 -m venv metal"
        )
        return Choice(
            False,
            f"this Python is an x86-64 build that runs under Rosetta on {here.chip}, where PyTorch has no Metal; "
            f"make an arm64 environment: {made}",
        )
    if not readings.built:
        return Choice(False, _not_built(readings))
    if not readings.found:
        return Choice(False, _not_found(readings))
    too_old = faults.too_old(readings.torch)
    next_step = f"; {too_old}; next: pip install -U torch" if too_old else ""
    if readings.untried:
        found = f"PyTorch finds Metal on {here.chip}, macOS {here.macos}; not tried: {readings.untried}"
        return Choice(True, found + next_step)
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
    return Choice(True, f"Metal passed its probe on {here.chip}, macOS {here.macos}{next_step}")


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


def oldest_macos(torch: str) -> tuple[int, int]:
    """Return the oldest macOS that this version of PyTorch takes a Metal device from."""
    from packaging.version import Version

    return OLDEST_SINCE_2_15 if Version(torch).release >= (2, 15) else OLDEST_MACOS


def _not_found(readings: Readings) -> str:
    here, oldest = readings.machine, oldest_macos(readings.torch)
    if here.macos is not None and not here.macos_at_least(*oldest):
        if here.macos_at_least(*OLDEST_MACOS):
            return (
                f"PyTorch {readings.torch} has no GPU on macOS {here.macos}: its Metal backend needs macOS "
                f"{oldest[0]}.{oldest[1]} or newer, and pip installs it here all the same; "
                f"take the newest that has one: {FOR_MACOS_14}"
            )
        return (
            f"macOS {here.macos} is too old: PyTorch's Metal backend needs macOS {oldest[0]}.{oldest[1]} or newer; "
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
    what = summary(error).rstrip(". ")
    if here.virtual:
        return (
            f"this is a virtual machine whose Metal GPU fails at its first use ({what}), "
            f"as hosted runners do (actions/runner-images#9918); {ON_THE_CPU}"
        )
    return f"the Metal GPU of {here.chip} fails at its first use ({what}); {ON_THE_CPU}"


def _trial() -> bool:
    """Multiply two matrices on Metal and on the CPU, outside the caller's modes and without random numbers.

    Drawing random numbers here would change the user's.
    """
    import torch

    with no_modes():
        # Small whole numbers: every sum stays below 2^11, so the product is exact in any precision that Metal may use.
        ramp = torch.arange(32 * 32, dtype=torch.float32, device="cpu").reshape(32, 32)
        left, right = ramp % 7 - 3, ramp % 5 - 2
        return bool(torch.equal((left.to("mps") @ right.to("mps")).cpu(), left @ right))
