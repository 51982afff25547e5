"""The user's own pip, asked for PyTorch's macOS wheel: with their index, mirror, proxy, certificates and credentials.

Two calls. `pip install --dry-run --report` says which file the index has and its sha256 (`archive_info` in
https://pip.pypa.io/en/stable/reference/installation-report/); `pip download`, which has no report, fetches it, and
compares it with the index's `#sha256=` itself where there is one. The report's hash is the index's word, except where
pip downloaded the wheel to write it (before pip 23.3, and from an index that sends no metadata of its own, PEP 658) and
the index stated none: it is computed then. The links that pip prints tell, but not those of an index that speaks JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement

from hf_mps.core.errors import RunError, UserError, brief

# The first is what PyTorch builds for at present; pip takes wheels of every older macOS for it (macosx_11_0_arm64 up to
# 2.11), and those of a newer one where there are no others. The wheel need not fit the Python that runs: it is opened
# and not installed.
PLATFORMS = ("macosx_14_0_arm64", "macosx_26_0_arm64")
PYTHON = "312"

# A page that is not there (404) is an answer.
_UNREACHABLE = re.compile(r"^Could not fetch URL \S+: (?!404)(.*) - skipping$", re.MULTILINE)
_ERRNO = re.compile(r"\[Errno -?\d+\] ([^'\")]+)")

# What pip says of a wheel that it takes whole, and not for a file beside it, as torch-….whl.metadata.
_BROUGHT = re.compile(r"^\s*(Downloading|Using cached|Processing) \S+\.whl(\s|$)", re.MULTILINE)


class Offer(NamedTuple):
    """What the index has: the wheel's file name, its sha256 by pip's report, and whether the index stated that."""

    wheel: str
    sha256: str
    stated: bool


def offer(release: str, work: Path) -> Offer:
    """Ask the index for the macOS wheel of a release; `work` is an empty folder to work in.

    Raises UserError for a release that it does not have and without pip, RunError where it cannot be reached.
    """
    report = work / "report.json"
    target = work / "target"  # which --platform asks for; nothing is installed
    flags = ("-vv", "--dry-run", "--ignore-installed")
    said = _pip("install", release, work, *flags, "--target", target, "--report", report)
    try:
        download = json.loads(report.read_text(encoding="utf-8"))["install"][0]["download_info"]
        name = unquote(urlsplit(download["url"]).path).rpartition("/")[2]
        digest = download["archive_info"].get("hashes", {}).get("sha256", "")
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise RunError(f"pip's report on torch {release} cannot be read ({type(error).__name__}: {error})") from error
    stated = bool(digest) and (f"{name}#sha256={digest}" in said or not _BROUGHT.search(said))
    return Offer(name, digest, stated)


def download(release: str, work: Path) -> Path:
    """Download the macOS wheel of a release into `work` and return its path. Raises as `offer`."""
    _pip("download", release, work, "--dest", work)
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise RunError(f"pip downloaded {len(wheels)} wheels for torch {release}, not one")
    return wheels[0]


def _pip(verb: str, release: str, work: Path, *more: str | Path) -> str:
    """Call pip and return its words; see `offer` for what is raised."""
    if find_spec("pip") is None:
        raise UserError(
            f"{sys.executable} has no pip (environments of uv have none); next: uv pip install pip, or "
            "hf-mps kernels fetch --wheel PATH"
        )
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", verb, *more, *platforms, "--python-version", PYTHON]
    command += ["--only-binary=:all:", "--no-deps", "--no-input", "--no-color", "--disable-pip-version-check"]
    # A cache of its own, which goes with `work`: no second copy of the wheel stays, and an index that sends no metadata
    # (PEP 658), for which the first call downloads the wheel, is not asked for it again by the second.
    command += ["--cache-dir", work / "cache", f"torch=={release}"]
    # What pip unpacks goes with `work` too, though it be killed. A pip.conf with user = true would contradict --target.
    environment = {**os.environ, "PIP_USER": "0", "LC_ALL": "C.UTF-8", "TMPDIR": str(work)}
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    if ended.returncode:
        raise _refusal(release, ended.stdout + ended.stderr)
    return ended.stdout


def _refusal(release: str, said: str) -> UserError | RunError:
    """What pip's output says is wrong, in one line with the next command."""
    errors = [line.removeprefix("ERROR:").strip() for line in said.splitlines() if line.startswith("ERROR:")]
    if "no such option" in said:
        return UserError("this pip is older than 22.2 and knows no --report; next: python -m pip install --upgrade pip")
    differs = re.search(r"Expected sha256 (\w+)\s+Got\s+(\w+)", said)
    if differs:
        return RunError(
            f"the wheel of torch {release} has sha256 {differs[2][:12]}…, and the index states {differs[1][:12]}…; "
            "nothing was kept; next: again"
        )
    unreachable = _UNREACHABLE.search(said)
    if unreachable:
        number = _ERRNO.search(unreachable[1])
        reason = number[1] if number else brief(unreachable[1])
        return RunError(
            f"pip does not reach the package index for torch {release} ({reason}); "
            "next: again, or hf-mps kernels fetch --wheel PATH"
        )
    capped = re.search(r"The user requested \(constraint\) (torch\S+)", said)
    if capped and not Requirement(capped[1]).specifier.contains(release, prereleases=True):
        return UserError(f"pip's constraint {capped[1]} excludes torch {release}; next: pip config list")
    known = re.search(r"\(from versions: ([^)]*)\)", said)
    if capped or known or any("No matching distribution" in line for line in errors):
        listed = f"; the newest that it has: {known[1].split(', ')[-1]}" if known and known[1] != "none" else ""
        return UserError(
            f"the package index has no macOS wheel of torch {release}{listed}; next: pip index versions torch"
        )
    return RunError(f"pip: {errors[0] if errors else (said.strip().splitlines() or ['it failed'])[-1]}")
