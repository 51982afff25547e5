"""The user's cache of fetched releases: a folder for each, with its metallib and what is known of it.

    ~/.cache/hf_mps/kernels/2.13.0/macos14.metallib      PyTorch's Metal kernels for macOS 14, as they lay in its wheel
                                   release.json          release, commit, wheel, hashes, counts (`Fetched`)
                                   verified.json         the file's identity when its hash was last computed

A folder appears whole or not at all. The hash of 80 to 100 MB takes 0.05 to 0.3 s, and every process opens the file, so
that it is computed once for each identity of the file: size, inode, and the times of the last change of content and of
inode. The kernel of the system sets the last one whenever the file is written, and no program can set it back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shutil
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version

from hf_mps.core import cache
from hf_mps.core.errors import UserError, brief
from hf_mps.core.files import write_json
from hf_mps.metal.kernels.metallib import Library

LIBRARY = "macos14.metallib"
FACTS = "release.json"
VERIFIED = "verified.json"
EXAMPLE = "2.13.0"
MLX = "mlx-"
"""What the names of MLX's releases begin with: their kernels are kept beside PyTorch's."""
EXAMPLE_MLX = "0.32.4"


@dataclass(frozen=True)
class Fetched:
    """What is known of a fetched release."""

    release: str
    git_version: str
    """The commit that the wheel was built from, as its torch/version.py has it."""
    wheel: str
    """The wheel's file name."""
    wheel_sha256: str
    kernels: int
    families: int
    size: int
    """Bytes of the metallib."""
    sha256: str


def root() -> Path:
    """Return the folder of all releases; it need not exist. Raises UserError where there is no home folder."""
    folder = cache.home("kernels")
    if folder is None:
        raise UserError("Metal kernels are kept in the home folder, and there is none; next: XDG_CACHE_HOME=FOLDER")
    return folder


def canonical(release: str) -> str:
    """A release as PyTorch's wheels name it: `2.13` is 2.13.0, `2.13.0+cpu` too. Raises UserError for what is none.

    `mlx-0.32.4` is a release of MLX, `mlx` the one of the installed MLX, or EXAMPLE_MLX.
    """
    if release == "mlx":
        release = MLX + (_installed("mlx") or EXAMPLE_MLX)
    kind = MLX if release.startswith(MLX) else ""
    try:
        version = Version(release.removeprefix(kind))
    except InvalidVersion:
        project, example = ("MLX", f"mlx-{EXAMPLE_MLX}") if kind else ("PyTorch", EXAMPLE)
        raise UserError(
            f"'{brief(release)}' is no release of {project}; allowed: a version, for example {example}"
        ) from None
    numbers = ".".join(map(str, (*version.release, 0, 0)[: max(3, len(version.release))]))
    return kind + numbers + version.public.removeprefix(version.base_version)


def releases() -> list[str]:
    """Return the fetched releases, oldest first, MLX's before PyTorch's."""
    found = root()
    names = [each.name for each in found.iterdir() if (each / FACTS).is_file()] if found.is_dir() else []
    whole = (name for name in names if not name.startswith("."))
    return sorted(whole, key=lambda name: (not name.startswith(MLX), Version(name.removeprefix(MLX))))


def named(release: str) -> str:
    """Return a release with its project's name, for people: `torch 2.13.0`, `MLX 0.32.4`."""
    return f"MLX {release.removeprefix(MLX)}" if release.startswith(MLX) else f"torch {release}"


def installed() -> str | None:
    """Return the release of the torch that is installed here, which is not imported, or None."""
    own = _installed("torch")
    return canonical(own) if own else None


def _installed(project: str) -> str | None:
    try:
        return metadata.version(project)
    except metadata.PackageNotFoundError:
        return None


def chosen(release: str | None) -> str:
    """The fetched release that a verb looks into: the one asked for, else the installed torch's, else the newest.

    Raises UserError, with the next command, where that is not fetched, or none is.
    """
    here, own = releases(), installed()
    return here[-1] if release is None and here and own not in here else folder(release or own or EXAMPLE).name


