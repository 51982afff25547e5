"""HF_MPS_DEVICE is the one switch: real Trainer, Accelerate and Lightning runs follow it, whatever came first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

PROGRAM = Path(__file__).parent / "report_devices.py"
PLAIN = {"HF_MPS_SIMULATE": None, "HF_MPS_DEVICE": None}
SIMULATED = {"HF_MPS_SIMULATE": "m1-8gb", "HF_MPS_DEVICE": None}


class Report:
    """What the program printed: a device for each library, changed variables, and our own lines on stderr."""

    def __init__(self, done: Any) -> None:
        assert done.returncode == 0, done.stderr
        self.devices = json.loads(done.stdout.splitlines()[-1])
        self.changed = self.devices.pop("changed")
        self.notices = [line for line in done.stderr.splitlines() if line.startswith("hf-mps: ")]
        self.stderr = done.stderr

    def all_on(self, device: str, count: int) -> None:
        assert len(self.devices) == count
        assert set(self.devices.values()) == {device}, self.devices


@pytest.fixture
def report(run_python):
    def run(*words: str, env: dict[str, str | None]) -> Report:
        return Report(run_python(PROGRAM, *words, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": None, **env}))

    return run


def test_cpu_wins_over_a_script_that_asks_for_mps_when_transformers_brings_torch(report) -> None:
    # training_args is being executed when `import torch` inside it loads the layer.
    done = report(
        *("transformers", "accelerate", "lightning.pytorch", "accelerator=mps", "devices=[0]"),
        env={**SIMULATED, "HF_MPS_DEVICE": "cpu", "ACCELERATE_TORCH_DEVICE": "mps"},
    )
    done.all_on("cpu", 9)
    assert done.notices == snapshot(
        [
            "hf-mps: HF_MPS_DEVICE=cpu wins over ACCELERATE_TORCH_DEVICE=mps",
            "hf-mps: HF_MPS_DEVICE=cpu wins over Lightning's accelerator='mps'",
        ]
    )


def test_metal_is_taken_by_itself_and_the_environment_stays_as_it_was(report) -> None:
    done = report(
        *("torch", "accelerate", "transformers", "pytorch_lightning"),
        env={**SIMULATED, "PYTORCH_ENABLE_MPS_FALLBACK": "0"},
    )
    done.all_on("mps", 9)
    assert done.notices == []
    ours_or_theirs = ("HF_MPS", "ACCELERATE", "PYTORCH_ENABLE_MPS_FALLBACK")
    assert [name for name in done.changed if name.startswith(ours_or_theirs)] == []


@pytest.mark.nightly
def test_libraries_that_were_imported_and_had_asked_before_follow_too(report) -> None:
    done = report(
        *("simulate", "transformers", "transformers.training_args", "ask", "accelerate"),
        *("lightning.pytorch", "pytorch_lightning", "activate"),
        env={**PLAIN, "HF_MPS_DEVICE": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    done.all_on("cpu", 12)


def test_metal_that_fails_its_probe_is_taken_by_nobody_and_the_reason_is_told_once(report) -> None:
    # What a hosted runner does: the device is listed and refuses each allocation (actions/runner-images#9918).
    env = {**SIMULATED, "HF_MPS_PROBE": "1"}
    done = report("torch", "fail", "lightning.pytorch", "transformers", "accelerate", env=env)
    done.all_on("cpu", 9)
    assert len(done.notices) == 1
    assert done.notices[0].startswith(
        "hf-mps: Metal is not used: the Metal GPU of Apple M1 (simulated) fails at its first use "
        "(RuntimeError: MPS backend out of "
    )


@pytest.mark.nightly
def test_mps_wins_over_each_way_of_asking_for_the_cpu(report) -> None:
    done = report(
        *("accelerate", "lightning.pytorch", "transformers"),
        *("use_cpu=True", "cpu=True", "accelerator=cpu", "devices=3"),
        env={**SIMULATED, "HF_MPS_DEVICE": "mps", "ACCELERATE_USE_CPU": "1"},
    )
    done.all_on("mps", 9)
    assert done.notices == snapshot(
        [
            "hf-mps: HF_MPS_DEVICE=mps wins over use_cpu=True",
            "hf-mps: HF_MPS_DEVICE=mps wins over Accelerate's ACCELERATE_USE_CPU",
            "hf-mps: HF_MPS_DEVICE=mps wins over Lightning's accelerator='cpu'",
            "hf-mps: HF_MPS_DEVICE=mps: devices=3 becomes 1, there is one Metal device",
        ]
    )


def test_cpu_holds_on_a_machine_that_has_cuda(report) -> None:
    words = ("transformers.training_args", "cuda", "transformers", "accelerate")
    done = report(*words, env={**PLAIN, "HF_MPS_DEVICE": "cpu"})
    done.all_on("cpu", 6)


def test_without_the_switch_a_script_s_own_words_hold(report) -> None:
    done = report(
        *("torch", "transformers", "accelerate", "lightning.pytorch", "use_cpu=True", "cpu=True", "accelerator=cpu"),
        env=SIMULATED,
    )
    done.all_on("cpu", 9)
    assert done.notices == []


def test_training_arguments_follow_accelerates_own_cpu_setting(report) -> None:
    # transformers 5 leaves TrainingArguments on mps here while its Accelerator goes to the CPU.
    done = report("transformers", "accelerate", env={**SIMULATED, "ACCELERATE_USE_CPU": "true"})
    done.all_on("cpu", 6)
    assert done.notices == snapshot(
        ["hf-mps: ACCELERATE_USE_CPU=true puts Accelerate on the CPU; TrainingArguments follows it with use_cpu=True"]
    )


REFUSALS = """
from accelerate import Accelerator
from lightning.pytorch import Trainer
from transformers import TrainingArguments
from hf_mps.core.errors import UserError

