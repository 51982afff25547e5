"""The machine that Python runs on: the one place that asks the operating system, and the one place to say otherwise."""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Stands behind each fact of a device that hf_mps.metal.simulator simulates.
SIMULATED = " (simulated)"


@dataclass(frozen=True)
class Machine:
    """What the operating system says of this machine; `memory` is physical memory in bytes, 0 where unknown."""

    system: str  # platform.system(): Darwin, Linux, Windows
    processor: str  # the architecture of this process: arm64, x86_64, aarch64
    chip: str  # "Apple M2 Pro", "Apple M2 Pro (simulated)", or the processor's name
    memory: int
    macos: str | None = None  # "14.5"; None where this is no Mac
    rosetta: bool = False  # an x86-64 process, translated on Apple silicon
    virtual: bool = False  # a virtual machine
    simulated: bool = False  # a Mac that hf_mps.metal.simulator stands in for; its chip's name says so too

    @property
    def label(self) -> str:
        """The suffix of a fact of this machine: that it is simulated, or nothing."""
        return SIMULATED if self.simulated else ""

    @property
    def mac(self) -> bool:
        """Whether this is a Mac."""
        return self.system == "Darwin"

    def macos_at_least(self, major: int, minor: int = 0) -> bool:
        """Return whether the macOS version is known and at least `major.minor`."""
        if self.macos is None:
            return False
        numbers = [int(part) if part.isdigit() else 0 for part in (*self.macos.split("."), "0")[:2]]
        return numbers >= [major, minor]


_overridden: Machine | None = None


def present() -> Machine:
    """Return this machine, read once a process on the first call, or the one that `override` was given."""
    return _overridden if _overridden is not None else real()


@cache
def real() -> Machine:
    """Return the machine that computes, whatever `present` answers; read once a process on the first call."""
    return _read_mac() if sys.platform == "darwin" else _read_other()


def override(machine: Machine | None) -> None:
    """Make `present` answer with `machine` (None: with the real one again); for a simulated device and for tests."""
    global _overridden
    _overridden = machine


def chip(device: str) -> str:
    """Return the name of a device's chip: "Apple M2 Pro", a CUDA GPU's own name, the processor's. Imports torch."""
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    return str(torch.backends.mps.get_name()) if device == "mps" else present().chip


def _read_mac() -> Machine:
    processor = platform.machine()
    # Both keys are the kernel's own word and answer inside a translated process too: `platform` and `uname` say
    # x86_64 there. On an Intel Mac neither key exists.
    rosetta = _sysctl_int("sysctl.proc_translated") == 1 or (
        processor == "x86_64" and _sysctl_int("hw.optional.arm64") == 1
    )
    return Machine(
        system="Darwin",
        processor=processor,
        chip=_sysctl_text("machdep.cpu.brand_string") or platform.processor(),
        memory=_sysctl_int("hw.memsize") or 0,
        # platform.mac_ver() says 10.16 in a Python that was built with an old SDK; the kernel tells the real version.
        macos=_sysctl_text("kern.osproductversion") or platform.mac_ver()[0] or None,
        rosetta=rosetta,
        virtual=_sysctl_int("kern.hv_vmm_present") == 1,
    )


def _read_other() -> Machine:
    import psutil

    chip = _linux_chip() or platform.processor() or platform.machine()
    return Machine(
        system=platform.system(),
        processor=platform.machine(),
        chip=chip,
        memory=int(psutil.virtual_memory().total),
    )


def _linux_chip() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _sysctl(name: str) -> bytes | None:
    """Return the raw bytes of a macOS kernel value, or None where the kernel knows no such name."""
    library = ctypes.CDLL(None)
    size = ctypes.c_size_t(0)
    if library.sysctlbyname(name.encode(), None, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    buffer = ctypes.create_string_buffer(size.value)
    if library.sysctlbyname(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    return buffer.raw[: size.value]


def _sysctl_int(name: str) -> int | None:
    raw = _sysctl(name)
    return int.from_bytes(raw, sys.byteorder) if raw else None


def _sysctl_text(name: str) -> str | None:
    raw = _sysctl(name)
    return raw.rstrip(b"\0").decode(errors="replace") if raw else None
