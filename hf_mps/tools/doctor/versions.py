"""The stack's versions, what they need of each other, and the problems known for exactly these versions."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hf_mps.core.extras import INSTALL_SOURCES, SOURCES
from hf_mps.metal.device import faults, machine
from hf_mps.metal.device.faults import FAULTS, FIRST_FAMILIES
from hf_mps.tools.doctor.findings import CURED, KNOWN, Finding, note, ok, problem

OPTIONAL = ("lightning", "peft", "trl", "sentence-transformers", "safetensors", "tokenizers", "huggingface-hub")
TRIED = ("2.13.0", "2.14.1", "2.15.0")
"""Releases of torch that this project's tests ran with, on the simulated device; the last is the newest.

Of 2.15.0 the quick tests ran, but for part of those of recipes and of other processes, on the CPU half of PyPI's build
for Linux; .github/workflows/tests.yml names the twelve that fail.
"""
STOLEN = ("steals credentials: it was published with a stolen token", "GHSA-w37p-236h-pfx3")
# Package: the versions, what they do, the advisory. Known when this release of hf_mps was made.
ADVISORIES = {
    "transformers": ("<5.3", "can run code that a model's config.json names, when it loads the model", "CVE-2026-4372"),
    "lightning": (">=2.6.2,<=2.6.3", *STOLEN),
    "pytorch-lightning": (">=2.6.2,<=2.6.3", *STOLEN),
}
RIGHT_ON_THE_FIRST = "2.14"
"""The release that multiplies and adds biases rightly on M1 and M2 by itself: pytorch PR 183535 and PR 188619."""


def examine() -> list[Finding]:
    """Return every package of the stack with its version; what does not fit; the known problems of these versions."""
    needed, first = [], []
    try:
        needed = [Requirement(line) for line in metadata.requires("hf-mps") or ()]
    except metadata.PackageNotFoundError:
        told = f"imported from {SOURCES} and not installed, so nobody knows which packages it requires"
        first.append(note("hf-mps", told, INSTALL_SOURCES))
    required = {requirement.name: requirement for requirement in needed if requirement.marker is None}
    packages = [_installed(name, required.get(name)) for name in (*required, *OPTIONAL)]
    return [finding for finding in (*first, *packages, *_advised(), _newer(), *_known()) if finding is not None]


def version(package: str) -> str | None:
    """Return the installed version of a package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _advised() -> Iterator[Finding]:
    """Yield the security advisories for installed packages."""
    for package, (versions, what, advisory) in ADVISORIES.items():
        if (installed := version(package)) is not None and installed in SpecifierSet(versions):
            yield problem("advisory", f"{package} {installed} {what} ({advisory})", f"pip install --upgrade {package}")


def _installed(name: str, required: Requirement | None) -> Finding | None:
    installed = version(name)
    if installed is None:
        return problem(name, "not installed", f"pip install '{required}'") if required else None
    if name == "torch":
        # Which release of torch this is among those that were tried.
        release, tried = Version(installed), f"tried are {', '.join(TRIED)}"
        if too_old := faults.too_old(installed):
            return problem("torch", too_old, "pip install -U torch")
        if release.base_version in TRIED:
            return ok("torch", f"{installed}, which was tried with hf_mps")
        if release.release[:2] > Version(TRIED[-1]).release[:2]:
            says = f"{installed}: hf_mps was not tried with this release; {tried}"
            return note("torch", says, f"python -m pip install torch=={TRIED[-1]}, where something goes wrong")
        return ok("torch", f"{installed}; {tried}")
    # Without the word a specifier contains no release candidate, however new.
    if required and not required.specifier.contains(installed, prereleases=True):
        return problem(name, f"{installed}; hf_mps needs {required.specifier}", f"pip install --upgrade '{required}'")
    return ok(name, installed)


def _newer() -> Finding | None:
    """For owners of the first two generations, why another release is the better cure than a guard."""
    installed, chip = version("torch"), machine.present().chip
    if installed is None or not chip.startswith(FIRST_FAMILIES) or Version(installed) >= Version(RIGHT_ON_THE_FIRST):
        return None
    says = (
        f"on {chip} torch {RIGHT_ON_THE_FIRST} or later is recommended: its own kernels are right where sums over "
        "more than 32,766 values (pytorch#193487) and, on macOS 26, the bias of one row (#188438) are wrong in this "
        "one, or take longer because a guard cures them"
    )
    return note("newer torch", says, f"pip install --upgrade 'torch>={RIGHT_ON_THE_FIRST}'")


def _known() -> Iterator[Finding]:
    """Yield the faults of the installed versions on this machine: of each issue the first that is there."""
    this, issues = machine.present(), set()
    for fault in FAULTS.values():
        installed = version(fault.package)
        of_metal = fault.package == "torch"
        if not (installed and fault.listed) or fault.issue in issues or (of_metal and not this.mac):
            continue
        if fault.concerns(this.chip, this.macos, installed):
            issues.add(fault.issue)
            cured = f"{CURED}{fault.guard})" if fault.guard else ""
            yield note(KNOWN, f"{fault.package} {installed}: {fault.what}{cured}", fault.issue)
