"""Which precision a run trains in, fp32, bf16 or fp16 as Trainer says, and which dtypes a device can train in."""

from __future__ import annotations

import re

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest
from hf_mps.metal.device import choice, machine

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def default(device: str | None = None) -> Choice[str]:
    """Return the precision for `device` (by default the chosen one) where nobody asked for another, and why."""
    device = device or choice.choose().value
    if device == "cpu":
        return Choice("fp32", "the CPU's own precision, and the one that others are compared with")
    if device == "cuda":
        bf16 = dtypes(device)["bfloat16"]
        return Choice("bf16" if bf16.value else "fp32", bf16.reason)
    # On Metal half precision is a way to save memory first: M1 and M2 emulate bf16, fp16 needs loss scaling, and the
    # losses of fp32 are the CPU's.
    if emulates_bfloat16():
        return Choice("fp32", "this chip emulates bf16 in float32, so bf16 would save memory and no time")
    return Choice("fp32", "gives the CPU's losses and needs no loss scaling; bf16 saves memory where it is short")


def requested(name: str, device: str | None = None) -> Choice[str]:
    """Return the precision `name` ('fp32', 'bf16', 'fp16') with its reason on `device`, by default the chosen one.

    Raises UserError where nobody knows the name, or where the device cannot train in it, naming what it would need.
    """
    device = device or choice.choose().value
    if name not in DTYPES:
        raise UserError(f"{name} is no precision; allowed: {', '.join(DTYPES)}{nearest(name, DTYPES)}")
    usable = dtypes(device)[DTYPES[name]]
    if not usable.value:
        raise UserError(f"{name} cannot be used on {device}: {usable.reason}")
    return Choice(name, f"asked for; {usable.reason}")


def dtypes(device: str) -> dict[str, Choice[bool]]:
    """Return for each floating-point dtype whether a model can be trained in it (or with its autocast) on `device`."""
    if device == "mps":
        every, name = Choice(True, "every Metal GPU computes it"), machine.chip("mps")
        emulated = f"{name} emulates it in float32, so it saves memory only"
        # torch raises TypeError: "the MPS framework doesn't support float64" (aten/src/ATen/mps/EmptyTensor.cpp).
        none = "Metal has no float64 at all; use float32, and convert numpy columns before they reach the device"
        bf16 = Choice(True, emulated if emulates_bfloat16() else f"{name} computes it")
        return {"float32": every, "float16": every, "bfloat16": bf16, "float64": Choice(False, none)}
    if device == "cuda":
        import torch

        native, name = torch.cuda.is_bf16_supported(including_emulation=False), torch.cuda.get_device_name()
        bf16 = Choice(native, f"{name} {'computes it' if native else 'is older than Ampere, which it needs'}")
        fp16 = Choice(True, f"{name} computes it, and CUDA has its GradScaler")
    else:
        # accelerate/accelerator.py: mixed_precision fp16 on a CPU sets no autocast and says nothing.
        silent = "Accelerate switches float16 autocast on for GPUs only and is silent about it; use float32 or bfloat16"
        bf16, fp16 = Choice(True, "the CPU computes it"), Choice(False, silent)
    return {
        "float32": Choice(True, "every device computes it"),
        "float16": fp16,
        "bfloat16": bf16,
        "float64": Choice(True, f"{device} computes it; slow, and Metal has none"),
    }


def emulates_bfloat16() -> bool:
    """Return whether this Metal GPU computes bfloat16 in float32. Source: transformers, is_torch_bf16_gpu_available."""
    generation = re.match(r"Apple M(\d+)", machine.chip("mps"))
    return generation is not None and int(generation[1]) <= 2
