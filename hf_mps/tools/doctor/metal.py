"""Metal: what PyTorch was built with, what it finds, and whether real work on the device comes out right."""

from __future__ import annotations

import contextlib
from typing import Any

from hf_mps.core import settings
from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line
from hf_mps.core.text import memory as words
from hf_mps.metal import kernels
from hf_mps.metal.device import choice, machine, precision, probe
from hf_mps.tools.doctor.findings import Finding, note, ok, problem

APPLE = "https://developer.apple.com/metal/pytorch/"
FLOAT64 = "https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/mps/EmptyTensor.cpp"
UPGRADE = "pip install --upgrade torch"


def examine() -> list[Finding]:
    """Return the build, PyTorch's own answer, Apple's verification, the probe, the dtypes, and the device of a run."""
    readings = probe.read(machine.present(), owned=True)
    if readings.built:
        built = ok("built", f"PyTorch {readings.torch} is built with Metal{readings.machine.label}")
        findings = [built, _found(readings)]
    else:
        findings = [problem("built", *_apart(probe.verdict(readings).reason))]
    passed = probe.metal(owned=True)
    if readings.built and readings.found:
        findings.append(_apple())
    if passed.value:
        findings.append(ok("probe", passed.reason))
        for name, usable in precision.dtypes("mps").items():
            lacks = note(name, usable.reason, FLOAT64 if name == "float64" else UPGRADE)
            findings.append(ok(name, usable.reason) if usable.value else lacks)
    else:
        findings.append(problem("probe", *_apart(passed.reason)))
    findings += _kernels()
    findings.append(_chosen())
    return findings


def _found(readings: probe.Readings) -> Finding:
    if readings.found:
        return ok("found", f"PyTorch finds a Metal device{readings.machine.label}")
    says = "PyTorch finds no Metal device"
    if readings.machine.macos_at_least(*probe.oldest_macos(readings.torch)):
        says += "; its error blames the macOS version also where a sandbox or a session without the GPU is the reason"
    return problem("found", says, "https://github.com/pytorch/pytorch/issues/167679")


def _apple() -> Finding:
    """Return what Apple's page asks to be run: a tensor of ones on the device."""
    import torch

    try:
        ones = torch.ones(1, device="mps")
        shown = str(ones)
        value = ones.item()
    except Exception as error:
        return problem("Apple's verification", f'torch.ones(1, device="mps") fails: {first_line(error)}', APPLE)
    if value != 1.0:
        return problem("Apple's verification", f'torch.ones(1, device="mps") holds {value}', APPLE)
    return ok("Apple's verification", f'torch.ones(1, device="mps") prints {shown}')


def _kernels() -> list[Finding]:
    """Return what HF_MPS_KERNELS does, where it is set."""
    name = "Metal kernels"
    if (dispatch := kernels.running()) is not None:
        release, objects = dispatch.release, dispatch.release.objects
        count, size = objects.kept()
        compute = f"torch {release.version}'s own compute{', each access bounded' if release.checked else ''}"
        return [ok(name, f"{compute}; {count:,} compiled for this CPU are kept, {words(size)}, in {objects.folder}")]
    with contextlib.suppress(UserError):
        if settings.kernels() is not None and settings.simulate() is None:
            says = f"{kernels.VARIABLE} does nothing without a simulated device"
            mac = machine.present().mac
            return [note(name, says, f"unset {kernels.VARIABLE}" if mac else "HF_MPS_SIMULATE=1 hf-mps doctor")]
    return []


def training_kernels() -> list[Finding]:
    """Return which of hf_mps' own kernels are used here, and why; one that nobody needed yet was not tried."""
    from hf_mps.metal.training_kernels import trial

    found = []
    for name in trial.FAMILIES if probe.metal(owned=True).value else ():
        try:
            asked = trial.asked_for(name)
        except UserError:  # the environment's section reports it
            return []
        kept = trial.kept_outcome(name)
        if asked is not None:
            says = f"{'used' if asked.value else 'not used'}: {asked.reason}"
            found.append(note(name, says, f"unset {trial.VARIABLE}"))
        elif kept is None:
            says = "not tried yet, which the first training does that needs it"
            found.append(note(name, says, "hf-mps doctor --trials"))
        else:
            rows = [f"{row.label}: {1e3 * row.seconds:.2f} ms for {1e3 * row.stock_seconds:.2f}" for row in kept.rows]
            times = f" ({'; '.join(rows)})" if rows else ""
            found.append(ok(name, f"{'used' if kept.on else 'not used'}: {kept.reason}{times}"))
    return found


def try_kernels() -> dict[str, Any]:
    """Make the trial of each of hf_mps' own kernels anew, where nobody overrules it; none where there is no Metal."""
    from hf_mps.metal.training_kernels import trial

    names = [name for name in trial.FAMILIES if trial.asked_for(name) is None] if probe.metal(owned=True).value else []
    return {name: trial.outcome(name, anew=True) for name in names}


def _chosen() -> Finding:
    try:
        chosen = kernels.told(choice.choose())
    except UserError as error:
        return problem("device of a run", str(error), "unset HF_MPS_DEVICE")
    if chosen.value == "mps":
        return ok("device of a run", str(chosen))
    return note("device of a run", str(chosen), "hf-mps doctor, after the repairs above")


def _apart(reason: str) -> tuple[str, str]:
    """Return a probe's sentence as what it says and, behind its last semicolon, what to do."""
    says, _, advice = reason.rpartition("; ")
    return (says, advice) if says else (reason, APPLE)
