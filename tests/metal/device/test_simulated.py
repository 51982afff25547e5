"""What is simulated says so, wherever the device is named; what it is compared and counted by stays a Mac's."""

from __future__ import annotations

import dataclasses

import pytest
from inline_snapshot import snapshot

from hf_mps.metal import device
from hf_mps.metal.device import facts, machine
from tests.metal.device.machines import LINUX, MAC, Pretend
from tests.refusals import refusal

CODE = "import hf_mps; print(hf_mps.device.simulated(), hf_mps.device.choose())"


def test_a_program_learns_it_and_a_person_reads_it(simulated: None, run_python) -> None:
    done = run_python("-c", CODE, env={"HF_MPS_SIMULATE": "m1-8gb", "HF_MPS_DEVICE": None})
    assert done.stdout == snapshot("True mps (Metal passed its probe on Apple M1 (simulated), macOS 14.7)\n"), (
        done.stderr
    )


def test_the_cpu_of_the_same_process_is_not_simulated(simulated: None) -> None:
    assert device.simulated()
    assert not device.simulated("cpu")
    assert not machine.real().simulated
    assert machine.real().system != "Darwin"


def test_a_mac_is_not_simulated(pretend: Pretend) -> None:
    pretend(MAC)
    assert not device.simulated()
    assert device.choose().reason == snapshot("Metal passed its probe on Apple M2, macOS 15.6")
    pretend(dataclasses.replace(MAC, simulated=True))
    assert device.simulated()


def test_the_facts_name_the_chip_as_simulated(simulated: None) -> None:
    here = facts.facts("mps")
    assert here.chip.endswith(" (simulated)")
    assert here.lines()[0].startswith("device: mps, Apple M")
    assert " (simulated), " in here.lines()[0]


def test_a_profile_that_there_is_not_is_refused_as_a_device_is(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(LINUX, built=False)
    for asked in (device.choose, device.metal):
        for name, line in {
            "HF_MPS_DEVICE": "HF_MPS_DEVICE=m1-8gib is not a device it knows; allowed: mps, cuda, cpu",
            "HF_MPS_SIMULATE": "HF_MPS_SIMULATE=m1-8gib is no device profile; allowed: 1, m1-8gb, ",
        }.items():
            with monkeypatch.context() as typo:
                typo.setenv(name, "m1-8gib")
                assert refusal(asked).startswith(line)
