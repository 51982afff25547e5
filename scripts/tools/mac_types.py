"""Type-check hf_mps as on a Mac: with the installed torch's stubs, and with those of the newest torch that a Mac gets.

    python scripts/tools/mac_types.py

The newest release is the one that constraints-darwin.txt pins. Its macOS wheel is downloaded once, by this Python's pip
(139 MB); its Python files are kept below build/stubs, which git ignores and `make clean` removes. The files of the
installed torch are those of its macOS wheel but for version.py. Exit code 1 where mypy finds something or the wheel
cannot be had.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from hf_mps.core.errors import RunError, UserError
from hf_mps.metal.kernels import fetch

CHECKOUT = Path(__file__).resolve().parents[2]
CONSTRAINTS = CHECKOUT / "constraints-darwin.txt"
STUBS = CHECKOUT / "build" / "stubs"


def newest() -> str:
    """The newest release of torch that constraints-darwin.txt pins."""
    lines = (line.partition("#")[0].strip() for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines())
    pins = [requirement for requirement in map(Requirement, filter(None, lines)) if requirement.name == "torch"]
    return max((next(iter(pin.specifier)).version for pin in pins), key=Version)


def stubs(release: str) -> Path:
    """The folder of the Python files of a release's macOS wheel, fetched if need be. Raises as `fetch.download`."""
    folder = STUBS / f"torch-{release}"
    if folder.is_dir():
        return folder
    STUBS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=STUBS) as work:
        with zipfile.ZipFile(fetch.download(release, Path(work))) as wheel:
            kept = (".py", ".pyi", "/py.typed")
            members = [name for name in wheel.namelist() if name.startswith("torch/") and name.endswith(kept)]
            wheel.extractall(Path(work) / "files", members)
        (Path(work) / "files").replace(folder)
    return folder


def check(release: str, before: Path | None = None) -> int:
    """Run mypy for Darwin, with the folder `before` ahead of the installed packages, and return its exit code."""
    print(f"mypy for macOS with the stubs of torch {release}:", flush=True)
    environment = {**os.environ, "MYPYPATH": str(before)} if before else dict(os.environ)
    cache = f".mypy_cache/darwin-{release}"  # one for both would be written anew by each
    command = [sys.executable, "-m", "mypy", "--platform", "darwin", "--cache-dir", cache, "hf_mps"]
    return subprocess.run(command, cwd=CHECKOUT, env=environment, check=False).returncode


def main() -> int:
    """Check with both releases' stubs and return the exit code."""
    from importlib import metadata

    installed, release = metadata.version("torch"), newest()
    codes = [check(installed)]
    if Version(installed).base_version != release:
        try:
            codes.append(check(release, stubs(release)))
        except (RunError, UserError) as error:
            why = str(error).partition("; next:")[0]
            print(f"{why}; for the installed stubs alone: .venv/bin/mypy --platform darwin", file=sys.stderr)
            return 1
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
