"""Facts of the device: the same on a Mac and on the simulated one, each dtype with its reason."""

from __future__ import annotations

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.metal.device import facts, machine, precision
from hf_mps.metal.device.facts import Facts
from tests.metal.device.machines import GIB, MAC


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch):
    """A Mac whose chip, macOS and torch a test can name."""

    def be(chip: str = "Apple M2", macos: tuple[int, int] = (15, 6), version: str = "2.13.0") -> None:
        monkeypatch.setattr(torch.backends.mps, "get_name", lambda: chip)
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: macos >= (major, minor))
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        here = machine.Machine("Darwin", "arm64", chip, 16 * GIB, macos=f"{macos[0]}.{macos[1]}")
        monkeypatch.setattr(machine, "_overridden", here)

    return be


def test_the_device_of_this_suite_describes_itself() -> None:
    here = facts.facts("mps")
    assert here.device == "mps"
    assert here.chip.startswith("Apple M")
    assert here.cores is not None
    assert here.cores > 0
    assert here.recommended is not None
    assert GIB < here.recommended < here.memory
    assert here.macos is not None


def test_the_facts_read_as_lines() -> None:
    here = Facts("mps", "Apple M2", 10, 16 * GIB, 11 * GIB, "15.6")
    assert here.lines() == snapshot(
        [
            "device: mps, Apple M2, 10 GPU cores",
            "memory: 16.0 GiB, of which 11.0 GiB recommended",
            "system: macOS 15.6",
        ]
    )


def test_each_dtype_has_its_reason() -> None:
    dtypes = precision.dtypes("mps")
    assert dtypes["float32"].reason == snapshot("every Metal GPU computes it")
    assert not dtypes["float64"].value
    assert dtypes["float64"].reason == snapshot(
        "Metal has no float64 at all; use float32, and convert numpy columns before they reach the device"
    )


def test_float64_is_what_the_device_refuses() -> None:
    with pytest.raises(TypeError, match="doesn't support float64"):
        torch.ones(1, dtype=torch.float64, device="mps")


def test_bfloat16_is_native_from_the_m3_on(mac) -> None:
    mac("Apple M3 Pro")
    assert str(precision.dtypes("mps")["bfloat16"]) == snapshot("True (Apple M3 Pro computes it)")
    mac("Apple M10")
    assert not precision.emulates_bfloat16()


@pytest.mark.parametrize("chip", ["Apple M1", "Apple M1 Max", "Apple M2 Ultra"])
def test_bfloat16_is_emulated_on_m1_and_m2(chip: str, mac) -> None:
    mac(chip)
    assert str(precision.dtypes("mps")["bfloat16"]) == (
        f"True ({chip} emulates it in float32, so it saves memory only)"
    )


def test_the_cpu_has_no_float16_training() -> None:
    dtypes = precision.dtypes("cpu")
    assert {name: usable.value for name, usable in dtypes.items()} == {
        "float32": True,
        "float16": False,
        "bfloat16": True,
        "float64": True,
    }


def test_the_facts_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_overridden", MAC)
    here = facts.facts("cpu")
    assert (here.chip, here.cores, here.memory, here.recommended) == ("Apple M2", None, 16 * GIB, None)