def folder(release: str) -> Path:
    """Return the folder of a fetched release. Raises UserError, with the next command, where it was not fetched."""
    name = canonical(release)
    place = root() / name
    if (place / FACTS).is_file():
        return place
    there = f" ({', '.join(releases())} here)" if releases() else ""
    raise UserError(f"the Metal kernels of {named(name)} are not fetched{there}; next: hf-mps kernels fetch {name}")


def path(release: str) -> Path:
    """The metallib of a fetched release, not verified. Raises UserError, with the next command, where it is absent."""
    return folder(release) / LIBRARY


def facts(release: str) -> Fetched:
    """What is known of a fetched release. Raises UserError where it was not fetched or its facts cannot be read."""
    place = folder(release) / FACTS
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
        return Fetched(**{field.name: content[field.name] for field in fields(Fetched)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _broken(release, f"{place} cannot be read ({type(error).__name__})") from error


def open_library(release: str) -> Library:
    """Return the kernels of a fetched release, verified.

    Raises UserError, with the next command, where the release was not fetched, where its file is not the one that was
    fetched, and where somebody else could have written to the folder: what is in it is compiled and run.
    """
    verify(release)
    return Library.open(path(release))


def verify(release: str) -> None:
    """Compare the metallib's sha256 with the recorded one, unless this very file was compared before.

    Raises UserError as `open_library` does.
    """
    known, file = facts(release), path(release)
    with contextlib.suppress(OSError):  # an absent file has its own error
        if (place := cache.open_to_others(file)) is not None:
            raise UserError(
                f"others may write to {place}, and its kernels are compiled and run; next: chmod 700 {place}"
            )
    try:
        status = file.stat()
        identity = {name: getattr(status, f"st_{name}") for name in ("size", "ino", "mtime_ns", "ctime_ns")}
        if identity["size"] != known.size:
            raise _broken(release, f"{file} has {identity['size']:,} bytes of {known.size:,}")
        with contextlib.suppress(OSError, ValueError):
            verified = json.loads((file.parent / VERIFIED).read_text(encoding="utf-8"))
            if verified == {**identity, "sha256": known.sha256}:
                return
        found = sha256(file)
    except OSError as error:
        raise _broken(release, f"{file} cannot be read ({error.strerror})") from error
    if found != known.sha256:
        raise _broken(release, f"{file} was altered: its sha256 is {found[:12]}…, {known.sha256[:12]}… when fetched")
    with contextlib.suppress(OSError):  # a cache that only can be read: the next process computes it again
        write_json(file.parent / VERIFIED, {**identity, "sha256": found})


def present(release: str) -> str:
    """Return the name of a release that is to be removed. Raises UserError where it was not fetched."""
    name = canonical(release)
    if name not in releases():
        raise UserError(f"{named(name)} is not fetched; allowed: {', '.join(releases()) or 'nothing, as none is here'}")
    return name


def remove(release: str) -> int:
    """Remove a fetched release and return the bytes that it took. Raises UserError where it cannot be."""
    place = folder(release)
    size = sum(each.stat().st_size for each in place.rglob("*") if each.is_file())
    # Renamed before it is removed: half a release must not look like one, and names with a dot in front are none.
    leaving = place.with_name(f".gone-{place.name}-{secrets.token_hex(4)}")
    try:
        place.rename(leaving)
        shutil.rmtree(leaving)
    except OSError as error:
        raise UserError(f"{place} cannot be removed ({error.strerror})") from error
    return size


def made() -> Path:
    """Return the folder of all releases, made and closed to everybody else.

    Raises UserError where it cannot be written.
    """
    place = root()
    try:
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o700)
    except OSError as error:
        raise UserError(
            f"{place} cannot be written ({error.strerror}); next: XDG_CACHE_HOME=FOLDER, a folder that can"
        ) from error
    return place


def sha256(file: Path) -> str:
    """Return the sha256 of a file, in hexadecimal letters."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _broken(release: str, problem: str) -> UserError:
    return UserError(f"{problem}; next: hf-mps kernels fetch {canonical(release)}")
