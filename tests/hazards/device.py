"""What the device, or the macOS under it, does to a process: keeps memory, ends a fork, has no bfloat16."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_mps.core.releases import numbers
from hf_mps.metal.device import faults, machine, profiles
from hf_mps.metal.simulator import strictness
from tests.hazards.kernels import host, kernels


def faults_of(profile: str, release: str, macos: tuple[int, ...] | None = None) -> set[str]:
    """Which faults the simulated device switches on as this Mac, with this torch and the profile's macOS or another."""
    mac, on = profiles.get(profile), set[str]()

    class Metal:
        def switch_fault(self, name: str, state: bool) -> None:
            if state:
                on.add(name)

    strictness.start(Metal(), dataclasses.replace(mac, macos=macos or mac.macos), release)
    return on


@contextmanager
def shape_growth() -> Iterator[None]:
    """pytorch#132596: what a result of a new shape needed stays with the allocator, as no other shape can use it.

    Here for linear layers, and eight times over: a model has many more operators than these.
    """
    import torch

    kept: dict[Any, Any] = {}

    def linear(input: Any, weight: Any, bias: Any = None) -> Any:
        found = torch.nn.functional.linear(host(input), host(weight), bias if bias is None else host(bias))
        if found.shape not in kept:
            kept[found.shape] = torch.empty(8, *found.shape, device="mps")
        return found.to("mps")

    stock = {name: getattr(torch.mps, name) for name in ("empty_cache", "current_allocated_memory")}

    def empty_cache() -> None:
        kept.clear()
        stock["empty_cache"]()

    def current_allocated_memory() -> int:  # what is idle is with the driver alone
        return int(stock["current_allocated_memory"]() - sum(block.nbytes for block in kept.values()))

    torch.mps.empty_cache = empty_cache
    torch.mps.current_allocated_memory = current_allocated_memory
    try:
        with kernels({"linear": linear}):
            yield
    finally:
        kept.clear()
        torch.mps.empty_cache = stock["empty_cache"]
        torch.mps.current_allocated_memory = stock["current_allocated_memory"]


@contextmanager
def crowded_loading() -> Iterator[None]:
    """transformers#48029: two threads that convert weights onto mps end the process; here the load ends in an error."""
    from transformers import core_model_loading

    module: Any = core_model_loading
    stock, alone = module._materialize_copy, threading.Lock()

    def materialize(tensor: Any, device: Any = None, dtype: Any = None) -> Any:
        if not str(device).startswith("mps") or tensor.get_dtype() != "BF16" or str(dtype) != "torch.float32":
            return stock(tensor, device, dtype)
        if not alone.acquire(blocking=False):
            raise RuntimeError("Segmentation fault: 11")
        try:
            time.sleep(0.01)  # as long as another thread needs to come here
            return stock(tensor, device, dtype)
        finally:
            alone.release()

    module._materialize_copy = materialize
    try:
        yield
    finally:
        module._materialize_copy = stock


@contextmanager
def fork_workers() -> Iterator[None]:
    """pytorch#178037: a process forked from one that uses Metal hangs in it; it ends at once here."""
    global _forks_end, _forks_watched
    if not _forks_watched:
        os.register_at_fork(after_in_child=_end_forked)
        _forks_watched = True
    _forks_end = True
    try:
        yield
    finally:
        _forks_end = False


_forks_end = _forks_watched = False


def _end_forked() -> None:
    import torch

    if _forks_end and torch.mps.driver_allocated_memory():
        os._exit(1)


@contextmanager
def mac(*, macos: str | None = None, torch: str = "2.13.0") -> Iterator[None]:
    """A Mac with this macOS and this release of torch, as the guards ask of a fault before they try the device."""
    before, release = machine.present(), faults.torch_release
    machine.override(dataclasses.replace(before, macos=macos or before.macos))
    faults.torch_release = lambda: numbers(torch)
    try:
        yield
    finally:
        machine.override(before)
        faults.torch_release = release


@contextmanager
def uncompilable() -> Iterator[None]:
    """pytorch#161905: Inductor ends in an error where it has no Metal code for a graph; here for every one."""
    from hf_mps.metal.simulator import compiled

    compiled.refused = True
    try:
        yield
    finally:
        compiled.refused = False
