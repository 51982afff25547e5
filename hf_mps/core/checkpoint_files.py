"""Checkpoint folders: whether one is whole, and how one appears whole or not at all. Imports no torch."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hf_mps.core.files import replace_file

_HIDDEN = re.compile(r"^\.(?P<name>.+)\.(?P<kind>saving|replaced|removed|locked)-(?P<process>\d+)$")
_WRITING = re.compile(r"^\..+\.(?P<process>\d+)-[0-9a-f]{8}\.tmp$")  # hf_mps.core.files.write_atomic
_TORCH = {".pt", ".pth", ".bin", ".pkl"}
_TRAINERS = re.compile(r"checkpoint-\d+$")
_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model)\.(safetensors|bin)(\.index\.json)?$")
_STATES = re.compile(r"(trainer_state\.json|(optimizer|scheduler|scaler|rng_state\w*)\.(pt|pth|bin))$")
_WORDS = {".json", ".jsonl", ".txt", ".md", ".jinja", ".model", ".part"}
HOST, DAY = ".host", 86_400
"""The file in a hidden folder that names its host, and the seconds for which another host's folder is left alone."""
_active: set[Path] = set()


def torn(folder: Path, last: str) -> str | None:
    """Return what is wrong with the files of a checkpoint, in a clause, or None for a whole one.

    `last` is a pattern of the file that its library writes last. The check asks whether that is there; whether JSON
    can be read and every shard is there; whether a safetensors file is as long as its header says; and whether a torch
    file, an archive with its directory at the end, has that. It reads no tensor's bytes, so that 10 GB take
    milliseconds: it finds a write that was cut short, and not a bit that changed on the disk.
    """
    if not any(folder.glob(last)):
        return f"{last.replace('*', '0')} is missing"
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        try:
            wrong = _wrong(file)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            wrong = f"it cannot be read ({str(error).strip() or type(error).__name__})"
        if wrong:
            return f"{file.name}: {wrong}"
    for part in sorted(folder.glob("*/*.distcp")):  # torch.distributed.checkpoint writes .metadata after every rank
        if not (part.parent / ".metadata").is_file():
            return f"{part.parent.name}: .metadata is missing"
    # Weights are in whatever file of Trainer's is no text and no state of the training.
    known = ("training_args", "loader_rng", "mps_rng_state")
    others = (file for file in folder.rglob("*") if file.is_file() and file.suffix not in _WORDS)
    if last == "trainer_state.json" and all(_STATES.match(each.name) or each.name.startswith(known) for each in others):
        return "its weights are missing"
    return None


def model_alone(folder: Path) -> bool:
    """Whether a folder holds a model, or an adapter, and nothing that Trainer's checkpoints add; judged by names.

    A folder with the name of one of Trainer's checkpoints is none, whatever it holds: half of one looks so too.
    """
    if not folder.is_dir() or _TRAINERS.match(folder.name):
        return False
    names = [path.name for path in folder.iterdir() if path.is_file()]
    return any(map(_WEIGHTS.match, names)) and not any(map(_STATES.match, names))


