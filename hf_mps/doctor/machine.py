"""The machine: which Mac, which Python, which macOS, the command-line tools."""

from __future__ import annotations

import platform
import subprocess
import sys

from hf_mps.device import machine as machines
from hf_mps.device.probe import OLDEST_MACOS, oldest_macos
from hf_mps.doctor.finding import Finding, note, ok, problem


def examine() -> list[Finding]:
    """Apple silicon, AMD or no Mac; native or translated Python; macOS; the command-line tools."""
    here = machines.present()
    found = [_simulated(here, machines.real())] if here.simulated else []
    found += [_computer(here), _python(here)]
    if here.mac:
        found += [_macos(here), _tools()]
    return found


def _simulated(here: machines.Machine, real: machines.Machine) -> Finding:
    """What everything below is to be read with."""
    says = f"this is {real.system} on {real.chip}, which simulates {here.chip.removesuffix(here.label)} and its Metal"
    return note("simulated", says, "unset HF_MPS_SIMULATE shows this machine as it is")


def _computer(here: machines.Machine) -> Finding:
    if not here.mac:
        return problem(
            "computer",
            f"{here.system} on {here.chip}: no Mac, so there is no Metal",
            "HF_MPS_SIMULATE=1 gives this machine a simulated Metal device",
        )
    if here.processor == "x86_64" and not here.rosetta:
        # The last macOS wheels for x86_64 on PyPI are torch 2.2.2's; hf_mps needs a newer torch.
        return problem(
            "computer",
            f"a Mac with an Intel processor ({here.chip}): PyTorch has no release for it after 2.2.2, so none for an "
            "AMD GPU in it",
            "HF_MPS_DEVICE=cpu trains on the CPU; system_profiler SPDisplaysDataType names the GPU",
        )
    virtual = ", in a virtual machine" if here.virtual else ""
    return ok("computer", f"a Mac with Apple silicon: {here.chip}{virtual}")


def _python(here: machines.Machine) -> Finding:
    version = f"Python {platform.python_version()} at {sys.executable}"
    if here.rosetta:
        return problem(
            "python",
            f"{version}: platform says {here.processor}, the kernel says that the process is translated by Rosetta",
            "arch -arm64 python3 -m venv metal",
        )
    processor = f"{here.processor}{here.label}"
    return ok("python", f"{version}, {processor}: native" if here.mac else f"{version}, {processor}")


def _macos(here: machines.Machine) -> Finding:
    import torch

    wanted = oldest_macos(str(torch.__version__))
    oldest = ".".join(map(str, wanted))
    if here.macos is None:
        return note("macos", "the kernel does not tell its macOS version", "sw_vers -productVersion")
    if not here.macos_at_least(*wanted):
        says = f"macOS {here.macos}; the Metal backend of PyTorch {torch.__version__} needs {oldest} or newer"
        older = ", or python -m pip install 'torch<2.15'" if here.macos_at_least(*OLDEST_MACOS) else ""
        return problem("macos", says, f"softwareupdate --list{older}")
    return ok("macos", f"macOS {here.macos}{here.label}; {oldest} or newer is needed")


def _tools() -> Finding:
    place = tools()
    if place is None:
        return note(
            "command-line tools",
            "not installed; Apple's page asks for them, packages that compile on installation need them",
            "xcode-select --install",
        )
    return ok("command-line tools", place)


def tools() -> str | None:
    """The folder of Apple's command-line tools as xcode-select names it, or None where there are none."""
    try:
        asked = subprocess.run(["xcode-select", "-p"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None if asked.returncode == 0 else None
