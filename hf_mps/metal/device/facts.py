"""The chosen device's facts: chip, cores, memory, macOS, the torch build, and each dtype with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from hf_mps.core.choice import Choice
from hf_mps.core.text import gib
from hf_mps.metal.device import choice, machine, memory, precision


@dataclass(frozen=True)
class Facts:
    """The device that a run takes. Sizes in bytes; None where the device has no such figure."""

    device: str  # mps, cuda, cpu
    chip: str
    cores: int | None  # GPU cores; on CUDA its multiprocessors
    memory: int  # what the device has in all; on a Mac the memory that CPU and GPU share
    recommended: int | None  # how much of it a process should use
    macos: str | None
    torch: str
    built_with_metal: bool
    dtypes: dict[str, Choice[bool]]  # usable for training or not, and why

    def lines(self) -> list[str]:
        """Return the facts for a person, a line each."""
        unit = "multiprocessors" if self.device == "cuda" else "GPU cores"
        cores = f", {self.cores} {unit}" if self.cores else ""
        used = f", of which {gib(self.recommended)} recommended" if self.recommended else ""
        build = "built with Metal" if self.built_with_metal else "built without Metal"
        return [
            f"device: {self.device}, {self.chip}{cores}",
            f"memory: {gib(self.memory or 0)}{used}",
            f"system: {'macOS ' + self.macos if self.macos else machine.present().system}",
            f"torch: {self.torch}, {build}",
            *(f"{name}: {'yes' if usable.value else 'no'} ({usable.reason})" for name, usable in self.dtypes.items()),
        ]


def facts(device: str | None = None) -> Facts:
    """Read the facts of `device`, by default the chosen one. Imports torch; raises UserError as `choose` does."""
    import torch

    device = device or choice.choose().value
    here, cores = machine.present(), None
    if device == "cuda":
        cores = int(torch.cuda.get_device_properties(0).multi_processor_count)
    elif device == "mps":
        cores = int(torch.backends.mps.get_core_count())
    return Facts(
        device=device,
        chip=machine.chip(device),
        cores=cores,
        memory=memory.total(device),
        recommended=memory.recommended(device),
        macos=here.macos,
        torch=str(torch.__version__),
        built_with_metal=torch.backends.mps.is_built(),
        dtypes=precision.dtypes(device),
    )
