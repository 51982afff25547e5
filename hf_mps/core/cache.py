"""The user's folder for what is made or fetched once: the compiled device, the parsed operator table, Metal kernels."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def home(room: str = "simulator") -> Path | None:
    """Return the user's cache folder for a room of hf_mps (it need not exist), or None where there is no home at all.

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

    Anybody may write to the temporary folder, so the folder must be private to the user.
    """
    folder = Path(tempfile.gettempdir()) / f"hf_mps-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder / "simulator" if not folder.is_symlink() and open_to_others(folder) is None else None


def open_to_others(place: Path) -> Path | None:
    """The first of `place` and the folders around it, up to the cache's own, that another user could change, or None.

    Compiled code is loaded from the cache and run with the user's rights. So each must belong to the user or to root,
    and nobody else may write to it: a group may where the user is alone in it, as Debian and Fedora set up accounts.
    In a sticky folder, as the temporary one is, others cannot replace what is the user's. Raises OSError for a place
    that is not there.
    """
    for each in (place, *place.parents):
        facts = each.stat()
        group_writes = facts.st_mode & stat.S_IWGRP and not _alone_in(facts.st_gid)
        sticky = each != place and facts.st_mode & stat.S_ISVTX
        writable = (facts.st_mode & stat.S_IWOTH or group_writes) and not sticky
        if facts.st_uid not in (os.getuid(), 0) or writable:
            return each
        if each.name == "hf_mps" or each.name.startswith("hf_mps-"):
            return None
    return None


@contextlib.contextmanager
def alone(lock: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Keep other processes out meanwhile, by a lock on a file; yields whether one had to be waited for.

    `waiting` is called before the wait begins.
    """
    import filelock

    held, waited = filelock.FileLock(str(lock)), False
    try:
        keeping = held.acquire(blocking=False)
    except filelock.Timeout:
        waiting()
        keeping, waited = held.acquire(), True
    with keeping:
        yield waited


@contextlib.contextmanager
def working(folder: Path, name: str = "") -> Iterator[Path]:
    """Give a folder inside `folder` for what is being made; it goes, whatever ends the work. The caller holds a lock:
    one that is there already belongs to a process that was killed.
    """
    for left in folder.glob(f".work-{name}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".work-{name}", ignore_cleanup_errors=True) as work:
        yield Path(work)


def _alone_in(group: int) -> bool:
    """Return whether the group has the user's name and no other member."""
    import grp
    import pwd

    try:
        facts, user = grp.getgrgid(group), pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return user.pw_gid == group and facts.gr_name == user.pw_name and not set(facts.gr_mem) - {user.pw_name}


def find(name: str) -> Path | None:
    """Return the file or folder `name` (a relative path) in the cache, or None where it was not made yet.

    What another user could have put there counts as not made.
    """
    for place in (home, spare):
        root = place()
        with contextlib.suppress(OSError):  # of a file that is not there
            if root is not None and open_to_others(root / name) is None:
                return root / name
    return None


def writable(name: str) -> tuple[Path, str]:
    """Make the folder `name` in the first place that can be written; return it and why it is not the usual place.

    The reason is empty for the usual place. Raises OSError where not even a temporary folder can be made.
    """
    usual, problem = home(), "there is no home folder"
    if usual is not None:
        try:
            return _made(usual / name), ""
        except OSError as error:
            problem = f"{usual} cannot be written ({error.strerror})"
    with contextlib.suppress(OSError):
        if (other := spare()) is not None:
            return _made(other / name), problem
    return _made(Path(tempfile.mkdtemp(prefix="hf_mps-")) / name), problem


def _made(folder: Path) -> Path:
    """Make `folder` and prove that a file can be created in it.

    What belongs to the user is closed to others. Raises OSError for a folder that others can change all the same, as
    its owner can.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while (loose := open_to_others(folder)) is not None:
        if loose.stat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, f"{loose} belongs to another user", str(loose))
        loose.chmod(0o700)  # an older hf_mps under a loose umask left it open
    # Permission bits say nothing to root or to NFS.
    handle, probe = tempfile.mkstemp(dir=folder, prefix=".probe-")
    os.close(handle)
    Path(probe).unlink()
    return folder
