"""Where the simulated device is as wrong as some Macs: faults by name, with the chips and releases that have them.

A fault that the profile's chip and the installed torch have is on from the start; `on` and `off` switch single ones for
a while. Each is modelled after an upstream issue, inside the device, so that guards meet it as they would on a Mac.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_mps.errors import UserError, nearest

if TYPE_CHECKING:
    from hf_mps.simulator.profiles import Profile

ISSUES = "https://github.com/pytorch/pytorch/issues"
FIRST_FAMILIES = ("Apple M1", "Apple M2")
"""The chips of Metal's GPU families Apple7 and Apple8."""


@dataclass(frozen=True)
class Fault:
    """What is wrong, in a sentence; `releases` is a specifier of torch, `chips` the beginnings of chips' names."""

    what: str
    issue: str
    releases: str
    chips: tuple[str, ...] = ("Apple",)


FAULTS: dict[str, Fault] = {
    "large-k": Fault(
        "a matrix product that sums over more than 32,766 values also sums what lies behind its operands",
        f"{ISSUES}/193487",
        ">=2.7,<2.14",
        FIRST_FAMILIES,
    ),
    "large-k-batched": Fault(
        "a batched matrix product that sums over more than 32,766 values does so too",
        f"{ISSUES}/195163",
        ">=2.7",
        FIRST_FAMILIES,
    ),
}


def start(metal: Any, profile: Profile, torch_version: str) -> None:
    """Switch on, in the loaded extension, what this chip and this torch have."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    release = Version(torch_version).base_version
    for name, fault in FAULTS.items():
        metal.switch_fault(name, profile.chip.startswith(fault.chips) and release in SpecifierSet(fault.releases))


@contextmanager
def on(*names: str) -> Iterator[None]:
    """Switch faults on for a while. Raises UserError for an unknown name, or where no device is simulated."""
    with _switched(names, True):
        yield


@contextmanager
def off(*names: str) -> Iterator[None]:
    """Switch faults off for a while, all where no name is given. Raises UserError as `on` does."""
    with _switched(names or tuple(FAULTS), False):
        yield


def active() -> frozenset[str]:
    """The faults that are on now."""
    return frozenset(_extension().faults_on())


def take_longest_sum() -> int:
    """The most values that a matrix product with both sides from 16 has summed over since the last call."""
    return int(_extension().take_longest_sum())


@contextmanager
def _switched(names: tuple[str, ...], state: bool) -> Iterator[None]:
    metal = _extension()
    for name in names:
        if name not in FAULTS:
            raise UserError(f"{name} is no fault; there are {', '.join(FAULTS)}{nearest(name, FAULTS)}")
    before = active()
    for name in names:
        metal.switch_fault(name, state)
    try:
        yield
    finally:
        for name in names:
            metal.switch_fault(name, name in before)


def _extension() -> Any:
    from hf_mps import simulator

    if simulator._metal is None:
        raise UserError("faults are the simulated device's, which is not loaded: HF_MPS_SIMULATE=1")
    return simulator._metal