for take in (Accelerator, Trainer, lambda: TrainingArguments("never")):
    try:
        print("taken", take())
    except UserError as error:
        print(error)
"""


def test_a_device_that_is_not_there_is_refused_by_each_of_them(run_python, tmp_path: Path) -> None:
    done = run_python("-c", REFUSALS, env={**PLAIN, "HF_MPS_DEVICE": "mps"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert len(set(lines)) == 1
    assert lines[0].startswith("HF_MPS_DEVICE=mps: this is Linux, not a Mac, and PyTorch ")
    assert lines[0].endswith(" is built without Metal; for a simulated Metal device: HF_MPS_SIMULATE=1")
    assert not list(tmp_path.iterdir())


TOO_LATE = """
import os
from accelerate import Accelerator
first = Accelerator().device.type
os.environ["HF_MPS_DEVICE"] = "cpu"
print(first, Accelerator().device.type)
from transformers import TrainingArguments
print(TrainingArguments("never", report_to="none").device.type, Accelerator().device.type)
"""


def test_in_a_notebook_the_switch_may_come_after_the_imports_and_says_when_it_is_too_late(run_python) -> None:
    done = run_python("-c", TOO_LATE, env=SIMULATED)
    # TrainingArguments starts Accelerate's state anew, so there it is in time.
    assert done.stdout == "mps mps\ncpu cpu\n", done.stderr
    assert (
        "hf-mps: HF_MPS_DEVICE=cpu comes too late: Accelerate is on mps already; start a new process\n" in done.stderr
    )


WITHOUT_METAL = """
import torch
torch.mps.set_per_process_memory_fraction(1e-12)
from accelerate import PartialState
from lightning.pytorch import Trainer
from hf_mps.core.errors import UserError

for take in (PartialState, lambda: Trainer(accelerator="mps")):
    try:
        print("taken", take())
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_asking_a_library_for_metal_that_fails_is_refused_with_the_reason(run_python) -> None:
    env = {**SIMULATED, "ACCELERATE_TORCH_DEVICE": "mps", "HF_MPS_PROBE": "1"}
    done = run_python("-c", WITHOUT_METAL, env=env)
    first, second = done.stdout.splitlines()
    why = "the Metal GPU of Apple M1 (simulated) fails at its first use (RuntimeError: MPS backend out of memory"
    assert first.startswith(f"UserError: ACCELERATE_TORCH_DEVICE=mps: {why}")
    assert second.startswith("MisconfigurationException: `MPSAccelerator` can not run on your system")
    assert f"hf-mps: accelerator='mps': {why}" in done.stderr
