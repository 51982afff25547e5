"""Fetches the Metal kernels of PyTorch or MLX: a macOS wheel with the user's pip, its metallib into the cache."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from hf_mps.core import cache, status
from hf_mps.core.errors import RunError, UserError, brief, user_path
from hf_mps.core.files import write_json
from hf_mps.core.text import duration, memory
from hf_mps.metal.kernels import describe, store
from hf_mps.metal.kernels.metallib import BrokenLibrary, Library, libraries

FILES = {"torch": "torch/lib/libtorch_cpu.dylib", "mlx-metal": "mlx/lib/mlx.metallib"}
"""The projects whose wheels have Metal kernels, and the file of each that holds them."""
NEXT = "next: hf-mps kernels fetch RELEASE, or --wheel with a file torch-RELEASE-…-macosx_…_arm64.whl"
BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, KeyError, UnicodeDecodeError)


class Contents(NamedTuple):
    """What a wheel says of itself."""

    release: str
    git_version: str
    """Empty for MLX, whose wheel does not say."""
    file: str
    """The file in it that holds the kernels."""


def read_wheel(path: Path) -> Contents:
    """Return what a macOS wheel of PyTorch or MLX says of itself.

    Raises UserError for a file that is absent, is no whole wheel, or is another project's or another platform's.
    """
    with _opened(path) as archive:
        names = archive.namelist()
        metadata = next((name for name in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)), None)
        if metadata is None:
            raise UserError(f"{path} is no wheel: it has no metadata; {NEXT}")
        about, files = (
            Parser().parsestr(archive.read(name).decode()) for name in (metadata, metadata.replace("METADATA", "WHEEL"))
        )
        project, release = about.get("Name", "").lower(), about.get("Version", "")
        if project not in FILES:
            raise UserError(f"{path} is a wheel of {brief(project)}, not of torch or mlx-metal; {NEXT}")
        platform = files.get("Tag", "").rpartition("-")[2]
        if not re.fullmatch(r"macosx_\d+_\d+_arm64", platform):
            raise UserError(
                f"{path} is {project} {brief(release)} for {brief(platform)}, not for macOS on arm64; {NEXT}"
            )
        if FILES[project] not in names:
            raise UserError(f"{path} has no {FILES[project]}; {NEXT}")
        if project != "torch":
            return Contents(store.MLX + release, "", FILES[project])
        commit = re.search(r"""git_version = ['"](\w+)['"]""", archive.read("torch/version.py").decode())
        return Contents(release, commit[1] if commit else "", FILES[project])


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive, open; what is wrong with it, a checksum that differs included, becomes one line."""
    if not user_path(path).is_file():
        raise UserError(f"there is no file {path}; {NEXT}")
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except BROKEN as error:
        raise UserError(f"{path} is no whole wheel ({error or type(error).__name__}); {NEXT}") from error


# The first is what PyTorch builds for at present; pip takes wheels of every older macOS for it (macosx_11_0_arm64 up to
# 2.11), and those of a newer one where there are no others. The wheel need not fit the Python that runs: it is opened
# and not installed.
PLATFORMS = ("macosx_14_0_arm64", "macosx_26_0_arm64")
PYTHON = "312"

# A page that is not there (404) is an answer.
_UNREACHABLE = re.compile(r"^Could not fetch URL \S+: (?!404)(.*) - skipping$", re.MULTILINE)
_ERRNO = re.compile(r"\[Errno -?\d+\] ([^'\")]+)")


def download(release: str, work: Path) -> Path:
    """Download the macOS wheel of a release into `work`, an empty folder, and return its path.

    pip compares it with the sha256 that the index states. Raises UserError for a release that the index does not have
    and without pip, RunError where it cannot be reached or the wheel is another one.
    """
    if find_spec("pip") is None:
        raise UserError(
            f"{sys.executable} has no pip (environments of uv have none); next: uv pip install pip, or "
            "hf-mps kernels fetch --wheel PATH"
        )
    # -vv tells an index that cannot be reached from one without the release; a cache of its own leaves no second wheel.
    command = [sys.executable, "-m", "pip", "download", "-vv", "--dest", str(work), "--cache-dir", str(work / "cache")]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    command += ["--python-version", PYTHON, "--only-binary=:all:", "--no-deps", "--no-input", "--no-color"]
    command += ["--disable-pip-version-check", _requirement(release)]
    # What pip unpacks goes with `work` too, though it be killed.
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "TMPDIR": str(work)}
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    if ended.returncode:
        raise _refusal(release, ended.stdout + ended.stderr)
    return next(work.glob("*.whl"))


def _requirement(release: str) -> str:
    return f"mlx-metal=={release.removeprefix(store.MLX)}" if release.startswith(store.MLX) else f"torch=={release}"


def _refusal(release: str, said: str) -> UserError | RunError:
    """Return what pip's output says is wrong, in one line with the next command."""
    errors = [line.removeprefix("ERROR:").strip() for line in said.splitlines() if line.startswith("ERROR:")]
    differs = re.search(r"Expected sha256 (\w+)\s+Got\s+(\w+)", said)
    if differs:
        return RunError(
            f"the wheel of {store.named(release)} has sha256 {differs[2][:12]}…, and the index states "
            f"{differs[1][:12]}…; nothing was kept; next: again"
        )
    unreachable = _UNREACHABLE.search(said)
    if unreachable:
        number = _ERRNO.search(unreachable[1])
        reason = number[1] if number else brief(unreachable[1])
        return RunError(
            f"pip does not reach the package index for {store.named(release)} ({reason}); "
            "next: again, or hf-mps kernels fetch --wheel PATH"
        )
    capped = re.search(r"The user requested \(constraint\) ((?:torch|mlx-metal)\S+)", said)
    if capped and not Requirement(capped[1]).specifier.contains(release.removeprefix(store.MLX), prereleases=True):
        return UserError(f"pip's constraint {capped[1]} excludes {store.named(release)}; next: pip config list")
    known = re.search(r"\(from versions: ([^)]*)\)", said)
    if capped or known or any("No matching distribution" in line for line in errors):
        listed = f"; the newest that it has: {known[1].split(', ')[-1]}" if known and known[1] != "none" else ""
        return UserError(
            f"the package index has no macOS wheel of {store.named(release)}{listed}; "
            f"next: pip index versions {_requirement(release).partition('==')[0]}"
        )
    return RunError(f"pip: {errors[0] if errors else (said.strip().splitlines() or ['it failed'])[-1]}")


