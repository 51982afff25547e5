"""The run directory: a folder of its own, never one that holds another run, and locked against a second process.

It holds the recipe and a digest of the rows from the start: they tell whether a later call asks for the same run.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hf_mps.core.checkpoint_files import locked, sweep, torn
from hf_mps.core.errors import UserError
from hf_mps.core.files import plain, replace_file, write_atomic
from hf_mps.distributed.world import World
from hf_mps.finetune.recipe import training_section
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.recipe.schema import map_paths
from hf_mps.finetune.recipe.yaml import read_yaml
from hf_mps.finetune.run import fingerprints
from hf_mps.finetune.run.failures import PENDING, RESULTS

RUNS = Path("runs")
STAGING = ".saving"
FREED = 15.0
"""Seconds until a killed run has let go of its folder: its loaders' workers, which hold it too, see that it is gone."""
RECIPE = "recipe.yaml"
# What a run leaves before its first step.
OURS = (RECIPE, fingerprints.FILE)
# What makes a folder a model to `from_pretrained`, by kind of model: moved in last of all.
MODEL_FILES = ("config.json", "adapter_config.json", "modules.json")
STATE = "trainer_state.json"
"""The file that Trainer writes last of all into a checkpoint."""
# What may differ between two calls of one run: where it lies, what it promises, who hears of it.
FREE = ("output_dir", "expect", "training.report_to", "training.run_name")
# And what may differ where an unfinished one goes on: an evaluation that did not fit takes fewer rows at a time.
FREE_UNFINISHED = (*FREE, "training.per_device_eval_batch_size")


