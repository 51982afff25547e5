"""The Macs that the simulated device can stand for: chip, GPU cores, memory, macOS. No claim about their speed."""

from __future__ import annotations

from dataclasses import dataclass

from hf_mps.core import settings
from hf_mps.core.errors import UserError, nearest
from hf_mps.core.text import GIB
from hf_mps.metal.device import faults
from hf_mps.metal.device.machine import SIMULATED, Machine

DEFAULT = "m2-pro-16gb"


@dataclass(frozen=True)
class Profile:
    """A Mac: its chip's name, GPU cores, unified memory in bytes, macOS as (major, minor); a virtual one says so.

    The chip's name is Metal's with the word that it is simulated, so that whatever prints it says so.
    Source of the core counts: Apple's technical specifications of the Macs that were sold with that memory.
    """

    name: str
    chip: str
    cores: int
    memory: int
    macos: tuple[int, int]
    virtual: bool = False

    @property
    def recommended_max(self) -> int:
        """What Metal calls recommendedMaxWorkingSetSize, in bytes: how much the GPU should use at one time.

        Two thirds of the memory up to 32 GiB, three quarters above. Source: what Macs print, 10922.67 MiB of 16 GiB
        (abetlen/llama-cpp-python#687), 21845.34 of 32 (ollama/ollama#434), 73728 of 96 (ggml-org/llama.cpp#3213).
        Some newer macOS releases give 16 GiB machines more, 11.84 GiB (AlexsJones/llmfit#754); this takes the smaller.
        """
        return self.memory * 2 // 3 if self.memory <= 32 * GIB else self.memory * 3 // 4

    def machine(self) -> Machine:
        """Return the same facts as `hf_mps.metal.device` asks a machine for them."""
        return Machine(
            system="Darwin",
            processor="arm64",
            chip=self.chip,
            memory=self.memory,
            macos=".".join(map(str, self.macos)),
            virtual=self.virtual,
            simulated=True,
        )


def _profile(name: str, chip: str, cores: int, macos: tuple[int, int], *, virtual: bool = False) -> Profile:
    """Return a profile, with the memory that its name has: m1-8gb."""
    gigabytes = int(name.rsplit("-", 1)[1].removesuffix("gb"))
    return Profile(name, chip + SIMULATED, cores, gigabytes * GIB, macos, virtual)


PROFILES = {
    profile.name: profile
    for profile in (
        _profile("m1-8gb", "Apple M1", 8, (14, 7)),
        _profile("m1-16gb", "Apple M1", 8, (14, 7)),
        _profile("m1-macos26-16gb", "Apple M1", 8, (26, 0)),
        _profile("m1-max-32gb", "Apple M1 Max", 32, (15, 6)),
        _profile("m2-8gb", "Apple M2", 8, (15, 6)),
        _profile("m2-pro-16gb", "Apple M2 Pro", 16, (15, 6)),
        _profile("m2-ultra-192gb", "Apple M2 Ultra", 76, (15, 6)),
        _profile("m3-pro-18gb", "Apple M3 Pro", 18, (15, 6)),
        _profile("m3-max-36gb", "Apple M3 Max", 30, (15, 6)),
        _profile("m4-16gb", "Apple M4", 10, (26, 0)),
        _profile("m4-pro-24gb", "Apple M4 Pro", 20, (26, 0)),
        _profile("m4-max-64gb", "Apple M4 Max", 40, (26, 0)),
        _profile("m5-macos27-24gb", "Apple M5", 10, (27, 0)),
        # GitHub's hosted macos-15: 3 cores and 7 GiB of an M1, of whose GPU Metal has a paravirtual device.
        _profile("m1-virtual-7gb", "Apple M1 (Virtual)", 8, (15, 6), virtual=True),
    )
}


def get(name: str) -> Profile:
    """Return the profile called `name`; "1" is the default one. Raises UserError for a name that there is not."""
    wanted = DEFAULT if name == "1" else name.strip().lower()
    if wanted not in PROFILES:
        raise UserError(
            f"HF_MPS_SIMULATE={name} is no device profile; allowed: 1, {', '.join(PROFILES)}{nearest(wanted, PROFILES)}"
        )
    return PROFILES[wanted]


def requested() -> Profile | None:
    """Return the profile that HF_MPS_SIMULATE asks for, or None where it asks for none.

    Raises UserError for a profile that there is not, and for a fault that there is not in HF_MPS_FAULTS.
    """
    name = settings.simulate()
    if name is None:
        return None
    profile = get(name)
    faults.left_out()
    return profile
