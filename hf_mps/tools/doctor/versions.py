"""The stack's versions, what they need of each other, and the problems known for exactly these versions.

And what another release of PyTorch would change here: faults that go or come, operators that move to Metal kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hf_mps.core.errors import UserError
from hf_mps.core.extras import INSTALL_SOURCES, SOURCES
from hf_mps.metal.device import faults, machine
from hf_mps.metal.device.faults import FAULTS, FIRST_FAMILIES
from hf_mps.metal.device.probe import oldest_macos
from hf_mps.metal.kernels import store
from hf_mps.metal.operators.launch_class import LaunchTable, of_release
from hf_mps.tools.doctor.findings import CURED, KNOWN, Finding, note, ok, problem

OPTIONAL = ("lightning", "peft", "trl", "sentence-transformers", "safetensors", "tokenizers", "huggingface-hub")
TRIED = ("2.13.0", "2.14.1", "2.15.0")
"""Releases of torch that this project's tests ran with, on the simulated device; the last is the newest.

Those of 2.14.1 (of the layer, Metal and the tools) and of 2.15.0 (all but the slow ones) ran on 2026-11-29, on the CPU
half of PyPI's builds for Linux.
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


READ_UP_TO = "2.15"
"""The newest release that the lists of faults were read for."""
NAMED = 14
"""Operators that a line names."""

Move = Literal["kernel", "left graph", "to graph", "lost", "absent", "new"]
MOVES: dict[Move, str] = {
    "kernel": "run on the CPU now and get a kernel",
    "left graph": "leave MPSGraph, and are no longer compiled for each shape",
    "to graph": "become MPSGraphs, which are compiled for each shape",
    "lost": "lose their kernel and run on the CPU",
    "absent": "are gone",
    "new": "come",
}
# Operators that are not called on Metal.
ELSEWHERE = re.compile(r"sparse|mkldnn|cudnn|miopen|fbgemm|nested|quantize|_test_")


@dataclass(frozen=True)
class Upgrade:
    """Two releases, the faults of either ({"now": bool, "then": bool}), and the operators that move."""

    now: str
    then: str
    faults: tuple[dict[str, Any], ...]
    operators: dict[Move, tuple[str, ...]]
    unknown: str = ""
    """Why the operators are not known."""


def compared(release: str) -> Upgrade:
    """Return the installed torch compared with `release` on this chip and macOS. Raises UserError for no release."""
    from importlib import metadata

    now, then = (store.canonical(each) for each in (metadata.version("torch"), release))
    try:
        moved, unknown = moves(of_release(now), of_release(then)), ""
    except UserError as error:
        moved, unknown = dict.fromkeys(MOVES, ()), str(error)
    return Upgrade(now, then, tuple(_faults(now, then)), moved, unknown)


def _faults(now: str, then: str) -> Iterator[dict[str, Any]]:
    """Yield the faults that either release has on this Mac, or elsewhere on any Mac, with the Macs that have them."""
    here = machine.present()
    for fault in FAULTS.values():
        if fault.package != "torch" or not fault.listed:
            continue
        if here.mac:
            there, macs = [fault.concerns(here.chip, here.macos, each) for each in (now, then)], ""
        else:
            chip = next(iter(fault.chips), "")
            there = [replace(fault, macos="").concerns(chip, None, each) for each in (now, then)]
            macs = " and ".join(filter(None, (", ".join(fault.chips), fault.macos and f"macOS {fault.macos}")))
        if any(there):
            says = fault.what + (f" (on {macs})" if macs else "")
            yield {"says": says, "link": fault.issue, "guard": fault.guard, "now": there[0], "then": there[1]}


