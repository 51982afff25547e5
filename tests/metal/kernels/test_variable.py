"""HF_MPS_KERNELS: what a process says where it cannot be served, and where it has nothing to serve."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from hf_mps.core.errors import UserError
from hf_mps.layer.activation import activate
from hf_mps.metal import kernels
from hf_mps.metal.device import choose
from hf_mps.tools.doctor import metal
from tests.metal.kernels.launch.conftest import running

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def said(monkeypatch: pytest.MonkeyPatch, value: str) -> str:
    monkeypatch.setenv("HF_MPS_KERNELS", value)
    with pytest.raises(UserError) as error:
        kernels.requested()
    return str(error.value)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (
            "2.0.0",
            snapshot(
                "HF_MPS_KERNELS=2.0.0: the Metal kernels of torch 2.0.0 are not fetched; next: hf-mps kernels fetch"
                " 2.0.0"
            ),
        ),
        (
            "banana",
            snapshot(
                "HF_MPS_KERNELS=banana: 'banana' is no release of PyTorch; allowed: a version, for example 2.13.0"
            ),
        ),
        (
            "2.13.0,chekced",
            snapshot("HF_MPS_KERNELS=2.13.0,chekced is not a value it knows; allowed: RELEASE or RELEASE,checked"),
        ),
        ("2.13.0,", snapshot("HF_MPS_KERNELS=2.13.0, is not a value it knows; allowed: RELEASE or RELEASE,checked")),
    ],
)
def test_a_value_that_cannot_be_served_is_named_with_the_next_command(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, value: str, line: str
) -> None:
    assert said(monkeypatch, value) == line


def test_without_llvmlite(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    assert said(monkeypatch, release) == snapshot(
        "HF_MPS_KERNELS=2.13.0: llvmlite, which reads Metal kernels, is not installed; next: pip install"
        " 'llvmlite<0.51,>=0.50'"
    )


def test_a_script_goes_on_without_the_device(run_python: Run) -> None:
    code = "import torch; print(torch.backends.mps.is_available())"
    ended = run_python("-c", code, env={"HF_MPS_SIMULATE": "1", "HF_MPS_KERNELS": "1.0"})
    assert ended.stdout == "False\n"
    assert ended.stderr.count("LayerWarning: hf_mps stays off: HF_MPS_KERNELS=1.0: ") == 1
    assert "Traceback" not in ended.stderr


def test_no_run_goes_to_the_cpu_for_it(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activate, "_on", False)
    monkeypatch.setenv("HF_MPS_KERNELS", "2.0.0")
    with pytest.raises(UserError, match=re.escape("HF_MPS_KERNELS=2.0.0: the Metal kernels of torch 2.0.0 are not")):
        activate.activate()


def test_without_a_simulated_device_it_does_nothing(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_KERNELS", "2.0.0")
    monkeypatch.delenv("HF_MPS_SIMULATE")
    activate.activate()
    (found,) = [each for each in metal.examine() if each.name == "Metal kernels"]
    assert (found.state, found.says) == ("note", "HF_MPS_KERNELS does nothing without a simulated device")
    assert found.next == snapshot("unset HF_MPS_KERNELS")


def test_the_doctor_counts_what_is_compiled(release: str) -> None:
    with running(release):
        (found,) = [each for each in metal.examine() if each.name == "Metal kernels"]
    pattern = rf"torch {re.escape(release)}'s own compute; [\d,]+ compiled for this CPU are kept, .+, in /.+/code/\w+"
    assert re.fullmatch(pattern, found.says), found.says
    assert found.state == "ok"


def test_the_line_about_the_device_says_whose_kernels_compute(release: str) -> None:
    with running(release):
        told = kernels.told(choose())
    assert told.value == "mps"
    assert told.reason.endswith(f"; computing with torch {release}'s own Metal kernels")
    assert kernels.told(choose()) == choose()
