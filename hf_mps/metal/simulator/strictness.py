"""Where the simulated device is as wrong as some Macs: each fault of `hf_mps.metal.device.faults` is on or off.

A fault that the profile's chip and the installed torch have is on from the start; `on` and `off` switch single ones for
a while. Each is modelled after an upstream issue, inside the device, so that guards meet it as they would on a Mac.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from hf_mps.core.errors import UserError, nearest
from hf_mps.metal.device.faults import FAULTS, LIMITS, SIMULATED, left_out
from hf_mps.metal.simulator import build

if TYPE_CHECKING:
    from hf_mps.metal.device.profiles import Profile


def start(metal: Any, profile: Profile, torch_version: str) -> None:
    """Switch on, in the loaded extension, what this chip and this torch have; HF_MPS_FAULTS leaves some of it out.

    Raises UserError for a name in it that is no fault.
    """
    without, system = left_out(), ".".join(map(str, profile.macos))
    for name in SIMULATED:
        here = not FAULTS[name].asked and name not in without
        metal.switch_fault(name, here and FAULTS[name].concerns(profile.chip, system, torch_version))


def on(*names: str) -> AbstractContextManager[None]:
    """Switch faults on for a while. Raises UserError for an unknown name, or where no device is simulated."""
    return _switched(names, True)


def off(*names: str) -> AbstractContextManager[None]:
    """Switch faults off for a while, all where no name is given. Raises UserError as `on` does."""
    return _switched(names or SIMULATED, False)


@contextmanager
def beginning_at(name: str, elements: int) -> Iterator[None]:
    """Let one of the `LIMITS` begin beyond so many elements for a while; whether it is on is another matter.

    Raises UserError for a fault that begins elsewhere, or where no device is simulated.
    """
    metal = _extension()
    if name not in LIMITS:
        raise UserError(f"{name} does not begin at a number of elements; {', '.join(LIMITS)} do{nearest(name, LIMITS)}")
    before = metal.set_limit(name, elements)
    try:
        yield
    finally:
        metal.set_limit(name, before)


@contextmanager
def stopping_gpu(waits: int) -> Iterator[None]:
    """Let the GPU stop for a while: of what is queued when the `waits`-th wait from now on comes, nothing is computed.

    Waits with nothing in the queue do not count. Raises UserError where no device is simulated.
    """
    with on("queued-work", "stopped-gpu"):
        _extension().stop_gpu_at(waits)
        try:
            yield
        finally:
            _extension().stop_gpu_at(1)  # as it begins: the block may end before its waits have come


def active() -> frozenset[str]:
    """Return the faults that are on now."""
    return frozenset(_extension().faults_on())


def take_longest_sum() -> int:
    """Return the most values that a matrix product with both sides from 16 has summed over since the last call."""
    return int(_extension().take_longest_sum())


@contextmanager
def _switched(names: tuple[str, ...], state: bool) -> Iterator[None]:
    metal = _extension()
    for name in names:
        if name not in SIMULATED:
            raise UserError(f"{name} is no fault; there are {', '.join(SIMULATED)}{nearest(name, SIMULATED)}")
    before = active()
    for name in names:
        metal.switch_fault(name, state)
    try:
        yield
    finally:
        for name in names:
            metal.switch_fault(name, name in before)


def _extension() -> Any:
    return build.running("faults are the simulated device's, which is not loaded")
