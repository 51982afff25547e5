"""The device profiles: names, facts and what is said of a name that there is not."""

from __future__ import annotations

import dataclasses

import pytest

from hf_mps.metal.device import profiles


def test_1_means_the_default_profile() -> None:
    assert profiles.get("1").name == profiles.DEFAULT == "m2-pro-16gb"


def test_a_name_is_read_whatever_its_case() -> None:
    assert profiles.get(" M1-8GB ") is profiles.get("m1-8gb")


@pytest.mark.parametrize("profile", profiles.PROFILES.values(), ids=str)
def test_a_profile_is_consistent(profile: profiles.Profile) -> None:
    assert profile.chip.startswith("Apple M")
    assert profile.chip.lower().split()[1] == profile.name.split("-")[0]
    assert 7 <= profile.cores <= 80
    assert profile.memory % profiles.GIB == 0
    assert profile.memory // 2 < profile.recommended_max < profile.memory
    assert profile.macos >= (14, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        profile.cores = 1  # type: ignore[misc]


@pytest.mark.parametrize(("name", "mebibytes"), [("m1-16gb", 10922), ("m1-max-32gb", 21845), ("m4-max-64gb", 49152)])
def test_the_recommended_maximum_is_what_macos_prints(name: str, mebibytes: int) -> None:
    assert profiles.get(name).recommended_max // 2**20 == mebibytes


def test_a_profile_is_a_machine_of_the_device_layer() -> None:
    profile = profiles.get("m1-8gb")
    machine = profile.machine()
    assert profile.chip in dataclasses.astuple(machine)
    assert machine.simulated
    assert profile.memory in dataclasses.astuple(machine)
