"""Lightning (2.5 and up, as `lightning` and as `pytorch_lightning`) follows HF_MPS_DEVICE.

What is known here: MPSAccelerator.is_available also asks platform.processor() for "arm", which a Mac with an AMD GPU
does not answer, so the probe takes its place; and the connectors of Trainer and Fabric, which read `accelerator=` and
`devices=`. They refuse DDP on mps, which has one device; over several hosts, `num_nodes=`, it trains by the backend of
hf_mps.distributed.metal, once the strategy asks for no stream of CUDA's around DDP.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from hf_mps.core import settings
from hf_mps.core.notices import print_notice
from hf_mps.core.patching import CONNECTORS, Put
from hf_mps.layer.integrations import say_if_metal_fails
from hf_mps.metal.device.choice import metal, switch

REASON = "Trainer and Fabric follow HF_MPS_DEVICE; the probe, not platform.processor(), says whether Metal is there"


hosts_unknown = False
"""While a connector looks at a strategy, of which it refuses DDP on mps, before it knows of how many hosts."""


def _is_available() -> bool:
    """Whether Metal passed its probe; DISABLE_MPS=1, Lightning's own switch, holds where HF_MPS_DEVICE is unset."""
    if hosts_unknown:
        return False
    disabled = os.environ.get("DISABLE_MPS", "0") == "1" and settings.device() is None
    return not disabled and metal().value


def _accelerator(stock: Callable[..., None], self: Any, *args: Any, accelerator: Any = "auto", **kwargs: Any) -> None:
    device_type = switch()
    asked = _name(accelerator)
    same = ("auto", "None", device_type) if device_type == "cpu" else ("auto", "None", "gpu", device_type)
    self._hf_mps_overruled = device_type is not None and asked not in same
    if self._hf_mps_overruled:
        print_notice(f"HF_MPS_DEVICE={device_type} wins over Lightning's accelerator={asked!r}")
    elif device_type is None and asked in ("auto", "gpu"):
        say_if_metal_fails()
    elif device_type is None and asked == "mps" and not metal().value:
        # Lightning refuses it below, without a reason.
        print_notice(f"accelerator='mps': {metal().reason}")
    kwargs["accelerator"] = accelerator if device_type is None else device_type
    self._hf_mps_refusal = None
    try:
        stock(self, *args, **kwargs)
    except ValueError as refusal:
        if "DDP family" not in str(refusal):
            raise
        self._hf_mps_refusal = refusal
        # The same call with a strategy that is for several hosts, if there are several: `_devices` sees that.
        with patch(f"{__name__}.hosts_unknown", True):
            stock(self, *args, **kwargs)


def _devices(stock: Any, self: Any, *args: Any, devices: Any = "auto", **kwargs: Any) -> None:
    refusal = getattr(self, "_hf_mps_refusal", None)
    if refusal is not None and kwargs.get("num_nodes", 1) in (1, "1"):
        stock.foreign(_refuse, refusal)
    wanted = switch()
    if wanted == "cpu":
        devices = _processes(devices)
    elif wanted == "mps" and self._hf_mps_overruled:
        devices = _one(devices)
    stock(self, *args, devices=devices, **kwargs)


def _refuse(refusal: ValueError) -> None:
    raise refusal


def _no_stream(stock: Callable[..., Any], self: Any) -> Any:
    """DDP's `device_ids`: none on mps, where they would have CUDA asked for a stream."""
    return None if self.root_device.type == "mps" else stock(self)


def _name(accelerator: Any) -> str:
    """Return the name of an accelerator given as a word, a class or an object."""
    if isinstance(accelerator, str) or accelerator is None:
        return str(accelerator)
    kind = accelerator if isinstance(accelerator, type) else type(accelerator)
    return kind.__name__.removesuffix("Accelerator").lower()


def _processes(devices: Any) -> Any:
    """Say in processes on the CPU what `devices=` said in GPUs: a list of n indices is n, all of them is "auto"."""
    text = str(devices).strip()
    if text == "-1":
        return "auto"
    if isinstance(devices, list | tuple):
        return len(devices)
    return len([part for part in text.split(",") if part]) if "," in text else devices


def _one(devices: Any) -> Any:
    """Turn a `devices=` meant for another accelerator into the one Metal device, with a line of notice for more."""
    if devices in ("auto", None):
        return devices
    if _processes(devices) not in (1, "1", "auto"):
        print_notice(f"HF_MPS_DEVICE=mps: devices={devices!r} becomes 1, there is one Metal device")
    return 1


_STRATEGIES = {
    "lightning.fabric.strategies.ddp:DDPStrategy": "_determine_ddp_device_ids",
    "lightning_fabric.strategies.ddp:DDPStrategy": "_determine_ddp_device_ids",
    "lightning.pytorch.strategies.ddp:DDPStrategy": "determine_ddp_device_ids",
    "pytorch_lightning.strategies.ddp:DDPStrategy": "determine_ddp_device_ids",
}
patches = {
    **{f"{strategy}.{method}": "_no_stream" for strategy, method in _STRATEGIES.items()},
    **{
        f"{package}.accelerators.mps:MPSAccelerator.is_available": Put(lambda stock: staticmethod(_is_available))
        for package in ("lightning.fabric", "lightning_fabric")
    },
    **{f"{connector}._check_config_and_set_final_flags": "_accelerator" for connector in CONNECTORS},
    **{f"{connector}._check_device_config_and_set_final_flags": "_devices" for connector in CONNECTORS},
}
