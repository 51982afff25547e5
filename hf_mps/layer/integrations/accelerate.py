"""Accelerate (1.10 and up) follows HF_MPS_DEVICE, and trains over several Macs; what is known here is its state.py.

Accelerator, AcceleratorState and notebook_launcher all reach their device through PartialState, which takes Metal where
torch.backends.mps.is_available says so (availability answers that) and otherwise obeys `cpu=`, ACCELERATE_USE_CPU and
ACCELERATE_TORCH_DEVICE, in ways that only this class knows. Of several processes it knows a kind for each accelerator
but mps, where each would train as if it were alone; with the kind MULTI_CPU, the one that says nothing of a GPU's
streams, its DDP, gathering and seeds work on mps as they are (accelerator.py, prepare_model; utils/operations.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from hf_mps.core.errors import UserError
from hf_mps.core.notices import ignoring, print_notice
from hf_mps.core.patching import Put
from hf_mps.distributed.world import World
from hf_mps.layer.integrations import say_if_metal_fails
from hf_mps.metal.device.choice import metal, switch

REASON = "PartialState, Accelerator and notebooks follow HF_MPS_DEVICE; PYTORCH_ENABLE_MPS_FALLBACK stays the user's"


def _partial_state(stock: Callable[..., None], self: Any, cpu: bool = False, **kwargs: Any) -> None:
    device_type = switch()
    if not World.here().alone:
        stock = _with_all_threads(stock)
    if self._shared_state:  # one state for the whole process: it was decided before
        _say_if_too_late(device_type, self._shared_state.get("device"))
        return stock(self, cpu, **kwargs)
    named = os.environ.get("ACCELERATE_TORCH_DEVICE", "").partition(":")[0]
    if device_type is None:
        if named == "mps" and not cpu and not metal().value:
            raise UserError(f"ACCELERATE_TORCH_DEVICE=mps: {metal().reason}")
        if not cpu and not named:
            say_if_metal_fails()
        return stock(self, cpu, **kwargs)
    if cpu and device_type != "cpu":
        from accelerate.utils import parse_flag_from_env

        asked = "ACCELERATE_USE_CPU" if parse_flag_from_env("ACCELERATE_USE_CPU") else "cpu=True"
        print_notice(f"HF_MPS_DEVICE={device_type} wins over Accelerate's {asked}")
    if named and named != device_type:
        print_notice(f"HF_MPS_DEVICE={device_type} wins over ACCELERATE_TORCH_DEVICE={named}")
    stock(self, device_type == "cpu", **kwargs)
    if self.device.type != device_type and self.distributed_type.name == "NO":
        self.device = torch.device(device_type)
    return None


def _with_all_threads(stock: Callable[..., None]) -> Callable[..., None]:
    """Return the same, with as many threads of the CPU afterwards as before where it trains on mps."""

    def state_made(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        # With the kind MULTI_CPU it sets their number for a training on the CPU, and warns that it does.
        threads = torch.get_num_threads()
        with ignoring(UserWarning, "OMP_NUM_THREADS/MKL_NUM_THREADS unset"):
            stock(self, cpu, **kwargs)
        if self.device.type == "mps" and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    return state_made


def _prepare_backend(
    stock: Callable[..., Any], self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
) -> Any:
    chosen, kind = stock(self, cpu, sagemaker_dp, backend)
    several = not World.here().alone
    if not several or kind.name != "NO" or cpu or (self.device is not None and self.device.type != "mps"):
        return chosen, kind
    if not metal().value:
        return chosen, kind
    # Before its set_device, which would read the device from the kind.
    self.device = torch.device("mps")
    return chosen or torch.distributed.get_default_backend_for_device("mps"), type(kind).MULTI_CPU


def _say_if_too_late(wanted: str | None, device: Any) -> None:
    if wanted is not None and device is not None and device.type != wanted:
        print_notice(
            f"HF_MPS_DEVICE={wanted} comes too late: Accelerate is on {device.type} already; start a new process"
        )


def _check_initialized(
    stock: Callable[..., None], self: Any, mixed_precision: str | None = None, cpu: bool | None = None
) -> None:
    wanted = switch()
    _say_if_too_late(wanted, self.__dict__.get("device"))
    # It refuses cpu=True once the state stands on another device, which is what the switch asked for.
    return stock(self, mixed_precision, None if wanted else cpu)


def _leave_environment_alone(stock: Any) -> Any:
    """Keep reading `default_device` from setting PYTORCH_ENABLE_MPS_FALLBACK=1 over the user's own value.

    Needless once the getter no longer names the variable.
    """
    # PyTorch reads the variable when it is loaded, so that Accelerate's value comes too late anyhow (accelerate#3294).
    getter = stock.fget
    if "PYTORCH_ENABLE_MPS_FALLBACK" not in getter.__code__.co_consts:
        return stock

    def default_device(self: Any) -> Any:
        return torch.device("mps") if metal().value else getter(self)

    default_device.__doc__ = getter.__doc__
    return property(default_device)


patches = {
    "accelerate.state:PartialState.__init__": "_partial_state",
    "accelerate.state:PartialState._prepare_backend": "_prepare_backend",
    "accelerate.state:AcceleratorState._check_initialized": "_check_initialized",
    "accelerate.state:PartialState.default_device": Put(_leave_environment_alone),
}