@dataclass(frozen=True)
class RunDir:
    """The folder of a run and the reason for it.

    An unfinished run of the same recipe in it resumes from `checkpoint`; `finished` says that it holds the results,
    `pending` that its training has ended and its report is to be written.
    `named` says that no other folder will do, because the user named it; `shared` that all hosts of the run see it.
    """

    path: Path
    reason: str
    named: bool
    checkpoint: Path | None = None
    finished: bool = False
    pending: bool = False
    shared: bool = True

    @classmethod
    def choose(cls, resolved: ResolvedRecipe, *, fresh: bool = False) -> RunDir:
        """The folder for a run of a recipe: that of the same recipe's run where there is one, else one not used yet.

        By default that is `runs/NAME`, with a number behind where a run of another recipe lies there. `fresh` never
        resumes a run. Raises UserError for a folder that the user named and that holds anything else, and for an
        unfinished run of a recipe that has changed since.
        """
        named = resolved.recipe.output_dir
        first = Path(named).expanduser() if named is not None else RUNS / resolved.name
        used = [path for path in (numbered(first) if named is None else [first]) if _used(path)]
        if fresh:
            reason = f"--fresh: beside {first}" if used else "--fresh"
            return cls(next_free(first) if used else first, reason, named is not None)
        for path in reversed(used):
            differs = differences(path, resolved)
            if differs == [] and (path / RESULTS).exists():
                differs = fingerprints.changed_files(path, resolved.recipe.data)
            if differs == []:
                return cls._same(path, named is not None)
            unfinished = differs is not None and not (path / RESULTS).exists()
            if unfinished or (named is not None and differs):
                raise UserError(_changed(path, differs or []))
        if named is not None and used:
            way_on = f"output_dir={next_free(first)}"
            raise UserError(
                f"output_dir {first} is in use already, and a run never writes over another; next: {way_on}"
            )
        if used:
            return cls(next_free(first), f"{first} holds another run, which stays as it is", named=False)
        reason = "output_dir in the recipe" if named else "the default: runs/ and the recipe's name"
        return cls(first, reason, bool(named))

    @classmethod
    def _same(cls, path: Path, named: bool) -> RunDir:
        """Return the folder of a run of the same recipe: finished, to be resumed, or killed before a checkpoint."""
        if (path / RESULTS).exists():
            return cls(path, "this recipe's finished run", named, finished=True)
        if (path / PENDING).exists():
            return cls(path, "this recipe's run has ended, and its report is to be written", True, pending=True)
        whole, torn_ones = checkpoints(path), _torn_since(path)
        because = f": {torn_ones}" if torn_ones else ""
        if whole:
            return cls(path, f"this recipe's run goes on from {whole[-1].name}{because}", named, whole[-1])
        return cls(path, f"this recipe's run left no checkpoint there and begins again{because}", True)

    def refuse_other_rows(self, splits: fingerprints.Splits) -> None:
        """Raise UserError where the run to resume was on other rows than `splits`."""
        others = fingerprints.differences(self.path, splits) if self.checkpoint is not None or self.pending else []
        if others:
            raise UserError(
                f"{self.path} holds an unfinished run on other rows: {', '.join(others)}; next: the rows as they were,"
                f" or --fresh, which trains beside it in {next_free(self.path)}"
            )

    @contextmanager
    def lock(self) -> Iterator[RunDir]:
        """Make the folder, with its hidden one for files in the making, and lock it while the context lasts.

        The context gives the folder that was locked: where another run has taken the default in between, the next free
        one. Raises UserError where that run has taken a folder that no other will do for, and where the folder cannot
        be made.
        """
        path = self.path
        with ExitStack() as held:
            while True:
                try:
                    path.mkdir(parents=True, exist_ok=True)
                    locked = _lock(path, held, patience=FREED if World.here().restarts else 0.0)
                    if locked and (self.named or self.checkpoint or not _used(path)):
                        taken = dataclasses.replace(self, path=path)
                        taken._refuse_changed()
                        sweep(path)
                        shutil.rmtree(taken.staging, ignore_errors=True)  # of a run that was killed
                        taken.staging.mkdir()
                        break
                except OSError as error:
                    raise UserError(
                        f"output_dir {path}: cannot be made: {error.strerror}; next: output_dir=~/{path.name}"
                    ) from error
                held.close()
                if self.named or self.checkpoint:
                    raise UserError(_going_on(path))
                path = next_free(path)
            yield taken

    def refuse_held(self) -> None:
        """Raise UserError where a run is going on in the folder: sooner than `lock`, before rows and model are read."""
        if (self.named or self.checkpoint) and self.path.is_dir() and not World.here().restarts:
            with ExitStack() as held:
                if not _lock(self.path, held):
                    raise UserError(_going_on(self.path))

    def _refuse_changed(self) -> None:
        """Raise UserError where another run has written into the folder since it was chosen."""
        last = next(reversed(checkpoints(self.path)), None)
        further = last != self.checkpoint and not self.pending  # whose report needs no checkpoint
        if further or (self.path / RESULTS).exists() or (self.path / PENDING).exists() != self.pending:
            raise UserError(f"{self.path}: another run has written into it meanwhile; next: the same command again")

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes into the folder."""
        world = World.here()
        return world.main if self.shared else world.local_main

    @property
    def staging(self) -> Path:
        """The hidden folder inside the run's own, for files that are moved out once they are whole."""
        return self.path / STAGING

    def publish(self) -> None:
        """Move every file of the staging folder into the run's own, the configuration last, since it makes a model."""
        for file in sorted(self.staging.iterdir(), key=lambda path: (path.name in MODEL_FILES, path.name)):
            replace_file(file, self.path / file.name)
        self.staging.rmdir()

    def holds_model(self) -> bool:
        """Whether a trained model was published into the folder."""
        return any((self.path / name).is_file() for name in MODEL_FILES)

    def results(self) -> dict[str, Any]:
        """Return the results.json of a finished run."""
        results: dict[str, Any] = json.loads((self.path / RESULTS).read_text(encoding="utf-8"))
        return results

    def clean(self) -> list[Path]:
        """Remove what a stopped run left half-written, and an empty folder; return the whole checkpoints."""
        sweep(self.path)
        whole = checkpoints(self.path)
        for path in self.path.glob("checkpoint-*"):
            if path not in whole:
                shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(self.staging, ignore_errors=True)
        if self.path.is_dir() and {path.name for path in self.path.iterdir()} <= {*OURS}:
            for name in OURS:
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()
        return whole


def store(output: Path, resolved: ResolvedRecipe) -> Path:
    """Write a run's recipe, command-line words included, as a recipe that runs by itself; return its path."""
    head = f"# The recipe of this run, as it was given: {resolved.command('finetune')}\n"
    text = yaml.safe_dump(stored_values(resolved), sort_keys=False, allow_unicode=True, width=120)
    return write_atomic(output / RECIPE, head + text)


