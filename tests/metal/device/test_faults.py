"""A fault is declared once: the doctor, guards, the simulated device and tests read its bounds there."""

from __future__ import annotations

import sys

import pytest

from hf_mps.core.releases import within
from hf_mps.layer.guards.catalogue import GUARDS, registry
from hf_mps.metal.device import faults
from hf_mps.metal.device.faults import FAULTS, OLDEST
from tests import CHECKOUT
from tests.layer.guards.experiments import EXPERIMENTS

RELEASES = ("2.13.0", "2.14.0", "2.14.1", "2.15.0")
BOUNDS = ("FIXED", "FIRST", "CHIPS", "releases", "cures")
"""What a guard, or its file, would call bounds of its own."""


def test_whoever_cures_a_fault_is_there_and_every_such_guard_is_shown() -> None:
    curing = {fault.guard for fault in FAULTS.values() if fault.guard and fault.package == "torch"}
    assert curing <= set(GUARDS.names)
    assert curing <= EXPERIMENTS.keys()
    assert {fault.guard for fault in FAULTS.values() if fault.package != "torch"} == {"the fallback"}


@pytest.mark.parametrize("name", GUARDS.names)
def test_a_guard_has_the_bounds_of_its_faults_and_none_of_its_own(name: str) -> None:
    guard = registry().get(name)
    assert guard.faults == faults.cured_by(name)
    module = sys.modules[type(guard).__module__]
    assert not [each for each in BOUNDS if each in vars(module) or each in vars(type(guard))]
    named = {name for patch in guard.patches.values() for name in getattr(patch, "faults", ())}
    assert named <= set(guard.faults), "a kernel stands for a fault that names another guard"


def test_a_guard_against_wrong_numbers_on_the_device_names_a_fault() -> None:
    without = {name for name in GUARDS.names if registry().get(name).untried and not faults.cured_by(name)}
    assert not without
    numerics = {name for name in GUARDS.names if type(registry().get(name)).__module__.split(".")[-2] == "numerics"} - {
        "nan-hidden"
    }  # Trainer's
    assert all(faults.cured_by(name) for name in numerics)


def test_every_fault_is_of_a_supported_release_and_named_by_a_source() -> None:
    for name, fault in FAULTS.items():
        assert fault.issue.startswith("https://github.com/"), name
        assert any(within(each, fault.releases) for each in RELEASES) or fault.package != "torch", name
        bounds = [bound.lstrip("<>=!") for bound in fault.releases.split(",") if bound]
        assert all(within(bound.removesuffix(".*"), f">={OLDEST}") for bound in bounds), name


def test_the_oldest_release_is_the_one_that_pip_asks_for() -> None:
    assert f'"torch>={OLDEST}"' in (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(("release", "old"), [("2.12.1", True), ("2.13.0", False), ("2.13.0a0+git", False)])
def test_an_older_torch_is_named_in_plain_words(release: str, old: bool) -> None:
    assert faults.too_old(release) == (f"torch {release} is older than 2.13: wrong results are known" if old else "")
