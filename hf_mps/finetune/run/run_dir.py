"""Where a run writes: a folder of its own, never one that holds another run, held against a second run of the same."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hf_mps.core.checkpoint_files import sweep
from hf_mps.core.errors import UserError
from hf_mps.finetune.recipe.resolve import Order
from hf_mps.finetune.run import fingerprints, stored_recipe
from hf_mps.finetune.run.failures import RESULTS, checkpoints, skipped

RUNS = Path("runs")
STAGING = ".saving"
# What a run leaves before its first step.
OURS = (stored_recipe.FILE, fingerprints.FILE)
# What makes a folder a model to `from_pretrained`, by kind of model: moved in last of all.
LAST = ("config.json", "adapter_config.json", "modules.json")


@dataclass(frozen=True)
class Place:
    """The folder of a run and why it is this one; `checkpoint` is where an unfinished run of the same goes on from."""

    path: Path
    reason: str
    named: bool
    checkpoint: Path | None = None
    finished: bool = False


def choose(order: Order, *, fresh: bool = False) -> Place:
    """The folder for a run of `order`: that of the same recipe's run where there is one, otherwise one not used yet.

    By default that is `runs/NAME`, with a number behind where a run of another recipe lies there. `fresh` never goes on
    with a run. Raises UserError for a folder that the user named and that holds anything else, and for an unfinished
    run of a recipe that has changed since.
    """
    named = order.recipe.output_dir
    first = Path(named).expanduser() if named is not None else RUNS / order.name
    there = [path for path in (numbered(first) if named is None else [first]) if _used(path)]
    if fresh:
        reason = f"--fresh: beside {first}" if there else "--fresh"
        return Place(beside(first) if there else first, reason, named is not None)
    for path in reversed(there):
        differs = stored_recipe.differences(path, order)
        if differs == [] and (path / RESULTS).exists():
            differs = fingerprints.changed_files(path, order.recipe.data)
        if differs == []:
            return _same(path, named is not None)
        unfinished = differs is not None and not (path / RESULTS).exists()
        if unfinished or (named is not None and differs):
            raise UserError(_changed(path, differs or []))
    if named is not None and there:
        raise UserError(_in_use(first))
    if there:
        return Place(beside(first), f"{first} holds another run, which stays as it is", named=False)
    return Place(
        first, "output_dir in the recipe" if named else "the default: runs/ and the recipe's name", bool(named)
    )


def refuse_other_rows(place: Place, splits: fingerprints.Splits) -> None:
    """Raise UserError where the run in `place` that would be gone on with was on other rows than `splits`."""
    told = fingerprints.differences(place.path, splits) if place.checkpoint is not None else []
    if told:
        raise UserError(
            f"{place.path} holds an unfinished run on other rows: {', '.join(told)}; next: the rows as they were, or"
            f" --fresh, which trains beside it in {beside(place.path)}"
        )


@contextmanager
def claimed(place: Place) -> Iterator[Path]:
    """Make the folder of `place`, with the hidden one for files in the making, and hold it while the context lasts.

    Another run may have taken it in between: the default steps aside, a folder that the user named is refused, and so
    is an unfinished run that goes on elsewhere. Raises UserError for that, and where the folder cannot be made.
    """
    path = place.path
    while True:
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
            if lock is not None and (place.named or place.checkpoint or not _used(path)):
                sweep(path)
                shutil.rmtree(staging(path), ignore_errors=True)  # of a run that was killed
                staging(path).mkdir()
                break
        except OSError as error:
            raise UserError(f"output_dir {path}: cannot be made: {error.strerror}; next: another output_dir") from error
        if lock is not None:
            os.close(lock)
        if place.named or place.checkpoint:
            raise UserError(f"output_dir {path}: a run is going on in it; next: --fresh, or another output_dir")
        path = beside(path)
    try:
        yield path
    finally:
        os.close(lock)


def staging(output: Path) -> Path:
    """The hidden folder inside a run's own, for files that are moved out once they are whole."""
    return output / STAGING


def publish(output: Path) -> None:
    """Move every file of the staging folder into the run's own, the configuration last: a model begins with it."""
    staged = staging(output)
    for file in sorted(staged.iterdir(), key=lambda path: (path.name in LAST, path.name)):
        file.replace(output / file.name)
    staged.rmdir()


def holds_model(output: Path) -> bool:
    """Whether a trained model was published into a run's folder."""
    return any((output / name).is_file() for name in LAST)


def tidy(output: Path) -> list[Path]:
    """Remove what a stopped run left half-written, and the folder where nothing is left; return whole checkpoints."""
    sweep(output)
    whole = checkpoints(output)
    for path in output.glob("checkpoint-*"):
        if path not in whole:
            shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(staging(output), ignore_errors=True)
    if output.is_dir() and {path.name for path in output.iterdir()} <= {*OURS}:
        for name in OURS:
            (output / name).unlink(missing_ok=True)
        output.rmdir()
    return whole


def _same(path: Path, named: bool) -> Place:
    """The folder of a run of the same recipe: finished, to be gone on with, or killed before its first checkpoint."""
    if (path / RESULTS).exists():
        return Place(path, "this recipe's finished run", named, finished=True)
    whole, torn = checkpoints(path), skipped(path)
    because = f": {torn}" if torn else ""
    if whole:
        return Place(path, f"this recipe's run goes on from {whole[-1].name}{because}", named, whole[-1])
    return Place(path, f"this recipe's run left no checkpoint there and begins again{because}", True)


def _lock(path: Path) -> int | None:
    """Hold the folder until the descriptor is closed or the process ends, however it ends; None where it is held."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # a network file system without locks
        return descriptor
    return descriptor


def _used(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def _in_use(path: Path) -> str:
    return f"output_dir {path} is in use already, and a run never writes over another; next: output_dir={beside(path)}"


def _changed(path: Path, differs: list[str]) -> str:
    shown = ", ".join(differs[:4]) + (f", … {len(differs)} in all" if len(differs) > 4 else "")
    state = "a finished" if (path / RESULTS).exists() else "an unfinished"
    way_on = f"the recipe as it was, or --fresh, which trains beside it in {beside(path)}"
    return f"{path} holds {state} run of a recipe that has changed since: {shown}; next: {way_on}"


def numbered(path: Path) -> list[Path]:
    """The folder itself, NAME-2, NAME-3, … as far as they are there."""
    found = [path]
    while (there := path.with_name(f"{path.name}-{len(found) + 1}")).exists():
        found.append(there)
    return found


def beside(path: Path) -> Path:
    """The first of NAME-2, NAME-3, … that is not there."""
    number = 2
    while (there := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return there
