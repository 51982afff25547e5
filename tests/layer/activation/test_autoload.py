"""Every `import torch` comes through here: it costs next to nothing, and never fails because of us."""

from __future__ import annotations

import re
import sys
import warnings
from unittest.mock import Mock

import pytest
import torch  # the first start of this process
from inline_snapshot import snapshot

import hf_mps.layer.activation.activate
from hf_mps import autoload
from hf_mps.core.notices import LayerWarning
from tests import CHECKOUT

BENCHMARK = CHECKOUT / "scripts" / "bench" / "bench_autoload.py"
PLAIN = {"HF_MPS_SIMULATE": None, "HF_MPS_DEVICE": None, "TORCH_DEVICE_BACKEND_AUTOLOAD": None}


def lines(monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[str]:
    """The warnings of `start` under these variables."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        autoload.start()
    assert all(warning.category is LayerWarning for warning in caught)
    return [str(warning.message) for warning in caught]


NOTHING_TO_DO = """
import sys
import torch
print(torch.ones(2).sum().item(), torch.backends.mps.is_available())
heavy = ("transformers", "accelerate", "lightning", "pydantic", "rich", "typer", "psutil", "yaml", "matplotlib")
print([name for name in heavy if name in sys.modules])
ours = sorted(name for name in sys.modules if name.startswith("hf_mps"))
print([name for name in ours if "simulator" in name or "finetune" in name or "machine" in name or "probe" in name])
"""


def test_with_nothing_to_do_nothing_heavy_is_imported_and_nothing_is_said(run_python) -> None:
    done = run_python("-c", "import hf_mps, sys; print('torch' in sys.modules)", env=PLAIN)
    assert done.stdout == "False\n"
    code = NOTHING_TO_DO.replace("print(torch.ones(2).sum().item(), torch.backends.mps.is_available())\n", "")
    done = run_python("-W", "error", "-c", code, env=PLAIN)
    assert (done.stdout, done.stderr) == ("[]\n[]\n", "")


def test_hf_mps_0_leaves_torch_as_it_is(run_python) -> None:
    code = NOTHING_TO_DO + "print(ours, hasattr(torch.backends.mps.is_available, 'hf_mps'))"
    done = run_python("-c", code, env={**PLAIN, "HF_MPS": "0", "HF_MPS_DEVICE": "nonsense"})
    assert done.stdout == snapshot("2.0 False\n[]\n[]\n['hf_mps', 'hf_mps.autoload'] False\n")
    assert done.stderr == ""


def test_an_unchanged_script_gets_the_simulated_device(run_python) -> None:
    done = run_python(
        "-c", "import torch; print((torch.ones(2, device='mps') * 3).tolist())", env={"HF_MPS_DEVICE": None}
    )
    assert done.stdout == "[3.0, 3.0]\n", done.stderr


def test_a_misspelt_variable_is_one_warning_and_torch_goes_on(run_python) -> None:
    done = run_python("-c", NOTHING_TO_DO, env={**PLAIN, "HF_MPS_DEVCE": "cpu"})
    assert done.stdout.startswith("2.0 False\n")
    assert done.stderr.count("Warning") == 1
    assert "LayerWarning: hf_mps stays off: HF_MPS_DEVCE is no variable of hf_mps; it reads " in done.stderr
    assert "did you mean 'HF_MPS_DEVICE'?" in done.stderr


def test_a_program_that_turns_warnings_into_errors_still_imports_torch(run_python) -> None:
    done = run_python("-W", "error", "-c", "import torch; print('here')", env={**PLAIN, "HF_MPS_DEVICE": "xpus"})
    assert done.stdout == "here\n"
    assert done.stderr == snapshot(
        "hf-mps: hf_mps stays off: HF_MPS_DEVICE=xpus is not a device it knows; allowed: mps, cuda, cpu\n"
    )


def test_a_value_that_nobody_knows_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(monkeypatch, HF_MPS="off") == ["hf_mps stays off: HF_MPS=off is not a value it knows; allowed: 0, 1"]


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac refuses every profile")
def test_an_unknown_profile_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = lines(monkeypatch, HF_MPS_SIMULATE="m1-8gib")
    assert line.startswith("hf_mps stays off: ")
    assert "m1-8gib" in line
    assert "m1-8gb" in line


def test_a_bug_of_ours_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_mps.layer.activation.activate, "activate", Mock(side_effect=KeyError("a bug\nin two lines")))
    assert lines(monkeypatch) == snapshot(["hf_mps stays off: KeyError: 'a bug\\nin two lines'"])


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac refuses the simulated device")
def test_loading_the_device_by_hand_before_torch_finds_the_work_done(run_python) -> None:
    code = "from hf_mps.metal import simulator; print(simulator.load().name, simulator.load().name)"
    done = run_python("-W", "error", "-c", code)
    assert (done.stdout, done.stderr) == ("m2-pro-16gb m2-pro-16gb\n", "")


def test_a_second_start_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.mps.is_available, list(sys.meta_path)
    assert lines(monkeypatch) == []
    assert (torch.backends.mps.is_available, list(sys.meta_path)) == before


@pytest.mark.nightly
@pytest.mark.slow
def test_the_benchmark_prints_the_layers_own_share_of_import_torch(run_python) -> None:
    done = run_python(BENCHMARK, "--rounds", "1", env=PLAIN)
    assert done.returncode == 0, done.stderr
    share = re.search(r"^the layer's own share +([\d.]+) ms", done.stdout, re.MULTILINE)
    assert share is not None, done.stdout


IMPORTED = """
import sys, torch
print([name for name in sys.modules if name.partition(".")[0] in ("packaging", "transformers", "psutil")])
from hf_mps.metal import simulator
print(simulator._metal().times_asked(), torch.mps._is_in_bad_fork())
import os
child = os.fork()
if child == 0:
    os._exit(int(torch.mps._is_in_bad_fork()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
torch.ones(1, device="mps")
child = os.fork()
if child == 0:
    os._exit(int(torch.mps._is_in_bad_fork()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_import_torch_neither_looks_for_the_device_nor_bars_forked_children_from_it(run_python) -> None:
    """gunicorn --preload and celery import torch in the parent, and use the device in forked children alone.

    Nothing is imported at that time that only a later question needs.
    """
    done = run_python("-W", "error", "-c", IMPORTED)
    assert (done.stdout.splitlines(), done.stderr) == (["[]", "0 False", "0", "1"], "")


OVERRIDDEN = """
import warnings
warnings.simplefilter("error")
import torch
library = torch._C._dispatch_library("IMPL", "aten", "MPS", "")
try:
    library.impl("mode", "MPS", lambda *_: None)
except UserWarning as warning:
    print(str(warning).partition("\\n")[0][:40])
"""


def test_import_torch_warns_of_nothing_and_leaves_pytorchs_once_only_warnings_unsaid(run_python) -> None:
    done = run_python("-c", OVERRIDDEN, env={"HF_MPS": "1"})
    assert (done.stdout, done.stderr) == (snapshot("Warning only once for all operators,  ot\n"), "")
    # The fault: the same override by the layer, heard.
    told = run_python("-W", "error", "-c", "import hf_mps.core.notices as u\n"
        "from contextlib import nullcontext\nu.ignoring = lambda *_: nullcontext()\nimport torch")  # fmt: skip
    assert "Overriding a previously registered kernel" in told.stderr or "Warning only once" in told.stderr
