"""Fetches a release's Metal kernels: its macOS wheel with the user's pip, the metallib from it into the cache."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import filelock

from hf_mps.core import status
from hf_mps.core.errors import RunError, UserError
from hf_mps.core.files import write_json
from hf_mps.core.text import duration, memory
from hf_mps.metal.kernels import families, pip, store, wheel
from hf_mps.metal.kernels.metallib import BrokenLibrary, Library, libraries

MACOS = 14
Say = Callable[[str], None]


def fetch(release: str, say: Say) -> store.Fetched:
    """Fetch a release from the package index, unless it is here and whole; `say` gets each line of what is done.

    What is checked: the downloaded wheel's sha256 is the one that the index states, and the library inside has the
    hash that the wheel's RECORD lists. The wheel is removed, whatever ends this. Raises UserError and RunError.
    """
    name = store.canonical(release)
    with _alone(name, say) as here:
        if here is not None:
            return here
        with _work(name) as work:
            start = time.monotonic()
            with status.shown(f"torch {name}: asking the package index"):
                offered = pip.offer(name, work)
            say(f"torch {name}: downloading {offered.wheel} with pip")
            with status.shown(f"torch {name}: downloading"):
                file = pip.download(name, work)
            digest = store.sha256(file)
            _compare(file, digest, offered)
            size, seconds = memory(file.stat().st_size), duration(time.monotonic() - start)
            stated = "the index states it" if offered.stated else "compared by pip with the index's, if it states one"
            say(f"torch {name}: {size} in {seconds}, sha256 {digest[:12]}… ({stated})")
            return _keep(file, digest, digest if offered.stated else None, work, say)


def from_wheel(path: Path, say: Say) -> store.Fetched:
    """Take the kernels of a wheel that the user has; the file stays. Raises UserError and RunError in one line."""
    name = store.canonical(wheel.read(path).release)
    with _alone(name, say) as here:
        if here is not None:
            return here
        with _work(name) as work:
            return _keep(path, store.sha256(path), None, work, say)


def _compare(file: Path, digest: str, offered: pip.Offer) -> None:
    if file.name != offered.wheel or offered.sha256 not in ("", digest):
        raise RunError(
            f"pip brought {file.name} with sha256 {digest[:12]}…, and its report has {offered.wheel} with "
            f"{offered.sha256[:12]}…; nothing was kept; next: again"
        )


def _keep(file: Path, digest: str, stated: str | None, work: Path, say: Say) -> store.Fetched:
    """Put the kernels of the wheel `file` into the cache, whole: they are made in `work`, which lies beside."""
    start = time.monotonic()
    contents = wheel.read(file)
    name = store.canonical(contents.release)
    fresh = work / name
    fresh.mkdir(mode=0o700)
    dylib = work / "library"
    wheel.extract_library(file, dylib)
    size = _cut_out(dylib, fresh / store.LIBRARY, name)
    kernels = list(Library.open(fresh / store.LIBRARY))
    known = store.Fetched(
        release=name,
        git_version=contents.git_version,
        wheel=file.name,
        wheel_sha256=digest,
        index_sha256=stated,
        kernels=len(kernels),
        families=len(families.table(kernels)),
        size=size,
        sha256=store.sha256(fresh / store.LIBRARY),
    )
    write_json(fresh / store.FACTS, asdict(known))
    place = store.root() / name
    if place.exists():  # broken, as `_alone` found; its compiled code goes with it
        place.rename(work / "broken")
    fresh.rename(place)
    store.verify(name)
    say(
        f"torch {name}: {known.kernels:,} kernels in {known.families} families, {memory(size)}, "
        f"in {duration(time.monotonic() - start)}; kept in {place}"
    )
    return known


def _cut_out(dylib: Path, target: Path, release: str) -> int:
    """Write the metallib for macOS 14 that lies in `dylib` to `target` and return its bytes.

    A wheel has a metallib for each macOS that it was built for: 14 and 26.
    """
    with dylib.open("rb") as whole, mmap.mmap(whole.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = libraries(content)
        chosen = [each for each in found if Library(each).macos == MACOS]
        try:
            if not chosen:
                others = ", ".join(str(Library(each).macos) for each in found)
                raise UserError(
                    f"torch {release} has no metallib for macOS {MACOS} in its library "
                    f"({f'only for {others}' if others else 'before 2.6 they are source that the Mac compiles'}); "
                    "next: a newer release"
                )
            with target.open("wb") as file:
                file.write(chosen[0])
                file.flush()
                os.fsync(file.fileno())  # its identity is recorded as verified: a crash must not leave other content
            return len(chosen[0])
        finally:
            for view in (*chosen, *found):
                view.release()


@contextlib.contextmanager
def _alone(release: str, say: Say) -> Iterator[store.Fetched | None]:
    """Keep other processes from fetching the same release meanwhile; yields what is here already and whole, or None."""
    here = _whole(release, say)
    if here is not None:  # needs no lock, and so no cache that can be written
        yield here
        return
    lock = filelock.FileLock(str(store.made() / f".{release}.lock"))
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        say(f"torch {release}: another process fetches it; waiting …")
        lock.acquire()
        here = _whole(release, say)
    try:
        yield here
    finally:
        lock.release()


def _whole(release: str, say: Say) -> store.Fetched | None:
    if not (store.root() / release).exists():
        return None
    try:
        store.verify(release)
        known = store.facts(release)
    except UserError as error:
        say(f"{str(error).rpartition('; next')[0] or error}: fetched again")
        return None
    say(f"torch {release}: here already, {known.kernels:,} kernels in {store.folder(release)}")
    return known


@contextlib.contextmanager
def _work(release: str) -> Iterator[Path]:
    """A folder beside the releases for a download and what is made of it; it goes, whatever ends the work."""
    # We hold the lock: a working folder that is here already belongs to a process that was killed.
    for left in store.root().glob(f".work-{release}-*"):
        shutil.rmtree(left, ignore_errors=True)
    work = store.made(f".work-{release}-{secrets.token_hex(4)}")
    try:
        yield work
    except OSError as error:
        problem = "no space is left" if error.errno == errno.ENOSPC else f"{error.strerror or error}"
        raise RunError(f"{store.root()}: {problem}; next: room there, or XDG_CACHE_HOME=FOLDER elsewhere") from error
    except BrokenLibrary as error:
        problem = f"the metallib of torch {release} cannot be read ({error})"
        raise UserError(f"{problem}; next: another wheel of it") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
