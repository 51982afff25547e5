"""Lightning (2.5 and up, as `lightning` and as `pytorch_lightning`) follows HF_MPS_DEVICE.

What is known here: MPSAccelerator.is_available also asks platform.processor() for "arm", which a Mac with an AMD GPU
does not answer, so the probe takes its place; and the connectors of Trainer and Fabric, which read `accelerator=` and
`devices=`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_mps import settings
from hf_mps.device.choice import metal, switch
from hf_mps.integrations.patch import around, say

REASON = "Trainer and Fabric follow HF_MPS_DEVICE; the probe, not platform.processor(), says whether Metal is there"


def apply(module: ModuleType) -> None:
    """Switch one of Lightning's modules on. Raises AttributeError where it has no such class or method."""
    if module.__name__.endswith("accelerators.mps"):
        module.MPSAccelerator.is_available = staticmethod(_is_available)
        return
    connector = getattr(module, "_AcceleratorConnector", None) or module._Connector
    around(connector, "_check_config_and_set_final_flags", _accelerator)
    around(connector, "_check_device_config_and_set_final_flags", _devices)


def _is_available() -> bool:
    """Whether Metal passed its probe; DISABLE_MPS=1, Lightning's own switch, holds where HF_MPS_DEVICE is unset."""
    disabled = os.environ.get("DISABLE_MPS", "0") == "1" and settings.device() is None
    return not disabled and metal().value


def _accelerator(stock: Callable[..., None], self: Any, *args: Any, accelerator: Any = "auto", **kwargs: Any) -> None:
    wanted = switch()
    asked = _name(accelerator)
    self._hf_mps_overruled = wanted is not None and asked not in ("auto", "None", wanted)
    if wanted is None:
        if asked == "mps" and not metal().value:
            say(f"accelerator='mps': {metal().reason}")
    elif asked == "gpu" and wanted != "cpu":
        self._hf_mps_overruled = False
    elif self._hf_mps_overruled:
        say(f"HF_MPS_DEVICE={wanted} wins over Lightning's accelerator={asked!r}")
    stock(self, *args, accelerator=accelerator if wanted is None else wanted, **kwargs)


def _devices(stock: Callable[..., None], self: Any, *args: Any, devices: Any = "auto", **kwargs: Any) -> None:
    if getattr(self, "_hf_mps_overruled", False):
        devices = _translated(devices, str(self._accelerator_flag))
    stock(self, *args, devices=devices, **kwargs)


def _name(accelerator: Any) -> str:
    """The name of an accelerator given as a word, a class or an object."""
    if isinstance(accelerator, str) or accelerator is None:
        return str(accelerator)
    kind = accelerator if isinstance(accelerator, type) else type(accelerator)
    return kind.__name__.removesuffix("Accelerator").lower()


def _translated(devices: Any, wanted: str) -> Any:
    """Say on the device of the switch what `devices=` meant on another: indices and "all" mean nothing to a CPU.

    One process each is kept on the CPU; there is one Metal device, so more become one, with a line of notice.
    """
    if devices in ("auto", None):
        return devices
    text = str(devices).strip()
    if text == "-1":
        return "auto"
    count = len(devices) if isinstance(devices, (list, tuple)) else text.count(",") + 1 if "," in text else None
    if wanted == "mps" and (count or int(text)) > 1:
        say(f"HF_MPS_DEVICE=mps: devices={devices!r} becomes 1, there is one Metal device")
        return 1
    return devices if wanted == "cuda" else count or devices
