"""The user's folder for what is made or fetched once: the compiled device, the parsed operator table, Metal kernels."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def home(room: str = "simulator") -> Path | None:
    """The user's cache folder for a room of hf_mps (it need not exist), or None where there is no home at all.

    Source: the XDG base directory specification, which says that a relative XDG_CACHE_HOME is to be ignored.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "hf_mps" / room


def spare() -> Path | None:
    """The folder below the system's temporary one that stands in for `home`, or None where it is not safe to use.

    Compiled code is loaded from here, and anybody may write to the temporary folder: so the folder must be the
    user's own and closed to everybody else.
    """
    if not hasattr(os, "getuid"):
        return None
    folder = Path(tempfile.gettempdir()) / f"hf_mps-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    except OSError:
        return None
    safe = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022
    return folder / "simulator" if safe else None


def find(name: str) -> Path | None:
    """The file or folder `name` (a relative path) in the cache, or None where it was not made yet."""
    for place in (home, spare):
        root = place()
        if root is not None and (root / name).exists():
            return root / name
    return None


def writable(name: str) -> tuple[Path, str]:
    """Make the folder `name` in the first place that can be written; return it and why it is not the usual place.

    The reason is empty for the usual place. Raises OSError where not even a temporary folder can be made.
    """
    usual = home()
    problem = "there is no home folder"
    if usual is not None:
        try:
            return _made(usual / name), ""
        except OSError as error:
            problem = f"{usual} cannot be written ({error.strerror})"
    other = spare()
    if other is not None:
        try:
            return _made(other / name), problem
        except OSError:
            pass
    return _made(Path(tempfile.mkdtemp(prefix="hf_mps-")) / name), problem


def _made(folder: Path) -> Path:
    """Make `folder` and prove that a file can be created in it: permission bits say nothing to root or to NFS."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, probe = tempfile.mkstemp(dir=folder, prefix=".probe-")
    os.close(handle)
    Path(probe).unlink()
    return folder
