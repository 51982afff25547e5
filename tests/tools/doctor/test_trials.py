"""`hf-mps doctor --trials`: the device is tried for every fault that a guard knows, and the report has each outcome."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.cli.main import main
from hf_mps.core.releases import torch_release
from hf_mps.layer.guards.catalogue import GUARDS, registry
from hf_mps.metal.device import faults, machine
from hf_mps.metal.simulator import strictness
from hf_mps.metal.training_kernels import trial
from hf_mps.tools.doctor import environment, guards, metal, versions
from hf_mps.tools.doctor import machine as machines
from hf_mps.tools.doctor.guards import Trial

pytestmark = pytest.mark.usefixtures("simulated")


@pytest.fixture(scope="module")
def told() -> dict[str, Trial]:
    """The trials of this machine, made once: they import torch and the layer anew."""
    return {each.name: each for each in guards.try_all()}


def test_every_guard_against_a_fault_of_the_device_is_there(told: dict[str, Trial]) -> None:
    assert list(told) == [name for name in GUARDS.names if faults.cured_by(name)]
    assert {each.verdict for each in told.values()} <= {"faulty", "right", "not tried"}
    for each in told.values():
        assert each.issue.startswith("https://github.com/pytorch/pytorch/")
        assert each.says
        assert not each.says.startswith("tried")


def test_what_the_simulated_device_has_is_found_faulty_and_the_rest_right(told: dict[str, Trial]) -> None:
    on = strictness.active()
    named = ("dtype-copies", "conv-batch", "permuted-activations")
    for name, fault in (*zip(named, named, strict=True), ("linear-bias", "many-rows-bias")):
        assert (told[name].verdict == "faulty") is (fault in on), told[name]
    assert (told["large-k"].verdict == "faulty") is ("large-k-batched" in on)
    assert told["conv3d-layout"].verdict == "right"


@pytest.mark.skipif(torch_release() >= (2, 14), reason="2.14 has the fix")
def test_what_cannot_be_tried_says_why(told: dict[str, Trial]) -> None:
    assert told["huge-embedding"].verdict == "not tried"
    assert told["huge-embedding"].says.endswith("a trial would take 8 GB")


def test_a_chip_that_is_said_to_be_right_is_tried_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = machine.Machine("Darwin", "arm64", "Apple M4", 16 * 2**30, macos="14.7")
    monkeypatch.setattr(machine, "_overridden", newer)
    for name, fault in (("large-k", "large-k"), ("linear-bias", "row-bias"), ("dtype-copies", "dtype-copies")):
        guard = registry().get(name)
        for state in (strictness.on, strictness.off):
            with state(fault), strictness.off("many-rows-bias", "large-k-batched"):
                found = guard.tried()
                assert found.reason.startswith(guards.TRIED)
                assert found.value is (state is strictness.on), name


FOUND = [
    Trial("large-k", "faulty", "bmm differs", "https://x/1", listed=True, seconds=1.0),
    Trial("linear-bias", "right", "one row is right", "https://x/2", listed=False, seconds=1.0),
    Trial("mixed-dtypes", "right", "it is right", "https://x/3", listed=True, seconds=1.0),
    Trial("lstm-dropout", "faulty", "a gradient passes", "https://x/4", listed=False, seconds=1.0),
    Trial("huge-embedding", "not tried", "it would take 8 GB", "https://x/5", listed=True, seconds=0.0),
    Trial("non-contiguous", "failed", "RuntimeError: MPS backend out of memory", "https://x/7", False, 1.0),
    Trial("sliced-products", "ended", "the trial ended its process by SIGABRT", "https://x/6", False, 1.0),
]


def test_what_is_not_as_the_list_has_it_stands_out_and_what_ends_a_process_is_a_problem() -> None:
    assert [each.news for each in FOUND] == [False, False, True, True, False, True, True]
    found = {each.name: each for each in guards.examine_trials(FOUND)}
    assert {name: each.state for name, each in found.items()} == {
        "large-k": "note",
        "linear-bias": "ok",
        "mixed-dtypes": "note",
        "lstm-dropout": "note",
        "huge-embedding": "ok",
        "non-contiguous": "note",
        "sliced-products": "problem",
    }
    assert found["large-k"].says == snapshot("faulty: bmm differs; cured here")
    assert found["mixed-dtypes"].says.endswith("; listed as faulty for this torch and Mac")
    assert found["lstm-dropout"].says.endswith("; listed as right for this torch and Mac")


# Instead of the trials: two that end, one that aborts as Metal does, one more, and one that talks meanwhile.
CHILD = """
import json, os, sys, time
for name in sys.argv[1:]:
    print(json.dumps({"begins": name}), flush=True)
    print("a library talks", "{and more", sep=chr(10), flush=True)
    if name == "linear-bias":
        print("failed assertion: destination datatype must be fp32", file=sys.stderr, flush=True)
        os.abort()
    if name == "mixed-dtypes":
        time.sleep(60)
    if os.environ.get("SLOWLY"):
        time.sleep(1)
    found = {"name": name, "verdict": "right", "says": "well", "issue": "", "listed": False, "seconds": 0.1}
    print(json.dumps(found), flush=True)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in place of Python with the trials."""
    (tmp_path / "child.py").write_text(CHILD, encoding="utf-8")
    real = guards.subprocess.Popen

    def start(command: list[str], **kwargs: object):
        return real([sys.executable, str(tmp_path / "child.py"), *command[3:]], **kwargs)

    monkeypatch.setattr(guards.subprocess, "Popen", start)


@pytest.mark.usefixtures("child")
def test_a_trial_that_aborts_costs_itself_alone_and_its_last_words_are_kept() -> None:
    names = ["large-k", "linear-bias", "lstm-dropout"]
    found = guards.try_all(names)
    assert [(each.name, each.verdict) for each in found] == [
        ("large-k", "right"),
        ("linear-bias", "ended"),
        ("lstm-dropout", "right"),
    ]
    assert found[1].says == snapshot(
        "the trial ended its process by SIGABRT: failed assertion: destination datatype must be fp32"
    )


@pytest.mark.usefixtures("child")
def test_a_trial_has_its_time_however_long_those_before_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "LONGEST", 2.5)
    monkeypatch.setenv("SLOWLY", "1")
    names = ["large-k", "lstm-dropout", "conv-batch", "linear-shapes", "mixed-dtypes"]
    found = guards.try_all(names)
    assert [each.verdict for each in found] == ["right", "right", "right", "right", "ended"]
    assert found[-1].says == "the trial ended its process by SIGKILL: no answer for 2.5 seconds"


@pytest.mark.usefixtures("child")
def test_json_has_each_trial_as_values_and_the_report_as_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for room in (machines, metal, versions, environment, guards):
        monkeypatch.setattr(room, "examine", lambda *given: [])
    monkeypatch.setattr(guards.GUARDS, "names", ("large-k", "lstm-dropout"))
    assert main(["doctor", "--trials", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["verdict"], each["seconds"]) for each in told["trials"]] == [
        ("large-k", "right", 0.1),
        ("lstm-dropout", "right", 0.1),
    ]
    assert [each["says"] for each in told["findings"]["trials"]] == ["right: well"] * 2
    assert main(["doctor", "--trials"]) == 0
    assert re.search(r"\ntrials\n  large-k +right: well\n", capsys.readouterr().out)


def test_a_trial_that_raises_says_so_and_the_next_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        registry().get("non-contiguous"),
        "trial",
        Mock(side_effect=RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GiB)\nat MPSAllocator.mm")),
    )
    guards.main(["non-contiguous", "conv3d-layout"])
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each.get("verdict", each.get("begins")) for each in told] == [
        "non-contiguous",
        "failed",
        "conv3d-layout",
        "right",
    ]
    assert told[1]["says"] == snapshot("RuntimeError: MPS backend out of memory (MPS allocated: 1.00 GiB)")


def test_without_metal_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_DEVICE", "cpu")
    assert guards.try_all() == []
    assert torch.backends.mps.is_built()


def test_the_report_says_which_training_kernels_are_used_and_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trial, "_place", lambda name: tmp_path / f"{name}.json")
    monkeypatch.delenv("HF_MPS_TRAINING_KERNELS")
    row = trial.Row("64 gradients", 1e-7, 2e-7, 0.001, 0.004, right=True)
    trial._write("clip", trial.Outcome(True, "as exact as PyTorch's own operators and 4.0 times as fast here", (row,)))
    found = {each.name: each for each in metal.training_kernels()}
    assert found["clip"].says == snapshot(
        "used: as exact as PyTorch's own operators and 4.0 times as fast here (64 gradients: 1.00 ms for 4.00)"
    )
    assert (found["rms-norm"].state, found["rms-norm"].next) == ("note", "hf-mps doctor --trials")
    monkeypatch.setenv("HF_MPS_TRAINING_KERNELS", "-clip")
    found = {each.name: each for each in metal.training_kernels()}
    assert found["clip"].says == "not used: HF_MPS_TRAINING_KERNELS=-clip"
