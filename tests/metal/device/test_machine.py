"""What the kernel says of a Mac, and the one place to say that this is another machine."""

from __future__ import annotations

import platform
import sys

import pytest

from hf_mps.metal.device import machine
from tests.metal.device.machines import LINUX, MAC

GIB = 2**30
M2 = {
    "machdep.cpu.brand_string": b"Apple M2\0",
    "hw.memsize": (16 * GIB).to_bytes(8, sys.byteorder),
    "kern.osproductversion": b"15.6\0",
    "kern.hv_vmm_present": (0).to_bytes(4, sys.byteorder),
    "hw.optional.arm64": (1).to_bytes(4, sys.byteorder),
    "sysctl.proc_translated": (0).to_bytes(4, sys.byteorder),
}
YES = (1).to_bytes(4, sys.byteorder)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A kernel that answers like an M2's; the test may change its values."""
    values = dict(M2)
    monkeypatch.setattr(machine, "_sysctl", values.get)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    return values


def test_a_mac_as_its_kernel_describes_it(kernel: dict[str, bytes]) -> None:
    assert machine._read_mac() == MAC  # neither virtual nor translated
    kernel["kern.hv_vmm_present"] = YES
    assert machine._read_mac().virtual is True


def test_the_kernel_and_not_python_tells_the_macos_version(
    kernel: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: ("10.16", ("", "", ""), "arm64"))
    assert machine._read_mac().macos == "15.6"
    del kernel["kern.osproductversion"]
    assert machine._read_mac().macos == "10.16"


@pytest.mark.parametrize("key", ["sysctl.proc_translated", "hw.optional.arm64"])
def test_rosetta_is_what_the_kernel_says_of_an_x86_process(
    key: str, kernel: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for known in ("sysctl.proc_translated", "hw.optional.arm64"):
        del kernel[known]
    assert machine._read_mac().rosetta is False  # an Intel Mac's kernel knows neither
    kernel[key] = YES
    assert machine._read_mac().rosetta is True


@pytest.mark.parametrize(
    ("macos", "enough"), [("14.0", True), ("14.7.1", True), ("26", True), ("13.7.4", False), ("beta", False)]
)
def test_macos_versions_compare_by_number(macos: str, enough: bool) -> None:
    here = machine.Machine("Darwin", "arm64", "Apple M1", GIB, macos=macos)
    assert here.macos_at_least(14, 0) is enough
    assert not LINUX.macos_at_least(14, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_machine_has_a_chip_and_memory() -> None:
    here = machine._read_other()
    assert here.system == "Linux"
    assert here.chip
    assert here.memory > GIB
    assert not here.mac


def test_knowing_the_machine_needs_no_torch(run_python) -> None:
    code = "import sys; from hf_mps.metal.device import machine; machine.present(); print('torch' in sys.modules)"
    assert run_python("-c", code).stdout == "False\n"
