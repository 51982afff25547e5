"""`hf-mps doctor`: each sentence about an absent or broken Metal, said where that condition was made."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.cli.main import main
from hf_mps.layer.guards.catalogue import registry
from hf_mps.metal import device
from hf_mps.metal.device import machine, probe
from hf_mps.tools import doctor
from hf_mps.tools.doctor import accelerate_config, environment, guards, metal
from hf_mps.tools.doctor import machine as machines
from hf_mps.tools.doctor.findings import Finding
from tests import CHECKOUT

GIB = 2**30
APPLE = "https://developer.apple.com/metal/pytorch/"

Pretend = Callable[..., None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretend]:
    """Be another machine, with another PyTorch: `built`, `found`, and what the trial on the device does."""
    monkeypatch.setattr(probe, "_known", None)

    def be(
        *,
        chip: str = "Apple M2",
        macos: str | None = "15.6",
        system: str = "Darwin",
        processor: str = "arm64",
        built: bool = True,
        found: bool = True,
        trial: Callable[[], bool] = lambda: True,
        rosetta: bool = False,
        virtual: bool = False,
    ) -> None:
        here = machine.Machine(system, processor, chip, 16 * GIB, macos=macos, rosetta=rosetta, virtual=virtual)
        monkeypatch.setattr(machine, "_overridden", here)
        monkeypatch.setattr(torch.backends.mps, "is_built", lambda: built)
        monkeypatch.setattr(torch.mps, "device_count", lambda: int(found))
        monkeypatch.setattr(probe, "_trial", trial)

    yield be
    probe._known = None


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What configuration this machine has, and what earlier tests left on the device, is not the test's."""
    monkeypatch.setattr(accelerate_config, "default_place", lambda: tmp_path / "default_config.yaml")
    monkeypatch.setattr(probe, "_known", None)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 0)


def named(found: list[Finding], name: str) -> Finding:
    (one,) = [each for each in found if each.name == name]
    return one


def fail(text: str) -> Callable[[], bool]:
    return Mock(side_effect=RuntimeError(text))