def stored_values(resolved: ResolvedRecipe) -> dict[str, Any]:
    """Return every key of a recipe that is not at its default, with absolute paths."""
    values: dict[str, Any] = plain(resolved.recipe.model_dump(exclude_none=True, exclude_defaults=True))
    values.pop("output_dir", None)
    map_paths(values, lambda name: Path(name).expanduser().resolve())
    return values


def differences(output: Path, resolved: ResolvedRecipe, *, moved: bool = False) -> list[str] | None:
    """Return how a recipe differs from the run in `output`, as `seed 1 → 2`; None where no recipe can be read there.

    Of a folder that may have `moved` between hosts, absolute paths count by their last part.
    """

    def named(value: Any) -> Any:
        return Path(value).name if moved and isinstance(value, str) and Path(value).is_absolute() else value

    try:
        values = read_yaml(output / RECIPE).values
        if isinstance(training := values.get("training"), dict):
            values["training"] = training_section.installed(training)  # of a run with another transformers
    except UserError:
        return None
    free = FREE if (output / RESULTS).exists() else FREE_UNFINISHED
    before, now = ({key: named(value) for key, value in _flat(each)} for each in (values, stored_values(resolved)))
    return [
        f"{key} {_shown(before.get(key))} → {_shown(now.get(key))}"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key) and not key.startswith(free)
    ]


def checkpoints(output: Path) -> list[Path]:
    """Return the whole checkpoints below `output`, oldest first."""
    return [path for path in _every_checkpoint(output) if torn(path, STATE) is None]


def numbered(path: Path) -> list[Path]:
    """Yield the folder itself, NAME-2, NAME-3, … as long as they exist."""
    there = [path]
    while (following := path.with_name(f"{path.name}-{len(there) + 1}")).exists():
        there.append(following)
    return there


def next_free(path: Path) -> Path:
    """Return the first of NAME-2, NAME-3, … that does not exist."""
    return path.with_name(f"{path.name}-{len(numbered(path)) + 1}")


def _every_checkpoint(output: Path) -> list[Path]:
    """Return Trainer's checkpoint folders, oldest first."""
    folders = [path for path in output.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    return sorted(folders, key=lambda path: int(path.name.rpartition("-")[2]))


def _torn_since(output: Path) -> str:
    """Return a clause about torn checkpoints newer than every whole one, or an empty string."""
    clauses = []
    for path in reversed(_every_checkpoint(output)):
        wrong = torn(path, STATE)
        if wrong is None:
            break
        clauses.append(f"{path.name} is torn ({wrong})")
    return "; ".join(clauses)


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return each plain value under its dotted key."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value)


def _lock(path: Path, held: ExitStack, patience: float = 0.0) -> bool:
    """Lock the folder until `held` is closed or the process ends, however it ends; False where another one has it.

    A held one is asked for again for `patience` seconds. Where the file system has no locks, as exFAT on macOS, a
    hidden folder with the number of this process is the lock.
    """
    descriptor = os.open(path, os.O_RDONLY)
    held.callback(os.close, descriptor)
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.1)
            continue
        except OSError:
            sweep(path)
            if any(path.glob(".run.locked-*")):
                return False
            held.enter_context(locked(path))
        return True


def _going_on(path: Path) -> str:
    return f"output_dir {path}: a run is going on in it; next: --fresh, which trains beside it in {next_free(path)}"


def _used(path: Path) -> bool:
    """Whether a folder holds anything but hidden files: those of a run that was killed as it began, and Finder's."""
    return path.exists() and (not path.is_dir() or any(inside.name[0] != "." for inside in path.iterdir()))


def _changed(path: Path, differs: list[str]) -> str:
    shown = ", ".join(differs[:4]) + (f", … {len(differs)} in all" if len(differs) > 4 else "")
    state = "a finished" if (path / RESULTS).exists() else "an unfinished"
    way_on = f"the recipe as it was, or --fresh, which trains beside it in {next_free(path)}"
    return f"{path} holds {state} run of a recipe that has changed since: {shown}; next: {way_on}"
