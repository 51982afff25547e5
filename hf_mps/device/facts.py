"""What is known of the chosen device: chip, cores, memory, macOS, the torch build, and each dtype with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hf_mps.core.choice import Choice
from hf_mps.device import choice, machine, memory


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
        used = f", of which {_gib(self.recommended)} recommended" if self.recommended else ""
        build = "built with Metal" if self.built_with_metal else "built without Metal"
        return [
            f"device: {self.device}, {self.chip}{cores}",
            f"memory: {_gib(self.memory)}{used}",
            f"system: {'macOS ' + self.macos if self.macos else machine.present().system}",
            f"torch: {self.torch}, {build}",
            *(f"{name}: {'yes' if usable.value else 'no'} ({usable.reason})" for name, usable in self.dtypes.items()),
        ]


def facts(device: str | None = None) -> Facts:
    """Read the facts of `device`, by default the chosen one. Imports torch; raises UserError as `choose` does."""
    import torch

    device = device or choice.choose().value
    here = machine.present()
    return Facts(
        device=device,
        chip=_chip(device),
        cores=_cores(device),
        memory=memory.total(device),
        recommended=memory.recommended(device),
        macos=here.macos,
        torch=str(torch.__version__),
        built_with_metal=torch.backends.mps.is_built(),
        dtypes=dtypes(device),
    )


def dtypes(device: str) -> dict[str, Choice[bool]]:
    """Return for each floating-point dtype whether a model can be trained in it (or with its autocast) on `device`."""
    if device == "mps":
        return {"float32": _float32(), "float16": _float16(), "bfloat16": _bfloat16(), "float64": _float64()}
    bf16, fp16 = _elsewhere(device)
    return {
        "float32": Choice(True, "every device computes it"),
        "float16": fp16,
        "bfloat16": bf16,
        "float64": Choice(True, f"{device} computes it; slow, and Metal has none"),
    }


def emulates_bfloat16() -> bool:
    """Whether this Metal GPU computes bfloat16 in float32. Source: transformers, is_torch_bf16_gpu_available."""
    generation = re.match(r"Apple M(\d+)", _chip("mps"))
    return generation is not None and int(generation[1]) <= 2


def _float32() -> Choice[bool]:
    return Choice(True, "every Metal GPU computes it")


def _float16() -> Choice[bool]:
    import torch

    if torch.__version__ >= "2.8":
        return Choice(
            True, f"every Metal GPU computes it, and torch {torch.__version__} has its GradScaler (2.8 or newer)"
        )
    return Choice(False, f"its GradScaler needs torch 2.8 or newer; this is {torch.__version__}")


def _bfloat16() -> Choice[bool]:
    import torch

    if torch.__version__ < "2.6":
        return Choice(False, f"it needs torch 2.6 or newer; this is {torch.__version__}")
    if not torch.backends.mps.is_macos_or_newer(14, 0):
        return Choice(False, f"it needs macOS 14.0 or newer; this is macOS {machine.present().macos}")
    if emulates_bfloat16():
        return Choice(
            True, f"macOS 14.0 or newer is here; {_chip('mps')} emulates it in float32, so it saves memory only"
        )
    return Choice(True, f"macOS 14.0 or newer is here, and {_chip('mps')} computes it")


def _float64() -> Choice[bool]:
    # torch raises TypeError: "the MPS framework doesn't support float64" (aten/src/ATen/mps/EmptyTensor.cpp).
    return Choice(
        False, "Metal has no float64 at all; use float32, and convert numpy columns before they reach the device"
    )


def _elsewhere(device: str) -> tuple[Choice[bool], Choice[bool]]:
    """bfloat16 and float16 on CUDA and on the CPU."""
    import torch

    if device == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        name = torch.cuda.get_device_name()
        bf16 = Choice(native, f"{name} {'computes it' if native else 'is older than Ampere, which it needs'}")
        return bf16, Choice(True, f"{name} computes it, and CUDA has its GradScaler")
    # accelerate/accelerator.py: mixed_precision fp16 on a CPU sets no autocast and says nothing.
    silent = "Accelerate switches float16 autocast on for GPUs only and is silent about it; use float32 or bfloat16"
    return Choice(True, "the CPU computes it"), Choice(False, silent)


def _chip(device: str) -> str:
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    get_name = getattr(torch.backends.mps, "get_name", None)  # newer than torch 2.8
    return str(get_name()) if device == "mps" and get_name else machine.present().chip


def _cores(device: str) -> int | None:
    import torch

    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).multi_processor_count)
    get_core_count = getattr(torch.backends.mps, "get_core_count", None)  # newer than torch 2.8
    return int(get_core_count()) if device == "mps" and get_core_count else None


def _gib(size: int | None) -> str:
    return f"{(size or 0) / 2**30:.1f} GiB"