def test_a_ready_mac(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "Apple's verification" in out
    assert """torch.ones(1, device="mps") prints tensor([1.], device='mps:0')""" in out
    assert "Metal passed its probe on Apple M" in out
    assert "device of a run" in out
    assert "\nguards\n" in out
    assert "(cured here by" not in out  # they are counted in one line, and JSON lists them
    assert out.count("cured here by guards") == 1


def test_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ready"] is True
    assert told["simulated"] is device.simulated()
    assert list(told["findings"]) == [
        *("machine", "metal", "training kernels", "memory", "versions", "environment", "guards")
    ]
    assert set(told["findings"]["metal"][0]) == {"name", "state", "says", "next"}


def test_no_mac(pretend: Pretend, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(system="Linux", chip="AMD EPYC", processor="x86_64", macos=None, built=False, found=False)
    assert main(["doctor"]) == 1
    ended = capsys.readouterr()
    assert "! computer" in ended.out
    assert "Linux on AMD EPYC: this is not a Mac, so there is no Metal" in ended.out
    assert ended.err == snapshot(
        "hf-mps: doctor: 3 problems: computer, built, probe; "
        "next: HF_MPS_SIMULATE=1 gives this machine a simulated Metal device\n"
    )


def test_a_simulated_mac_is_told_from_a_real_one(simulated: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    real = machine.real()
    lines = dict(line[2:].split(None, 1) for line in out.splitlines() if line[:1] in " ·" and line.strip())
    assert lines["simulated"].startswith(f"this is {real.system} on {real.chip}, which simulates Apple M")
    for name in ("computer", "python", "macos", "built", "found", "probe", "memory", "recommended"):
        assert "(simulated)" in lines[name], name


def test_a_real_mac_is_not_called_simulated(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend()
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M2")
    found = [*machines.examine(), *metal.examine(), *machines.examine_memory()]
    assert not [each for each in found if "simulated" in each.name + each.says]


def test_without_metal_the_guards_are_one_line_and_what_concerns_the_user_stays(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(system="Linux", chip="AMD EPYC", processor="x86_64", macos=None, built=False, found=False)
    for each in registry().made("guard"):  # what tests before this one had them do is no part of it
        monkeypatch.setattr(each, "times", 0)
    (idle,) = guards.examine()
    assert idle.says.endswith(" guards have nothing to do, as there is no Metal")
    monkeypatch.setattr(registry().get("pin-memory"), "failure", "KeyError: 'gone'")
    failed, idle = guards.examine()
    assert (failed.name, failed.state) == ("pin-memory", "problem")


def test_every_finding_that_is_not_well_tells_what_to_do(pretend: Pretend) -> None:
    pretend(macos="13.6", found=False)
    for _, findings in doctor.examine():
        for each in findings:
            assert bool(each.next) == (each.state != "ok"), each


OLDEST = ".".join(map(str, probe.oldest_macos(torch.__version__)))
UNBUILT = {"built": False, "found": False}
ROSETTA = {"processor": "x86_64", "rosetta": True, **UNBUILT}
INTEL = {"processor": "x86_64", "chip": "Intel(R) Core(TM) i9", **UNBUILT}
# What the machine is -> its findings: the state, the end of what is said, and the next step.
MACHINES: list[tuple[dict[str, Any], dict[str, tuple[str, str, str]]]] = [
    (
        ROSETTA,
        {
            "computer": ("ok", "a Mac with Apple silicon: Apple M2", ""),
            "python": (
                "problem",
                "platform says x86_64, the kernel says that the process is translated by Rosetta",
                "arch -arm64 python3 -m venv metal",
            ),
        },
    ),
    (
        INTEL,
        {
            "computer": (
                "problem",
                "a Mac with an Intel processor (Intel(R) Core(TM) i9): PyTorch has no release for it after 2.2.2, so"
                " none for an AMD GPU in it",
                "HF_MPS_DEVICE=cpu trains on the CPU; system_profiler SPDisplaysDataType names the GPU",
            ),
            "built": ("problem", "", "to train on the CPU: HF_MPS_DEVICE=cpu"),
        },
    ),
    (
        {"virtual": True, "chip": "Apple M1 (Virtual)"},
        {"computer": ("ok", "Apple M1 (Virtual), in a virtual machine", "")},
    ),
    (
        {"macos": "13.6", "found": False},
        {
            "macos": (
                "problem",
                f"macOS 13.6; the Metal backend of PyTorch {torch.__version__} needs {OLDEST} or newer",
                "softwareupdate --list",
            ),
            "probe": ("problem", "", "look for an update: softwareupdate --list"),
        },
    ),
    ({"macos": None}, {"macos": ("note", "", "sw_vers -productVersion")}),
    (
        UNBUILT,
        {
            "built": (
                "problem",
                "is built without Metal, though this is a Mac with Apple M2",
                "install the official build: pip install --force-reinstall torch",
            ),
        },
    ),
    (
        {"found": False},
        {
            "found": (
                "problem",
                "PyTorch finds no Metal device; its error blames the macOS version also where a sandbox or a session"
                " without the GPU is the reason",
                "https://github.com/pytorch/pytorch/issues/167679",
            ),
            "probe": ("problem", "", "see what the Mac has: system_profiler SPDisplaysDataType"),
        },
    ),
]


@pytest.mark.parametrize(("here", "expected"), MACHINES)
def test_what_a_machine_lacks_is_told_with_the_next_step(
    here: dict[str, Any], expected: dict[str, tuple[str, str, str]], pretend: Pretend
) -> None:
    pretend(**here)
    found = [*machines.examine(), *metal.examine()]
    for name, (state, says, advice) in expected.items():
        assert (named(found, name).state, named(found, name).next) == (state, advice)
        assert named(found, name).says.endswith(says)
    assert here.get("found", True) or not [each for each in found if each.name == "Apple's verification"]


def test_a_macos_that_the_newest_torch_left_behind(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(macos="14.7", found=False)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.15.0"))
    macos = named(machines.examine(), "macos")
    assert macos.says == snapshot("macOS 14.7; the Metal backend of PyTorch 2.15.0 needs 15.0 or newer")
    assert macos.next == snapshot("pip install 'torch<2.15', or softwareupdate --list")
    refused = named(metal.examine(), "probe")
    assert refused.says == snapshot(
        "PyTorch 2.15.0 has no GPU on macOS 14.7: its Metal backend needs macOS 15.0 or newer, and pip installs it "
        "here all the same"
    )
    assert refused.next == snapshot("take the newest that has one: pip install 'torch<2.15'")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.14.1"))
    assert named(machines.examine(), "macos").state == "ok"


@pytest.mark.parametrize("there", [True, False])
def test_the_command_line_tools(there: bool, pretend: Pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend()
    answer = tmp_path / "xcode-select"
    answer.write_text(f"#!/bin/sh\n{'echo /Library/Developer/CommandLineTools' if there else 'exit 2'}\n")
    answer.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    tools = named(machines.examine(), "command-line tools")
    if there:
        assert (tools.state, tools.says) == ("ok", "/Library/Developer/CommandLineTools")
    else:
        assert (tools.state, tools.next) == ("note", "xcode-select --install")


def test_tools_that_hang_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=subprocess.TimeoutExpired("xcode-select", 10)))
    assert machines.tools() is None


def test_a_gpu_that_fails_at_its_first_use(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(virtual=True, trial=fail("MPS backend out of memory"))

    monkeypatch.setattr(
        torch, "ones", Mock(side_effect=RuntimeError("MPS backend out of memory (MPS allocated: 0 bytes)"))
    )
    found = metal.examine()
    apple = named(found, "Apple's verification")
    assert (apple.state, apple.next) == ("problem", APPLE)
    assert apple.says == snapshot(
        'torch.ones(1, device="mps") fails: MPS backend out of memory (MPS allocated: 0 bytes)'
    )
    failed = named(found, "probe")
    assert "this is a virtual machine whose Metal GPU fails at its first use" in failed.says
    assert failed.next == snapshot("to train on the CPU: HF_MPS_DEVICE=cpu")
    assert named(found, "device of a run").state == "note"


def test_a_tensor_of_ones_that_holds_something_else(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend()
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))
    apple = named(metal.examine(), "Apple's verification")
    assert (apple.state, apple.says) == ("problem", snapshot('torch.ones(1, device="mps") holds 0.0'))


def test_memory_and_swap(monkeypatch: pytest.MonkeyPatch, pretend: Pretend) -> None:
    pretend()
    now, swap = psutil.virtual_memory(), psutil.swap_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: now._replace(available=2 * GIB))
    monkeypatch.setattr(psutil, "swap_memory", lambda: swap._replace(used=3 * GIB))
    found = machines.examine_memory()
    assert named(found, "memory").says == snapshot(
        "16.00 GiB in all, 2.00 GiB free for programs: a training will swap early"
    )
    assert "beside live memory a Mac's driver holds 0.6 to 0.9 GiB more" in named(found, "recommended").says
    assert named(found, "swap").says == snapshot("3.00 GiB are swapped out, which slows training down many times")


FALLBACK, NOT_ONE = "PYTORCH_ENABLE_MPS_FALLBACK", "PYTORCH_MPS_FALLBACK"
HIGH, LOW = "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO"
DEVICE, USE_CPU = "ACCELERATE_TORCH_DEVICE", "ACCELERATE_USE_CPU"
VISIBLE, AUTOLOAD = "CUDA_VISIBLE_DEVICES", "TORCH_DEVICE_BACKEND_AUTOLOAD"


@pytest.mark.parametrize(
    ("words", "state", "says", "advice"),
    [
        (f"{FALLBACK}=true", "problem", "is a value that nobody reads", ""),
        (f"{FALLBACK}=1", "note", "hf_mps falls back without it", ""),
        (f"{FALLBACK}=0", "note", "is an error", ""),
        (f"{NOT_ONE}=1", "problem", f"PyTorch reads no variable of this name; did you mean '{FALLBACK}'?", ""),
        (f"{HIGH}=0.0", "problem", "0 lifts the limit", ""),
        (f"{HIGH}=1.0", "problem", "1 is below the low watermark, 1.4", f"{LOW}=1"),
        (f"{HIGH}=2.5", "problem", "far into swap", ""),
        (f"{HIGH}=much", "problem", "much is not a number", ""),
        (
            f"{DEVICE}=cpu",
            "note",
            "lets TrainingArguments and Lightning follow",
            "HF_MPS_DEVICE=cpu sends all three there",
        ),
        (
            f"{USE_CPU}=true",
            "problem",
            "while TrainingArguments stays on mps",
            f"unset {USE_CPU} (HF_MPS_DEVICE=cpu moves all three)",
        ),
        (f"{LOW}=0.8 {HIGH}=1.0", "ok", "", ""),
        (f"HF_MPS_DEVICE=cpu {DEVICE}=mps", "problem", "mps contradicts HF_MPS_DEVICE=cpu, which wins", ""),
        (f"{VISIBLE}=0", "note", "nothing reads it on a Mac", ""),
        (f"{AUTOLOAD}=0", "problem", "hf_mps is not on in plain scripts", "hf-mps run script.py"),
    ],
)
def test_a_variable(
    words: str, state: str, says: str, advice: str, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend()
    for word in words.split():
        name, _, value = word.partition("=")
        monkeypatch.setenv(name, value)
    finding = named(environment.examine(), name)
    assert (finding.state, finding.next) == (state, "" if state == "ok" else advice or f"unset {name}")
    assert says in finding.says


def openmp(*files: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> list[environment.Finding]:
    """What is found of OpenMP in an environment with these files, where two copies are allowed."""
    for path in (root / name for name in files):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(environment.sysconfig, "get_path", lambda _: str(root))
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "TRUE")
    return [each for each in environment.examine() if each.name == "KMP_DUPLICATE_LIB_OK"]


def test_two_copies_of_openmp_that_may_run_in_one_process(
    pretend: Pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend()
    assert not openmp("torch/lib/libomp.dylib", "torch/lib/libcompose.dylib", root=tmp_path, monkeypatch=monkeypatch)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.dylib").symlink_to(tmp_path / "torch/lib/libomp.dylib")
    assert not openmp(root=tmp_path, monkeypatch=monkeypatch), "one file under two names"
    (found,) = openmp("sklearn/.dylibs/libomp.dylib", root=tmp_path, monkeypatch=monkeypatch)
    assert (found.state, found.next) == ("problem", "unset KMP_DUPLICATE_LIB_OK")
    assert "lib/libiomp5.dylib, sklearn/.dylibs/libomp.dylib; " in found.says
    pretend(system="Linux", macos=None)
    assert not openmp(root=tmp_path, monkeypatch=monkeypatch)


def test_a_library_that_breaks_on_its_import_ends_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = guards.importlib.import_module  # type: ignore[attr-defined]
    broken: list[str] = []

    def imported(name: str, package: str | None = None) -> object:
        if name == "accelerate.launchers":
            broken.append(name)
            raise RuntimeError("operator torchvision::nms does not exist")
        return stock(name, package)

    monkeypatch.setattr(guards.importlib, "import_module", imported)  # type: ignore[attr-defined]
    assert guards.examine()
    assert broken


def test_a_package_that_is_not_installed_serves_no_plain_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [])
    assert named(environment.examine(), "autoload").next == f"pip install -e {CHECKOUT}"


@pytest.mark.parametrize(
    ("text", "state", "advice"),
    [
        ("use_cpu: true\ndistributed_type: 'NO'\n", "problem", "hf-mps config"),
        ("distributed_type: MPS\n", "problem", "hf-mps config"),
        ("distributed_type: 'NO'\nuse_cpu: false\n", "ok", ""),
        ("distributed_type: FSDP\n", "note", "hf-mps config --config_file "),
    ],
)
def test_accelerates_configuration(text: str, state: str, advice: str, tmp_path: Path) -> None:
    accelerate_config.default_place().write_text(text, encoding="utf-8")
    found = named(environment.examine(), "accelerate config")
    assert (found.state, found.next[: len(advice) or None]) == (state, advice)


def test_guards_that_failed_or_were_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = registry().get("non-blocking")
    monkeypatch.setattr(guard, "failure", "does not know this version of torch")
    with registry().suspended("checkpoint-rng", kind="guard"):
        found = guards.examine()
    assert named(found, "non-blocking").state == "problem"
    assert named(found, "non-blocking").says == snapshot("failed: does not know this version of torch")
    assert named(found, "checkpoint-rng").state == "note"
    assert named(found, "checkpoint-rng").says.startswith("off: suspended; ")


@pytest.mark.parametrize(
    "name", ["HF_MPS_DEVISE", "HF_MPS_DEVICE", "HF_MPS_SIMULATE", "HF_MPS_FAULTS", "HF_MPS_KERNELS"]
)
def test_a_refused_variable_is_all_that_it_says(name: str, run_python) -> None:
    ended = run_python("-m", "hf_mps", "doctor", env={"HF_MPS_SIMULATE": "1", name: "-nosuch"})
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines()[-1].startswith(f"hf-mps: {name}")


def test_what_concerns_the_machine_comes_before_libraries_are_imported(run_python) -> None:
    """The guards' section needs transformers, Lightning and others, which takes most of the doctor's time."""
    program = (
        "import sys\nfrom hf_mps.tools import doctor\n"
        "for name, findings in doctor.examine():\n    print(name, 'transformers.trainer' in sys.modules)"
    )
    *machine, guards = run_python("-c", program).stdout.splitlines()
    assert [line.split()[-1] for line in machine] == ["False"] * 6
    assert guards == "guards True"
