"""Files written whole or not at all: a killed run leaves the old file or the new one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError


def write_atomic(path: str | os.PathLike[str], content: bytes | str) -> Path:
    """Put `content` at `path` in one move and return the path; text is written as UTF-8 with "\\n" line ends.

    The bytes go to a hidden file beside the target and reach the disk before it takes the target's name. Missing parent
    folders are made. Raises OSError (no space left, no permission, …) after removing the hidden file.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode("utf-8") if isinstance(content, str) else content
    # Same folder: os.replace is atomic only within one file system. Random name: two runs may share an output_dir.
    hidden = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with hidden.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        replace_file(hidden, target)
    except BaseException:  # Ctrl-C included: no litter beside the user's files
        with contextlib.suppress(OSError):
            hidden.unlink()
        raise
    return target


def refuse_unwritable(path: Path, what: str) -> None:
    """Raise UserError where no file can be made at `path`, which a person called `what`; tries its nearest folder."""
    try:
        place = next(folder for folder in path.absolute().parents if folder.is_dir())
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise UserError(f"{what}: {place} is not writable: {error.strerror}; give another folder") from error


def replace_file(source: Path, target: Path) -> None:
    """Move a file or a folder to `target`, over one that is there. Raises OSError, with the old file in its place.

    Some servers behind sshfs refuse to rename over a file (sshfs(1), workaround=rename): there the old one is set aside
    under a name by which `checkpoint_files.sweep` puts it back, should the process be killed in between.
    """
    if source.is_dir() and target.is_dir():  # rename(2) refuses to replace a folder that holds anything
        shutil.rmtree(target)
    try:
        source.replace(target)
    except (FileExistsError, PermissionError):
        if not target.is_file():
            raise
        aside = target.rename(target.with_name(f".{target.name}.replaced-{os.getpid()}"))
        try:
            source.rename(target)
        except BaseException:
            aside.rename(target)
            raise
        aside.unlink()


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    """Write `value` as strict, indented JSON, atomically; see `plain` for what becomes of other types.

    Raises TypeError for a value that JSON has no form for, OSError as `write_atomic`.
    """
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    # A lone surrogate (a byte of a file name that is no UTF-8) has no UTF-8 form; JSON's own escape holds it.
    safe = "".join(f"\\u{ord(letter):04x}" if "\ud800" <= letter <= "\udfff" else letter for letter in text)
    return write_atomic(path, safe + "\n")


def plain(value: Any) -> Any:
    """Return `value` in JSON's own types.

    NaN and infinities become None, a Choice {"value", "reason"}, a dataclass a dict, a path its text, a numpy or torch
    scalar its number, an array a list, a set a sorted list. Raises TypeError, naming the type, for anything else.
    """
    if isinstance(value, Choice):
        return {"value": plain(value.value), "reason": value.reason}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float, str)):
        return None if isinstance(value, float) and not math.isfinite(value) else bare(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return plain(value.tolist())
    raise TypeError(f"JSON has no form for a value of type {type(value).__name__}")


def bare(value: int | float | str) -> int | float | str:
    """Return a number or a text of a subclass (numpy's, a member of an enumeration) as one of Python's own."""
    # Not str(value), which names a member of an enumeration of texts as `Kind.ONE`.
    return int(value) if isinstance(value, int) else float(value) if isinstance(value, float) else str.__str__(value)
