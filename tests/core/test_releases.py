"""Bounds of releases and systems are read as `packaging` reads them, without importing it."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet

from hf_mps.core.releases import numbers, within
from hf_mps.metal.device.faults import FAULTS

TORCH = ("2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.13.0+cpu", "2.14.0", "2.14.1", "2.15.0", "3.0")
MACOS = ("0", "14.5", "15.0", "15", "26.0", "26.2", "26.3.1", "26.4", "26.6.1", "27.0")


def test_every_fault_has_the_releases_and_systems_that_packaging_reads() -> None:
    releases = {fault.releases for fault in FAULTS.values()}
    systems = {fault.macos for fault in FAULTS.values()}
    assert len(releases) >= 5
    assert len(systems) > 5
    for versions, bounds in ((TORCH, releases), (MACOS, systems)):
        for bound in bounds:
            asked = {version: within(version, bound) for version in versions}
            assert asked == {version: SpecifierSet(bound).contains(version) for version in versions}, bound


def test_a_release_candidate_counts_as_the_release() -> None:
    assert numbers("2.15.0a0+git1234") == (2, 15, 0)
    assert within("2.15.0rc1", ">=2.15")
    assert not within((2, 15, 0), "<2.15")


@pytest.mark.parametrize("bounds", ["<=2.14", "~=2.14", "2.14", ">=2.8,soon"])
def test_a_bound_that_could_be_misread_is_an_error(bounds: str) -> None:
    with pytest.raises(ValueError, match=r"not a bound: .*; allowed are <, >=, == and != before a release"):
        within("2.13.0", bounds)
