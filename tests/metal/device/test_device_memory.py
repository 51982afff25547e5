"""Memory held now, recommended, and the peak in between, on Metal, CUDA and the CPU."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from hf_mps.metal.device import machine, memory
from hf_mps.metal.device.memory import Peak
from tests.metal.device.machines import GIB, MAC

MIB = 2**20


def test_a_tensor_on_the_device_is_counted_while_it_lives() -> None:
    before = memory.current("mps")
    tensor = torch.zeros(8 * MIB, device="mps")
    assert memory.current("mps") - before >= 32 * MIB
    assert memory.driver("mps") >= memory.current("mps")
    del tensor
    assert memory.current("mps") - before < 32 * MIB


def test_the_device_recommends_less_than_it_has() -> None:
    recommended = memory.recommended("mps")
    assert recommended is not None
    assert 0 < recommended < memory.total("mps")


def test_a_mac_shares_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_overridden", MAC)
    assert memory.total("mps") == memory.total("cpu") == 16 * GIB
    assert memory.recommended("cpu") is None


@pytest.mark.parametrize("device", ["mps", "cpu"])
def test_the_peak_keeps_what_was_given_back_before_the_end(device: str) -> None:
    torch.mps.empty_cache()
    with Peak(device, interval=0.005) as peak:
        before = peak.result.value
        tensor = torch.ones(16 * MIB, device=device)
        time.sleep(0.1)
        del tensor
        if device == "mps":
            torch.mps.empty_cache()
    assert peak.result.value - before >= 60 * MIB
    assert "sampled every 5 ms and at each step" in peak.result.reason


def test_a_sample_between_two_ticks_counts() -> None:
    torch.mps.empty_cache()
    with Peak("mps", interval=60) as peak:
        before = peak.result.value
        tensor = torch.ones(16 * MIB, device="mps")
        peak.sample()
        del tensor
        torch.mps.empty_cache()
    assert peak.result.value - before >= 60 * MIB


def test_no_thread_is_left_even_after_an_error() -> None:
    def fail() -> None:
        raise ValueError("the run failed")

    with pytest.raises(ValueError, match="the run failed"), Peak("cpu"):
        fail()
    assert not [thread for thread in threading.enumerate() if thread.name == "hf_mps memory"]


def test_cuda_counts_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    resets = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(1))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 3 * GIB)
    with Peak("cuda") as peak:
        assert not [thread for thread in threading.enumerate() if thread.name == "hf_mps memory"]
    assert resets == [1]
    assert str(peak.result) == f"{3 * GIB} (counted by CUDA's allocator)"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_waits_for_a_sample_and_its_child_can_sample() -> None:
    with Peak("cpu", interval=0.001):
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(0 if memory._reading.acquire(timeout=5) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_before_2_14_the_driver_is_said_to_grow_with_the_shapes_and_by_whose_report() -> None:
    before, after = memory.beside_live("2.13.0+cpu"), memory.beside_live("2.14.1")
    assert before.startswith(after)
    assert "(72 GB beside 6.7 in kyutai-labs/pocket-tts#255) until the guard shape-growth" in before
    assert "shape" not in after
