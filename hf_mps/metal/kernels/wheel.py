"""A wheel of PyTorch for macOS, looked into: what it is, and its library taken out."""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hf_mps.core.errors import UserError, brief

DYLIB = "torch/lib/libtorch_cpu.dylib"
NEXT = "next: hf-mps kernels fetch RELEASE, or --wheel with a file torch-RELEASE-…-macosx_…_arm64.whl"
BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, KeyError, UnicodeDecodeError)


class Contents(NamedTuple):
    """What a wheel says of itself."""

    release: str
    git_version: str


def read(path: Path) -> Contents:
    """What a macOS wheel of PyTorch says of itself.

    Raises UserError for a file that is absent, is no whole wheel, or is another project's or another platform's.
    """
    with _opened(path) as archive:
        names = archive.namelist()
        metadata = next((name for name in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)), None)
        if metadata is None:
            raise UserError(f"{path} is no wheel: it has no metadata; {NEXT}")
        facts = _fields(archive.read(metadata))
        tags = _fields(archive.read(metadata.replace("METADATA", "WHEEL"))).get("tag", "")
        project, release = facts.get("name", ""), facts.get("version", "")
        if project.lower() != "torch":
            raise UserError(f"{path} is a wheel of {brief(project)}, not of torch; {NEXT}")
        platform = tags.rpartition("-")[2]
        if not re.fullmatch(r"macosx_\d+_\d+_arm64", platform):
            raise UserError(f"{path} is torch {brief(release)} for {brief(platform)}, not for macOS on arm64; {NEXT}")
        if DYLIB not in names:
            raise UserError(f"{path} has no {DYLIB}; {NEXT}")
        commit = re.search(r"""git_version = ['"](\w+)['"]""", archive.read("torch/version.py").decode())
        return Contents(release, commit[1] if commit else "")


def extract_library(path: Path, target: Path) -> None:
    """Write the wheel's `libtorch_cpu.dylib` to `target`, compared with the archive's checksum and the wheel's RECORD.

    Raises UserError where they differ, OSError where it cannot be written.
    """
    digest = hashlib.sha256()
    with _opened(path) as archive, archive.open(DYLIB) as source, target.open("wb") as file:
        while block := source.read(1 << 20):
            digest.update(block)
            file.write(block)
        stated = _recorded(archive)
    found = "sha256=" + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
    if stated and stated != found:
        raise UserError(f"{path} is broken: its {DYLIB} is not the one that its RECORD lists; {NEXT}")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive, open; what is wrong with it, as it is read, becomes one line."""
    if not path.is_file():
        raise UserError(f"there is no file {path}; {NEXT}")
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except BROKEN as error:
        raise UserError(f"{path} is no whole wheel ({error or type(error).__name__}); {NEXT}") from error


def _fields(text: bytes) -> dict[str, str]:
    """The fields of a METADATA or WHEEL file, the first of each name, in small letters."""
    head = text.decode().split("\n\n", 1)[0]
    found: dict[str, str] = {}
    for line in head.splitlines():
        name, colon, value = line.partition(": ")
        if colon:
            found.setdefault(name.lower(), value.strip())
    return found


def _recorded(archive: zipfile.ZipFile) -> str:
    """The hash that the wheel's RECORD has for its library, `sha256=…`, or an empty string."""
    name = next((each for each in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", each)), None)
    if name is None:
        return ""
    rows = csv.reader(io.StringIO(archive.read(name).decode()))
    return next((row[1] for row in rows if len(row) > 1 and row[0] == DYLIB), "")
