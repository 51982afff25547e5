"""The stack's versions, what they need of each other, and the problems known for exactly these versions."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hf_mps.device import machine
from hf_mps.doctor.finding import Finding, note, ok, problem
from hf_mps.doctor.known import FIRST_FAMILIES, KNOWN, Known

OPTIONAL = ("lightning", "peft", "trl", "sentence-transformers", "safetensors", "tokenizers", "huggingface-hub")
TRIED = ("2.8.0", "2.13.0", "2.14.1")
"""Releases of torch that this project's tests ran with, on the simulated device; the last is the newest."""
RIGHT_ON_THE_FIRST = "2.14"
"""The release that multiplies and adds biases rightly on M1 and M2 by itself: pytorch PR 183535 and PR 188619."""


def examine() -> list[Finding]:
    """Every package of the stack with its version; what does not fit; the known problems of these versions."""
    needed = [Requirement(line) for line in metadata.requires("hf-mps") or ()]
    wanted = {each.name: each for each in needed if each.marker is None}
    found = [_installed(name, wanted.get(name)) for name in (*wanted, *OPTIONAL)]
    return [each for each in (*found, _newer()) if each is not None] + [_shown(each) for each in known_here()]


def _installed(name: str, wanted: Requirement | None) -> Finding | None:
    version = _version(name)
    if version is None:
        return problem(name, "not installed", f"pip install '{wanted}'") if wanted else None
    if wanted and not wanted.specifier.contains(version, prereleases=True):
        return problem(name, f"{version}; hf_mps needs {wanted.specifier}", f"pip install --upgrade '{wanted}'")
    return _torch(version) if name == "torch" else ok(name, version)


def _torch(version: str) -> Finding:
    """Which release of torch this is among those that were tried."""
    release, tried = Version(version), f"tried are {', '.join(TRIED)}"
    if release.base_version in TRIED:
        return ok("torch", f"{version}, which was tried with hf_mps")
    if release.release[:2] > Version(TRIED[-1]).release[:2]:
        says = f"{version}: hf_mps was not tried with this release; {tried}"
        return note("torch", says, f"python -m pip install torch=={TRIED[-1]}, where something goes wrong")
    return ok("torch", f"{version}; {tried}")


def _newer() -> Finding | None:
    """For owners of the first two generations, why another release is the better cure than a guard."""
    version, chip = _version("torch"), machine.present().chip
    if version is None or not chip.startswith(FIRST_FAMILIES) or Version(version) >= Version(RIGHT_ON_THE_FIRST):
        return None
    says = (
        f"on {chip} torch {RIGHT_ON_THE_FIRST} or later is recommended: its own kernels are right where sums over "
        "more than 32,766 values (pytorch#193487) and, on macOS 26, the bias of one row (#188438) are wrong in this "
        "one, or take longer because a guard cures them"
    )
    return note("newer torch", says, f"pip install --upgrade 'torch>={RIGHT_ON_THE_FIRST}'")


def known_here() -> list[Known]:
    """The known problems of the installed versions on this machine."""
    here = machine.present()
    found = []
    for each in KNOWN:
        version = _version(each.package)
        if version is None or (each.package == "torch" and not here.mac):
            continue
        if each.concerns(version, here.chip if here.mac else "Apple", here.macos):
            found.append(each)
    return found


def _shown(known: Known) -> Finding:
    version = _version(known.package) or ""
    return note("known problem", f"{known.package} {version}: {known.says}{_cured(known, version)}", known.link)


def _cured(known: Known, version: str) -> str:
    """In brackets what cures a problem here, or from which release on something would."""
    from hf_mps.guards import catalogue, registry

    releases = registry.get(known.guard).cures if known.guard in catalogue.NAMES else ""
    if not known.guard or SpecifierSet(releases).contains(version, prereleases=True):
        return f" (cured here by {known.guard})" if known.guard else ""
    return f" ({known.guard} cures it with torch{releases})"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
