"""The layer is switched on once, changes no environment variable, and can say all that it switched on."""

from __future__ import annotations

import json
from unittest.mock import Mock

import pytest
from inline_snapshot import snapshot

from hf_mps.layer import integrations
from hf_mps.layer.activation import activate
from hf_mps.metal import device
from hf_mps.metal.device import probe

PLAIN = {"HF_MPS_SIMULATE": None, "HF_MPS_DEVICE": None, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def test_it_is_reachable_from_the_package(run_python) -> None:
    code = (
        "import hf_mps, sys\n"
        "print(hf_mps.activate.activate.__name__, hf_mps.device.choose.__name__, 'torch' in sys.modules)\n"
        "hf_mps.nothing"
    )
    done = run_python("-c", code, env=PLAIN)
    assert done.stdout == "activate choose False\n"
    assert done.stderr.splitlines()[-1] == snapshot("AttributeError: module 'hf_mps' has no attribute 'nothing'")


def test_it_says_the_device_and_each_part_with_its_reason() -> None:
    lines = activate.activate().lines()
    assert lines[0] == f"device: {device.choose()}"
    assert lines[1].startswith(
        "torch.backends.mps.is_available: on (answers with HF_MPS_DEVICE and, in virtual machines, with a real probe, "
        "and torch.accelerator with it; "
    )
    libraries = ["accelerate", "transformers", "shims", "lightning", "attention", "hub_kernels", "compiler"]
    assert [line.partition(":")[0] for line in lines[2:]] == [
        "fallback",
        "guards",
        "sentinels",
        "fused step",
        *libraries,
    ]


LATER = """
import json, os
import torch
from hf_mps.layer.activation import activate
before = dict(os.environ)
on = activate.activate()
same = before == dict(os.environ)
first = [str(part) for part in on.parts()]
import accelerate.state, lightning.fabric.accelerators.mps
accelerate.state.PartialState
lightning.fabric.accelerators.mps.MPSAccelerator.is_available()
activate.activate()
print(json.dumps([first, [str(part) for part in on.parts()], same]))
"""


def test_libraries_wait_for_their_import_and_are_on_afterwards(run_python) -> None:
    done = run_python("-c", LATER, env=PLAIN)
    assert done.returncode == 0, done.stderr
    first, then, same = json.loads(done.stdout)
    assert first[1:] == [
        "fallback: off (this PyTorch has no Metal device)",
        "guards: off (this PyTorch has no Metal device)",
        "sentinels: off (this PyTorch has no Metal device)",
        "fused step: off (scripts ask for it with HF_MPS_FUSED_STEP=1, recipes have it by fused_step)",
        "accelerate: off (waits for its import)",
        "transformers: off (waits for its import)",
        "shims: off (waits for its import)",
        "lightning: off (waits for its import)",
        "attention: off (waits for its import)",
        "hub_kernels: off (waits for its import)",
        "compiler: off (waits for its import)",
    ]
    states = [line.split(" (")[0] for line in then[5:]]
    assert [state for state in states if not state.startswith(("shims", "attention", "hub_kernels", "compiler"))] == [
        "accelerate: on",
        "transformers: off",
        "lightning: on",
    ]
    assert same


def test_every_integration_has_its_reason() -> None:
    assert all(len(integrations.reason(name).split()) > 5 for name in [*integrations.INTEGRATIONS.names, "shims"])


def test_asking_what_is_on_does_not_touch_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "metal", Mock(side_effect=AssertionError("the device was probed")))
    assert activate.activate().parts()


def test_switched_off_it_does_nothing_and_says_so(run_python) -> None:
    code = (
        "from hf_mps.layer.activation.activate import activate\n"
        "print([str(part) for part in activate().parts()])\n"
        "import torch; print(hasattr(torch.backends.mps.is_available, 'hf_mps'))"
    )
    done = run_python("-c", code, env={**PLAIN, "HF_MPS": "0"})
    assert done.stdout == "['hf_mps: off (HF_MPS=0)']\nFalse\n"
