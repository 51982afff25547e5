"""Environment variables and files that steer training: set, unread, contradictory; Accelerate's configuration."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from hf_mps.core import settings
from hf_mps.core.errors import UserError, nearest
from hf_mps.core.extras import INSTALL_SOURCES
from hf_mps.metal.device import machine
from hf_mps.tools.doctor.findings import Finding, note, ok, problem

# What PyTorch's Metal backend reads: https://docs.pytorch.org/docs/stable/mps_environment_variables.html
METAL_VARIABLES = (
    *("PYTORCH_DEBUG_MPS_ALLOCATOR", "PYTORCH_MPS_LOG_PROFILE_INFO", "PYTORCH_MPS_TRACE_SIGNPOSTS"),
    *("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO", "PYTORCH_MPS_FAST_MATH"),
    *("PYTORCH_MPS_PREFER_METAL", "PYTORCH_ENABLE_MPS_FALLBACK"),
)
# PyTorch's own low watermark where the memory is unified, used where only the high one is set.
LOW_WATERMARK = 1.4
# LLVM's and Intel's OpenMP, where wheels and conda put it.
OPENMP = tuple(f"{place}/{name}.dylib" for place in ("*/lib", "*/.dylibs", "lib") for name in ("libomp", "libiomp5"))


def examine() -> list[Finding]:
    """Return the variables that are set or contradict each other."""
    known = sorted(os.environ.keys() & settings.KNOWN)
    first = [ok(name, f"{os.environ[name]} ({settings.KNOWN[name]})") for name in known]
    return [*first, *_metal_names(), *_fallback(), *_watermarks(), *_accelerate(), *_openmp(), *_others(), _config()]


def _metal_names() -> Iterator[Finding]:
    """Yield variables that look like PyTorch's and that nothing reads."""
    for name in sorted(os.environ):
        if name.startswith("PYTORCH_") and "MPS" in name and name not in METAL_VARIABLES:
            near = nearest(name, METAL_VARIABLES)
            yield problem(name, f"PyTorch reads no variable of this name{near}", f"unset {name}")


def _fallback() -> Iterator[Finding]:
    name = "PYTORCH_ENABLE_MPS_FALLBACK"
    if name not in os.environ:
        return
    try:
        chosen = settings.fallback()
    except UserError as error:
        yield problem(name, str(error), f"unset {name}")
        return
    says = f"an operator without a Metal kernel is an error: {chosen.reason}"
    if os.environ[name] == "1":
        says = "PyTorch reads it once, when it is loaded; hf_mps falls back without it, and names every operator"
    yield note(name, says, f"unset {name}")


def _watermarks() -> Iterator[Finding]:
    high_name, low_name = "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO"
    ratios: dict[str, float] = {}
    for name in (high_name, low_name):
        if name in os.environ:
            try:
                ratios[name] = float(os.environ[name])
            except ValueError:
                yield problem(name, f"{os.environ[name]} is not a number", f"unset {name}")
    high, low = ratios.get(high_name), ratios.get(low_name, LOW_WATERMARK)
    if high is None:
        return
    if high == 0:
        says = "0 lifts the limit: macOS swaps, and may kill programs, before PyTorch refuses"
        yield problem(high_name, says, f"unset {high_name}")
    elif low > high:
        says = f"{high:g} is below the low watermark, {low:g}, and PyTorch refuses to start"
        yield problem(high_name, says, f"{low_name}={high:g}")
    elif high > 1.7:
        says = f"{high:g} times the recommended maximum is allowed: far into swap (the default is 1.7)"
        yield problem(high_name, says, f"unset {high_name}")
    else:
        yield ok(high_name, f"{high:g} times the recommended maximum")


def _accelerate() -> Iterator[Finding]:
    """Accelerate's own switches against HF_MPS_DEVICE."""
    ours, theirs = os.environ.get("HF_MPS_DEVICE", ""), os.environ.get("ACCELERATE_TORCH_DEVICE", "")
    kind = theirs.partition(":")[0]
    if theirs and ours and kind != ours:
        says = f"{theirs} contradicts HF_MPS_DEVICE={ours}, which wins"
        yield problem("ACCELERATE_TORCH_DEVICE", says, "unset ACCELERATE_TORCH_DEVICE")
    elif theirs and kind != "mps":
        says = f"{theirs} sends Accelerate there; hf_mps lets TrainingArguments and Lightning follow"
        yield note("ACCELERATE_TORCH_DEVICE", says, f"HF_MPS_DEVICE={kind} sends all three there")
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "on", "t"):
        says = "sends Accelerate to the CPU while TrainingArguments stays on mps"
        yield problem("ACCELERATE_USE_CPU", says, "unset ACCELERATE_USE_CPU (HF_MPS_DEVICE=cpu moves all three)")


def _openmp() -> Iterator[Finding]:
    """Yield a problem where several copies of OpenMP may run in one process, which pytorch#193520 reports to hang."""
    name = "KMP_DUPLICATE_LIB_OK"
    if os.environ.get(name, "").lower() not in ("1", "true", "yes") or not machine.present().mac:
        return
    roots = {Path(sysconfig.get_path(key)) for key in ("platlib", "purelib", "data")}
    files = ((file, root) for root in roots for place in OPENMP for file in root.glob(place))
    # One file under two names, as conda links them, is one copy.
    copies = sorted({file.resolve(): str(file.relative_to(root)) for file, root in files}.values())
    if len(copies) > 1:
        says = f"allows several copies of OpenMP in one process, where training may hang: {', '.join(copies)}"
        yield problem(name, f"{says}; install these packages all from pip or all from conda", f"unset {name}")


def _others() -> Iterator[Finding]:
    """Variables of others, and whether `import torch` switches the layer on in this environment."""
    if "CUDA_VISIBLE_DEVICES" in os.environ and machine.present().mac:
        yield note("CUDA_VISIBLE_DEVICES", "nothing reads it on a Mac", "unset CUDA_VISIBLE_DEVICES")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        says = "PyTorch loads no extension at import, so hf_mps is not on in plain scripts"
        yield problem("TORCH_DEVICE_BACKEND_AUTOLOAD", says, "hf-mps run script.py")
    if any(point.name == "hf_mps" for point in metadata.entry_points(group="torch.backends")):
        yield ok("autoload", "every script of this environment is served: `import torch` switches hf_mps on")
    else:
        says = "hf_mps is imported but not installed, so plain scripts run without it"
        yield problem("autoload", says, INSTALL_SOURCES)


def _config() -> Finding:
    """Accelerate's configuration in its default place: CPU-only, retired, or well."""
    from hf_mps.tools.doctor import accelerate_config  # accelerate takes a while

    name, path = "accelerate config", accelerate_config.default_place()
    try:
        existing = accelerate_config.read(path)
    except UserError as error:
        says, _, advice = str(error).rpartition("; next: ")
        return note(name, says, advice)
    if existing is None:
        return ok(name, accelerate_config.NO_FILE)
    if found := accelerate_config.find(existing):
        return problem(name, f"{path}: {accelerate_config.reasons(found)}", "hf-mps config")
    return ok(name, f"{path}: nothing to repair")
