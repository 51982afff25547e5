"""A device's facts: chip, cores, memory and macOS."""

from __future__ import annotations

from dataclasses import dataclass

from hf_mps.core.text import gib
from hf_mps.metal.device import machine, memory


@dataclass(frozen=True)
class Facts:
    """What is known of a device. Sizes in bytes; None where the device has no such figure."""

    device: str  # mps, cuda, cpu
    chip: str
    cores: int | None  # GPU cores; on CUDA its multiprocessors
    memory: int  # what the device has in all; on a Mac the memory that CPU and GPU share
    recommended: int | None  # how much of it a process should use
    macos: str | None

    def lines(self) -> list[str]:
        """Return the facts for a person, a line each."""
        unit = "multiprocessors" if self.device == "cuda" else "GPU cores"
        cores = f", {self.cores} {unit}" if self.cores else ""
        used = f", of which {gib(self.recommended)} recommended" if self.recommended else ""
        return [
            f"device: {self.device}, {self.chip}{cores}",
            f"memory: {gib(self.memory)}{used}",
            f"system: {'macOS ' + self.macos if self.macos else machine.present().system}",
        ]


def facts(device: str) -> Facts:
    """Read the facts of `device`. Imports torch."""
    import torch

    cores = None
    if device == "cuda":
        cores = int(torch.cuda.get_device_properties(0).multi_processor_count)
    elif device == "mps":
        cores = int(torch.backends.mps.get_core_count())
    total, recommended = memory.total(device), memory.recommended(device)
    return Facts(device, machine.chip(device), cores, total, recommended, machine.present().macos)
