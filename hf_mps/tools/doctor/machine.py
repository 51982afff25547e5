"""The machine: which Mac, which Python, which macOS, the command-line tools, its memory and swap."""

from __future__ import annotations

import platform
import subprocess
import sys

from hf_mps.core.text import memory as words
from hf_mps.metal.device import choice, machine, memory
from hf_mps.metal.device.probe import FOR_MACOS_14, OLDEST_MACOS, oldest_macos
from hf_mps.tools.doctor.findings import Finding, note, ok, problem


def examine() -> list[Finding]:
    """Apple silicon, AMD or no Mac; native or translated Python; macOS; the command-line tools."""
    here = machine.present()
    found = [_computer(here), _python(here)]
    if here.simulated:  # before all else, which is to be read with it
        real, chip = machine.real(), here.chip.removesuffix(here.label)
        says = f"this is {real.system} on {real.chip}, which simulates {chip} and its Metal"
        found.insert(0, note("simulated", says, "unset HF_MPS_SIMULATE shows this machine as it is"))
    if here.mac:
        found.append(_macos(here))
        if (place := tools()) is not None:
            found.append(ok("command-line tools", place))
        else:
            says = "not installed; Apple's page asks for them, packages that compile on installation need them"
            found.append(note("command-line tools", says, "xcode-select --install"))
    return found


def _computer(here: machine.Machine) -> Finding:
    if not here.mac:
        says = f"{here.system} on {here.chip}: this is not a Mac, so there is no Metal"
        return problem("computer", says, "HF_MPS_SIMULATE=1 gives this machine a simulated Metal device")
    if here.processor == "x86_64" and not here.rosetta:
        # The last macOS wheels for x86_64 on PyPI are torch 2.2.2's; hf_mps needs a newer torch.
        says = f"a Mac with an Intel processor ({here.chip}): PyTorch has no release for it after 2.2.2, so none for an"
        next = "HF_MPS_DEVICE=cpu trains on the CPU; system_profiler SPDisplaysDataType names the GPU"
        return problem("computer", f"{says} AMD GPU in it", next)
    virtual = ", in a virtual machine" if here.virtual else ""
    return ok("computer", f"a Mac with Apple silicon: {here.chip}{virtual}")


def _python(here: machine.Machine) -> Finding:
    version = f"Python {platform.python_version()} at {sys.executable}"
    if here.rosetta:
        says = f"platform says {here.processor}, the kernel says that the process is translated by Rosetta"
        return problem("python", f"{version}: {says}", "arch -arm64 python3 -m venv metal")
    processor = f"{here.processor}{here.label}"
    return ok("python", f"{version}, {processor}: native" if here.mac else f"{version}, {processor}")


def _macos(here: machine.Machine) -> Finding:
    import torch

    needed = oldest_macos(str(torch.__version__))
    oldest = ".".join(map(str, needed))
    if here.macos is None:
        return note("macos", "the kernel does not report its macOS version", "sw_vers -productVersion")
    if not here.macos_at_least(*needed):
        says = f"macOS {here.macos}; the Metal backend of PyTorch {torch.__version__} needs {oldest} or newer"
        update = "softwareupdate --list"
        return problem("macos", says, f"{FOR_MACOS_14}, or {update}" if here.macos_at_least(*OLDEST_MACOS) else update)
    return ok("macos", f"macOS {here.macos}{here.label}; {oldest} or newer is needed")


def tools() -> str | None:
    """Return the folder of Apple's command-line tools as xcode-select names it, or None where there are none."""
    try:
        asked = subprocess.run(["xcode-select", "-p"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None if asked.returncode == 0 else None


def examine_memory() -> list[Finding]:
    """Memory in all and free, the recommended maximum of the device, swap in use."""
    import psutil
    import torch

    now, swap = psutil.virtual_memory(), psutil.swap_memory()
    here = machine.present()
    total = here.memory or now.total
    available = min(total, now.available)
    says = f"{words(total)} in all{here.label}, {words(available)} free for programs"
    findings = [ok("memory", says)]
    if available < 0.25 * total:
        findings = [note("memory", f"{says}: a training will swap early", "top -o mem")]
    if choice.metal().value:
        recommended = memory.recommended("mps")
        assert recommended is not None
        says = f"a process should hold at most {words(recommended)} on the GPU; PyTorch refuses at 1.7 times that"
        beside = memory.beside_live(str(torch.__version__))
        findings.append(ok("recommended", f"{says}{here.label}; beside live memory {beside}"))
    if swap.used > 0.1 * total:
        says = f"{words(swap.used)} are swapped out, which slows training down many times"
        findings.append(note("swap", says, "top -o mem"))
    else:
        findings.append(ok("swap", f"{words(swap.used)} in use"))
    return findings