def _wrong(file: Path) -> str | None:
    """Return what is wrong with one file; a kind that is not known is not judged."""
    if file.suffix == ".json":
        content = json.loads(file.read_bytes())
        shards = set(content["weight_map"].values()) if file.name.endswith(".index.json") else set()
        missing = sorted(name for name in shards if not (file.parent / name).is_file())
        return f"{missing[0]} is missing" if missing else None
    if file.suffix == ".safetensors":  # by the format's description: 8 bytes of length, a JSON header, the tensors
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length + 8 > size:
                return f"it ends after {size:,} bytes, in its header"
            header = json.loads(opened.read(length))
        ends = (tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__")
        due = 8 + length + max(ends, default=0)
        return f"it ends after {size:,} of {due:,} bytes" if size < due else None
    if file.suffix in _TORCH:
        with file.open("rb") as opened:
            if not (start := opened.read(2)):
                return "it is empty"
            if start == b"PK":  # torch's own format; older ones have no end that could be looked for
                try:
                    zipfile.ZipFile(opened).close()
                except zipfile.BadZipFile:
                    return "its end is missing"
    return None


def can_stage(target: Path) -> bool:
    """Whether a folder made beside `target` could take its place: the parent can be written, on the same disk."""
    parent = next((folder for folder in target.parents if folder.exists()), None)
    # rename(2) refuses a folder on which something is mounted.
    return parent is not None and os.access(parent, os.W_OK) and not os.path.ismount(target)


@contextmanager
def staged(target: Path, last: str, levels: int = 1, *, owner: int | None = None) -> Iterator[Path]:
    """Give a hidden folder for the files of `target`, which takes its name, on the disk, when the block has ended.

    It is called as the last `levels` parts of `target` are, inside one beside the highest of them. Where `target` is
    there and holds more than is written now, the files are moved into it one by one, `last` (a pattern) last of all.
    An exception leaves `target` as it was. Several processes write into the folder of one of them, the `owner`, which
    alone lets it take the name. Raises OSError for a full disk or a folder that cannot be written.
    """
    root = target.parents[levels - 1]
    root.mkdir(parents=True, exist_ok=True)
    with _hidden(root, f".{target.name}.saving", owner or os.getpid()) as outer:
        stage = outer / target.relative_to(root)
        stage.parent.mkdir(parents=True, exist_ok=True)
        if owner in (None, os.getpid()):
            (outer / HOST).write_text(platform.node(), encoding="utf-8")
        yield stage
        if owner in (None, os.getpid()) and stage.is_dir():
            _publish(stage, target, last)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a hidden folder with this process's number in `folder` while the block lasts, as a lock.

    `sweep` removes that of a killed process.
    """
    with _hidden(folder, ".run.locked", os.getpid()) as outer:
        outer.mkdir()
        yield


@contextmanager
def _hidden(root: Path, name: str, owner: int) -> Iterator[Path]:
    """Give the path of the hidden folder that the process `owner` makes in `root`; it alone sweeps it away."""
    owns = owner == os.getpid()
    # Only the owner sweeps: the others may come when its folder is there already.
    if owns:
        sweep(root)
    outer = root / f"{name}-{owner}"
    _active.add(outer)
    try:
        yield outer
    finally:
        if owns:
            shutil.rmtree(outer, ignore_errors=True)
        _active.discard(outer)


def sweep(folder: Path) -> None:
    """Remove from `folder` what killed processes left there; what one of them had set aside goes back to its place."""
    for path in folder.glob(".*-*") if folder.is_dir() else ():
        writing = _WRITING.match(path.name)
        if writing and not _lives(int(writing["process"])):
            path.unlink(missing_ok=True)
        hidden = _HIDDEN.match(path.name)
        if hidden is None or path in _active or _lives(int(hidden["process"])) or _elsewhere(path):
            continue
        if hidden["kind"] == "replaced" and not (folder / hidden["name"]).exists():
            with suppress(FileNotFoundError):  # every rank of a script sweeps: another one was faster
                path.rename(folder / hidden["name"])
        elif path.is_file():  # hf_mps.core.files.replace_file
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def removed_whole() -> Iterator[None]:
    """Have shutil.rmtree, by which Trainer removes old checkpoints, hide one of them before it removes its files.

    A process that is killed meanwhile would leave a checkpoint without some of its files under its name.
    """
    stock = shutil.rmtree

    def remove(path: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(path, (str, os.PathLike)) and _TRAINERS.match((folder := Path(path)).name):
            aside = folder.with_name(f".{folder.name}.removed-{os.getpid()}")
            with suppress(OSError):  # what cannot be renamed is removed under its name
                path = folder.rename(aside)
        stock(path, *args, **kwargs)

    shutil.rmtree = remove  # type: ignore[assignment]
    try:
        yield
    finally:
        shutil.rmtree = stock


def _lives(process: int) -> bool:
    """Return whether another process of that number lives; of this one nothing is left that is not in `_active`."""
    if process == os.getpid():  # in a container each process may get the number of the one that was killed
        return False
    import psutil

    return bool(psutil.pid_exists(process))


def _elsewhere(path: Path) -> bool:
    """Return whether another host made a folder on a shared disk and wrote in it within a day: its processes are not to
    be seen here.
    """
    try:
        if (path / HOST).read_text(encoding="utf-8") == platform.node():
            return False
    except OSError:
        return False
    try:
        return time.time() - max(inside.lstat().st_mtime for inside in path.rglob("*")) < DAY
    except OSError:  # that host is removing it
        return True


def _publish(stage: Path, target: Path, last: str) -> None:
    # Every file and folder reaches the disk before a name says that they are there.
    for path in (*sorted(stage.rglob("*"), reverse=True), stage):
        _sync(path)
    # A process that works in the folder would be left in one that is removed.
    we_are_in = target.exists() and Path.cwd().is_relative_to(target.resolve())
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        stage.rename(target)
    elif {file.name for file in target.iterdir()} <= {file.name for file in stage.iterdir()} and not we_are_in:
        # Two moves, since no system call that Python has exchanges two folders; between them `sweep` knows what to do.
        aside = target.with_name(f".{target.name}.replaced-{os.getpid()}")
        _active.add(aside)
        target.rename(aside)
        try:
            stage.rename(target)
        except BaseException:
            aside.rename(target)
            raise
        finally:
            _active.discard(aside)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        # Each file whole; without its last one a checkpoint is known as torn, so that is gone first and comes last.
        for file in target.glob(last):
            file.unlink()
        last_names = {file.name for file in stage.glob(last)}
        for path in sorted(stage.iterdir(), key=lambda path: path.name in last_names):
            replace_file(path, target / path.name)
        _sync(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    place = os.open(path, os.O_RDONLY)
    try:
        os.fsync(place)
    except OSError as error:
        # File systems without such a call for folders (SMB, exFAT) refuse it; what is in the files is on the disk.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(place)
