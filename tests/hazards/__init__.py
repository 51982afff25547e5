"""Known faults of Metal, switched on by name for a while: each guard is shown to be needed, and to help.

    with hazards.on("non-blocking"):
        ...

Each is modelled after the upstream issue that its guard names, as a kernel of its own over the device's, or as the
library's state that has the fault. Faults that the installed libraries have anyhow (checkpoint-rng, resume-rng, …) need
none. For tests only: slow, and one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch

from hf_mps.core.errors import UserError, nearest
from hf_mps.core.releases import torch_release, within
from hf_mps.layer import guards
from hf_mps.layer.guards.kernel_overrides import Tried
from hf_mps.metal.device.faults import FAULTS
from hf_mps.metal.simulator import strictness
from tests.hazards import device, results, sizes, versions
from tests.hazards.kernels import host, kernels

__all__ = ["HAZARDS", "active", "armed", "host", "kernels", "on"]


@contextmanager
def _both(one: AbstractContextManager[None], other: AbstractContextManager[None]) -> Iterator[None]:
    with one, other:
        yield


HAZARDS: dict[str, Callable[[], Any]] = {
    "non-blocking": lambda: strictness.on("late-copies"),
    "non-contiguous": results.non_contiguous,
    # Its backward pass ends the process, and with it the tests.
    "mixed-dtypes": lambda: _both(strictness.on("mixed-layer-norm"), strictness.off("mixed-norm-backward")),
    "lstm-dropout": lambda: strictness.on("lstm-dropout"),
    "compile": device.uncompilable,
    "cuda-graphs": lambda: strictness.on("cuda-graphs"),
    "huge-embedding": results.huge_embedding,
    "large-k": lambda: strictness.on("large-k", "large-k-batched"),
    "sliced-products": lambda: _both(device.mac(macos="14.7"), strictness.on("sliced-products", "sliced-baddbmm")),
    "expanded-operands": lambda: _both(
        device.mac(macos="27.0"), strictness.on(*guards.get("expanded-operands").faults)
    ),
    "linear-bias": lambda: strictness.on("row-bias", "many-rows-bias"),
    "linear-shapes": lambda: strictness.on("vector-weight", "deep-linear"),
    "dtype-copies": lambda: strictness.on("dtype-copies"),
    "index-range": lambda: strictness.on("silent-indices"),
    "permuted-activations": lambda: _both(
        device.mac(macos="14.7"), strictness.on("permuted-activations", "permuted-results")
    ),
    "atomic-order": lambda: strictness.on("atomic-order"),
    "huge-products": sizes.huge_products,
    "huge-cat": sizes.huge_cat,
    "embedding-grad": sizes.embedding_grad,
    "conv-batch": lambda: strictness.on("conv-batch"),
    "conv3d-layout": sizes.conv3d_layout,
    "large-pad": lambda: _both(device.mac(), strictness.on("large-pad")),
    "adaptive-max-pool": lambda: _both(device.mac(), results.adaptive_max_pool()),
    "lerp-weight": lambda: _both(device.mac(), strictness.on("lerp-weight")),
    "lone-scans": lambda: strictness.on("lone-scans"),
    "index-add-gaps": lambda: _both(device.mac(macos="14.7"), strictness.on("index-add-gaps")),
    "async-loading": device.crowded_loading,
    "shape-growth": device.shape_growth,
    "fork-workers": device.fork_workers,
    "half-precision": versions.half_precision,
    "oom-text": versions.oom_text,
    "resume-epoch": versions.resume_epoch,
}

# Faults that no guard knows of, as a later release may bring them: for sentinels, and for the search for a divergence.
UNKNOWN: dict[str, Callable[[], Any]] = {"fused-overflow": results.fused_overflow, "frozen-norm": results.frozen_norm}

_active: set[str] = set()


@contextmanager
def on(*names: str) -> Iterator[None]:
    """Switch hazards on for a while. Raises UserError for a name that there is not, or where no simulator is loaded."""
    from hf_mps.metal import simulator

    known = HAZARDS | UNKNOWN
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise UserError(f"{unknown} is no hazard; there are {', '.join(HAZARDS)}{nearest(unknown, HAZARDS)}")
    if simulator.loaded() is None:
        raise UserError("hazards are faults of the simulated device, which is not loaded: HF_MPS_SIMULATE=1")
    with ExitStack() as stack:
        for name in names:
            if name not in _active:
                stack.enter_context(_marked(name))
                stack.enter_context(known[name]())
        yield


def armed(name: str) -> pytest.MarkDecorator:
    """A mark that skips a test of a guard where the installed torch has none of its faults any more.

    Nothing is armed then; those that try the device are armed anew under each hazard, which has a release of its own.
    """
    guard, here = guards.get(name), torch_release()
    bounds = [FAULTS[fault].releases for fault in guard.faults]
    mended = bool(bounds) and not any(not each or each[0] == ">" or within(here, each) for each in bounds)
    skips = mended and not isinstance(guard, Tried)
    return pytest.mark.skipif(skips, reason=f"torch {torch.__version__} has the fix, and no guard is installed")


def active() -> frozenset[str]:
    """The hazards that are on now."""
    return frozenset(_active)


@contextmanager
def _marked(name: str) -> Iterator[None]:
    _active.add(name)
    try:
        yield
    finally:
        _active.discard(name)