def moves(now: LaunchTable, then: LaunchTable) -> dict[Move, tuple[str, ...]]:
    """Return the operators, by their names without overloads, whose launch class another release changes."""
    names = {name for name in now.names() | then.names() if not ELSEWHERE.search(name)}
    bases = [{_base(name) for name in names if table.ways(name)} for table in (now, then)]
    found: dict[Move, set[str]] = {move: set() for move in MOVES}
    for name in names:
        move, base = _move(now.ways(name), then.ways(name)), _base(name)
        # An overload that comes or goes is none: its operator is there.
        if move is not None and not (move in ("absent", "new") and all(base in each for each in bases)):
            found[move].add(base)
    return {move: tuple(sorted(some, key=lambda name: (name.startswith("_"), name))) for move, some in found.items()}


def _base(name: str) -> str:
    short = name.removeprefix("aten::").partition(".")[0]
    return short.rstrip("_") or short


def _move(now: tuple[str, ...], then: tuple[str, ...]) -> Move | None:
    if not now or not then:
        return "new" if then and then != ("cpu",) else "absent" if now else None
    if now == ("cpu",) or then == ("cpu",):
        return None if now == then else "kernel" if now == ("cpu",) else "lost"
    if ("graph" in now) == ("graph" in then):
        return None
    # What is made of copies is a graph only where one of them changes the dtype.
    with_graph = now if "graph" in now else then
    return None if "blit" in with_graph else "left graph" if with_graph is now else "to graph"


def sections(upgrade: Upgrade) -> dict[str, list[Finding]]:
    """Return the report's sections: the release itself, faults that go, that come and that stay, and operators."""
    gone = [fault for fault in upgrade.faults if not fault["then"]]
    come = [fault for fault in upgrade.faults if not fault["now"]]
    stay = [_name(fault) for fault in upgrade.faults if fault["now"] and fault["then"]]
    found = {"release": [_release(upgrade)]}
    found[f"gone with {upgrade.then}"] = [ok(_name(fault), f"{fault['says']} ({_number(fault)})") for fault in gone]
    new = found[f"new with {upgrade.then}"] = []
    for fault in come:
        cured = f" (cured here by {fault['guard']})" if fault["guard"] else ""
        new.append(note(_name(fault), f"{fault['says']}{cured}", fault["link"]))
    if stay:
        found["on both"] = [ok("known faults", f"{len(stay)} stay: {', '.join(dict.fromkeys(stay))}")]
    found["operators"] = list(_operators(upgrade))
    return {name: lines for name, lines in found.items() if lines}


def _release(upgrade: Upgrade) -> Finding:
    version, here, oldest = Version(upgrade.then), machine.present(), oldest_macos(upgrade.then)
    says = f"{upgrade.then} in place of {upgrade.now}"
    if too_old := faults.too_old(upgrade.then):
        return problem("torch", f"{says}; {too_old}", "pip install -U torch")
    if here.mac and not here.macos_at_least(*oldest):
        needs = ".".join(map(str, oldest))
        says += f"; it needs macOS {needs} or newer, this is {here.macos}"
        return problem("torch", says, "softwareupdate --list")
    if version.release[:2] > Version(READ_UP_TO).release:
        says += f"; hf_mps knows the faults of releases up to {READ_UP_TO}"
        return note("torch", says, "hf-mps doctor --trials")
    tried = "which was tried with hf_mps" if upgrade.then in TRIED else f"tried are {', '.join(TRIED)}"
    return ok("torch", f"{says}; {tried}")


def _operators(upgrade: Upgrade) -> Iterator[Finding]:
    if upgrade.unknown:
        says, _, advice = upgrade.unknown.rpartition("; next: ")
        yield note("operators", f"their launches are not known: {says}", advice)
    for move, what in MOVES.items():
        if names := upgrade.operators[move]:
            more = f", and {len(names) - NAMED} more (--json)" if len(names) > NAMED else ""
            yield ok(move, f"{what}: {', '.join(names[:NAMED])}{more}")


def _name(fault: dict[str, Any]) -> str:
    return fault["guard"] or _number(fault)


def _number(fault: dict[str, Any]) -> str:
    *_, repository, _, last = str(fault["link"]).split("/")
    return f"{repository}#{last}" if last.isdigit() else f"PyTorch's {last}"
