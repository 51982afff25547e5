"""Metal is tried where a trial can tell something; in children and beside work it is not, and PyTorch is believed."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import threading
from pathlib import Path

import pytest
import torch

from hf_mps.core.errors import UserError
from hf_mps.metal import device
from hf_mps.metal.device import probe
from tests.metal.device.machines import MAC, Pretend

VIRTUAL = dataclasses.replace(MAC, virtual=True)
BELIEVED = "PyTorch finds Metal on Apple M2, macOS 15.6; not tried: "


class Trials:
    """Counts trials, and lets them fail where `right` is set to False."""

    def __init__(self) -> None:
        self.count = 0
        self.right = True

    def __call__(self) -> bool:
        self.count += 1
        return self.right


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    monkeypatch.setenv(probe.HANDED_DOWN, "")
    return Trials()


def test_on_a_mac_a_librarys_question_tries_nothing_and_pytorch_is_believed(pretend: Pretend, trials: Trials) -> None:
    pretend(MAC, trial=trials)
    assert torch.backends.mps.is_available()
    assert device.metal().reason == f"{BELIEVED}this is no virtual machine"
    assert trials.count == 0
    assert probe.handed_down(MAC) is None


def test_a_program_of_ours_tries_it_there_too_and_its_verdict_stands_from_then_on(
    pretend: Pretend, trials: Trials
) -> None:
    trials.right = False
    pretend(MAC, trial=trials)
    assert torch.backends.mps.is_available()
    assert device.choose().value != "mps"
    assert not torch.backends.mps.is_available()
    assert trials.count == 1


def test_the_switch_of_a_plain_script_tries_nothing(
    pretend: Pretend, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(MAC, trial=trials)
    monkeypatch.setenv("HF_MPS_DEVICE", "mps")
    assert device.switch() == "mps"
    assert trials.count == 0


@pytest.mark.parametrize("variables", [{}, {"CI": "true"}, {"HF_MPS_PROBE": "1"}])
def test_virtual_machines_ci_and_users_who_ask_have_it_tried(
    variables: dict[str, str], pretend: Pretend, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(MAC if variables else VIRTUAL, trial=trials)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [torch.backends.mps.is_available() for _ in range(3)] == [True] * 3
    assert trials.count == 1


def test_a_user_can_forbid_it(pretend: Pretend, trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_PROBE", "0")
    pretend(VIRTUAL, trial=trials)
    assert device.choose().reason == f"{BELIEVED}HF_MPS_PROBE=0"
    assert trials.count == 0
    monkeypatch.setenv("HF_MPS_PROBE", "no")
    pretend(VIRTUAL, trial=trials)
    with pytest.raises(UserError, match="HF_MPS_PROBE=no is not a value it knows; allowed: 0, 1"):
        device.metal()


def test_memory_that_no_tensor_holds_is_no_use_of_the_device(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(probe.HANDED_DOWN, "")
    trials = Trials()
    pretend(VIRTUAL, trial=trials)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 2**20)  # the device's own, before any tensor
    assert device.metal().value
    assert trials.count == 1


def test_a_device_in_use_is_not_tried_and_nothing_runs_beside_another_threads_work(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(probe.HANDED_DOWN, "")
    trials, held_now = Trials(), torch.mps.current_allocated_memory
    working, enough = threading.Event(), threading.Event()

    def work() -> None:
        held = torch.ones(4, device="mps")
        working.set()
        enough.wait(30)
        assert held.sum().item() == 4

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert working.wait(30)
        for ask in (device.metal, device.choose):
            pretend(VIRTUAL, trial=trials)
            monkeypatch.setattr(torch.mps, "current_allocated_memory", held_now)
            assert ask().reason == f"{BELIEVED}it is in use already"
    finally:
        enough.set()
        thread.join()
    assert trials.count == 0


def test_a_child_without_its_parents_word_believes_pytorch(
    pretend: Pretend, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    monkeypatch.setenv("HF_MPS_PROBE", "1")
    pretend(VIRTUAL, trial=trials)
    assert device.metal().reason == f"{BELIEVED}a child process tries nothing"
    assert trials.count == 0


def test_a_word_from_another_machine_or_torch_or_no_word_at_all_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = {"by": 1, "of": probe.trial_of(MAC), "value": False, "reason": "it failed"}
    monkeypatch.setenv(probe.HANDED_DOWN, json.dumps(probed))
    found = probe.handed_down(MAC)
    assert (found.value, found.reason) == (False, "it failed")
    assert probe.handed_down(dataclasses.replace(MAC, macos="26.0")) is None
    for left in ("", "yes", "[]", "{}", json.dumps({**probed, "of": ["Apple M2", "15.6", "2.7.0"]})):
        monkeypatch.setenv(probe.HANDED_DOWN, left)
        assert probe.handed_down(MAC) is None


# Every process of the script counts its trials; a spawned worker imports it anew, as it would a training script.
SCRIPT = """
import torch
from hf_mps.metal.device import probe

trials, stock = [], probe._trial
probe._trial = lambda: trials.append(1) or stock()

import transformers.modeling_utils


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return len(trials), torch.backends.mps.is_available()


if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Rows(), num_workers=1, multiprocessing_context="spawn")
    workers = [(int(count), bool(there)) for count, there in loader]
    print(len(trials), torch.backends.mps.is_available(), workers)
"""


@pytest.mark.parametrize(("profile", "in_the_parent"), [("m2-pro-16gb", 0), ("m1-virtual-7gb", 1)])
def test_transformers_and_spawned_workers_try_once_in_a_virtual_machine_and_never_on_a_mac(
    profile: str, in_the_parent: int, simulated: None, run_python, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = run_python(script, env={"HF_MPS_SIMULATE": profile, "CI": None, "HF_MPS_PROBE": None})
    assert done.stdout == f"{in_the_parent} True [(0, True), (0, True)]\n", done.stderr