# macOS 26 has a library for itself, with tensor operations whose meaning is not known here (docs/kernels.md).
MACOS = 14
Say = Callable[[str], None]


def fetch(release: str, say: Say) -> store.Fetched:
    """Fetch a release from the package index, unless it is here and whole; `say` gets each line of what is done.

    The wheel is removed, whatever ends this. Raises UserError and RunError.
    """
    name = store.canonical(release)

    def wheel(work: Path) -> Path:
        start = time.monotonic()
        say(f"{store.named(name)}: downloading its macOS wheel with pip")
        with status.shown(f"{store.named(name)}: downloading"):
            file = download(name, work)
        size, seconds = memory(file.stat().st_size), duration(time.monotonic() - start)
        say(f"{store.named(name)}: {file.name}, {size} in {seconds}")
        return file

    return _once(name, wheel, say)


def from_wheel(path: Path, say: Say) -> store.Fetched:
    """Take the kernels of a wheel that the user has; the file stays. Raises UserError and RunError in one line."""
    file = user_path(path)
    return _once(store.canonical(read_wheel(file).release), lambda _: file, say)


def _once(release: str, wheel: Callable[[Path], Path], say: Say) -> store.Fetched:
    """Keep the kernels of `wheel(folder for a download)`, unless they are here, or another process fetches them."""
    here = _whole(release, say)
    if here is not None:  # needs no lock, and so no cache that can be written
        return here
    words = f"{store.named(release)}: another process fetches it; waiting …"
    with cache.alone(store.made() / f".{release}.lock", lambda: say(words)) as waited:
        here = _whole(release, say) if waited else None
        if here is not None:
            return here
        with _work(release) as work:
            return _keep(wheel(work), work, say)


def _keep(file: Path, work: Path, say: Say) -> store.Fetched:
    """Put the kernels of the wheel `file` into the cache, whole: they are made in `work`, a folder beside it."""
    start = time.monotonic()
    contents = read_wheel(file)
    name = store.canonical(contents.release)
    fresh = work / name
    fresh.mkdir(mode=0o700)
    dylib = work / "library"
    with _opened(file) as archive, archive.open(contents.file) as source, dylib.open("wb") as target:
        shutil.copyfileobj(source, target)
    size = _cut_out(dylib, fresh / store.LIBRARY, name)
    kernels = list(Library.open(fresh / store.LIBRARY))
    known = store.Fetched(
        release=name,
        git_version=contents.git_version,
        wheel=file.name,
        wheel_sha256=store.sha256(file),
        kernels=len(kernels),
        families=len(describe.table(kernels)),
        size=size,
        sha256=store.sha256(fresh / store.LIBRARY),
    )
    write_json(fresh / store.FACTS, asdict(known))
    place = store.root() / name
    if place.exists():  # broken, as `_whole` found; its compiled code goes with it
        place.rename(work / "broken")
    fresh.rename(place)
    store.verify(name)
    say(
        f"{store.named(name)}: {known.kernels:,} kernels in {known.families:,} families, {memory(size)}, "
        f"in {duration(time.monotonic() - start)}; kept in {place}"
    )
    return known


def _cut_out(dylib: Path, target: Path, release: str) -> int:
    """Write the metallib for macOS 14 in `dylib` to `target` and return its bytes.

    A wheel has a metallib for each macOS that it was built for: 14 and 26.
    """
    with dylib.open("rb") as whole, mmap.mmap(whole.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = libraries(content)
        chosen = [each for each in found if Library(each).macos == MACOS]
        try:
            if not chosen:
                others = ", ".join(str(Library(each).macos) for each in found)
                raise UserError(
                    f"{store.named(release)} has no metallib for macOS {MACOS} in its library "
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


def _whole(release: str, say: Say) -> store.Fetched | None:
    if not (store.root() / release).exists():
        return None
    try:
        store.verify(release)
        known = store.facts(release)
    except UserError as error:
        say(f"{str(error).rpartition('; next')[0] or error}: fetched again")
        return None
    say(f"{store.named(release)}: here already, {known.kernels:,} kernels in {store.folder(release)}")
    return known


@contextlib.contextmanager
def _work(release: str) -> Iterator[Path]:
    """A folder beside the releases for a download and what is made of it; it goes, whatever ends the work."""
    try:
        with cache.working(store.made(), f"{release}-") as work:
            yield work
    except OSError as error:
        problem = "no space is left" if error.errno == errno.ENOSPC else f"{error.strerror or error}"
        raise RunError(f"{store.root()}: {problem}; next: room there, or XDG_CACHE_HOME=FOLDER elsewhere") from error
    except BrokenLibrary as error:
        problem = f"the metallib of {store.named(release)} cannot be read ({error})"
        raise UserError(f"{problem}; next: another wheel of it") from error
