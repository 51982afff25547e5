"""The run directory: a separate folder for each run, locked against a second process.

It holds the recipe and a digest of the rows from the start: they tell whether a later call asks for the same run.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hf_mps.core.checkpoint_files import locked, sweep, torn
from hf_mps.core.errors import UserError
from hf_mps.core.files import plain, replace_file, write_atomic, write_json
from hf_mps.distributed.world import World
from hf_mps.finetune.data import formats
from hf_mps.finetune.data.rows import MEDIA, Rows
from hf_mps.finetune.recipe import training_section
from hf_mps.finetune.recipe.overrides import read_yaml
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.recipe.schema import Data, map_paths
from hf_mps.finetune.run.failures import PENDING, RESULTS

DIGESTS = "data.json"
# Rows that are read at once, and bytes of a file.
BLOCK, CHUNK = 1000, 2**20

Splits = Mapping[str, Mapping[str, Any]]


def digest_rows(rows: Mapping[str, Rows]) -> dict[str, dict[str, Any]]:
    """Return the number of rows of each split, and a digest of their content in their order.

    Takes about a second for 200,000 rows of text; images and sound are read, not decoded. Of streamed rows it
    is the names, sizes and stamps of their files. Raises UserError for a file
    that cannot be read, with its row.
    """
    return {
        split: {"bytes": one.stream.bytes, "digest": one.stream.digest}
        if one.stream is not None
        else {"rows": len(one.dataset), "digest": _digest(one)}
        for split, one in rows.items()
    }


def _stored_digests(output: Path) -> dict[str, Any]:
    try:
        stored = json.loads((output / DIGESTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _files(data: Data) -> dict[str, str]:
    """Return the digest of each split's local files."""
    digests: dict[str, str] = {}
    for split, name in (data.files or {}).items() if not data.streaming else ():
        if paths := formats.found(Path(name).expanduser()):
            digest = _hash()
            for path in paths:
                with path.open("rb") as file:
                    while block := file.read(CHUNK):
                        digest.update(block)
            digests[split] = digest.hexdigest()
    return digests


def _digest(rows: Rows) -> str:
    digest, first = _hash(), 0
    media = [column for column in rows.dataset.column_names if column in MEDIA]

    def as_text(value: Any) -> str:  # bytes, dates and times
        return _hash(value).hexdigest() if isinstance(value, bytes) else str(value)

    def content(value: Any, index: int, role: str) -> Any:
        if value is None and role == "images":  # a conversation without any
            return []
        if isinstance(value, list):
            return [content(one, index, role) for one in value]
        return _hash(rows.content_of(value, index, role)).hexdigest()

    for block in rows.dataset.iter(BLOCK):
        # A batch of `iter` is a dict of columns.
        count = len(next(iter(block.values()), ()))
        for role in media:
            block[role] = [content(block[role][place], first + place, role) for place in range(count)]
        # Values and not Arrow's buffers, whose cuts and padding depend on how the rows were read.
        digest.update(json.dumps(block, sort_keys=True, default=as_text).encode())
        first += count
    return digest.hexdigest()


def _hash(content: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=16)


RUNS = Path("runs")
STAGING = ".saving"
GOING_ON = "output_dir {}: a run is going on in it; next: --fresh, which trains beside it in {}"
FREED = 15.0
"""Seconds until a killed run has let go of its folder: its loaders' workers, which hold it too, see that it is gone."""
RECIPE = "recipe.yaml"
# What a run leaves before its first step.
OURS = (RECIPE, DIGESTS)
# What makes a folder a model to `from_pretrained`, by kind of model: moved in last of all.
MODEL_FILES = ("config.json", "adapter_config.json", "modules.json", "model_index.json")
STATE = "trainer_state.json"
"""The file that Trainer writes last of all into a checkpoint."""
# What may differ between two calls of one run: its folder, its expectation, its trackers, what it shows.
FREE = ("output_dir", "expect", "training.report_to", "training.run_name", "examples")
# An unfinished run may also change this: an evaluation that ran out of memory is repeated with fewer rows at a time.
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
    def choose(cls, resolved: ResolvedRecipe, *, fresh: bool = False, way_on: str = "") -> RunDir:
        """Return the folder for a run of a recipe: that of the same recipe's earlier run, or else one not used yet.

        By default that is `runs/NAME`, with a number behind where another recipe's run is there. `fresh` never
        resumes a run. Raises UserError for a folder that the user named and that holds anything else, and for an
        unfinished run of a recipe that has changed since; what to do next is `way_on`, or what suits a single run.
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
                # Only local files are compared: to compare rows of the hub would take as long as loading them.
                stored = _stored_digests(path).get("files", {})
                now = _files(resolved.recipe.data) if stored else {}
                other = [split for split in stored if now.get(split) != stored[split]]
                differs = [f"data.files.{split} has other content" for split in other]
            if differs == []:
                return cls._same(path, named is not None)
            unfinished = not (path / RESULTS).exists()
            if differs is not None and (unfinished or (named is not None and differs)):
                listed = ", ".join(differs[:4]) + (f", … {len(differs)} in all" if len(differs) > 4 else "")
                told = f"{path} holds {'an unfinished' if unfinished else 'a finished'} run of a recipe"
                alone = f"the recipe as it was, or --fresh, which trains beside it in {next_free(path)}"
                raise UserError(f"{told} that has changed since: {listed}; next: {way_on or alone}")
        if named is not None and used:
            told = f"output_dir {first} is in use already, and a run never writes over another"
            raise UserError(f"{told}; next: {way_on or f'output_dir={next_free(first)}'}")
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
        every = _every_checkpoint(path)
        whole = next((one for one, wrong in reversed(every) if wrong is None), None)
        newer = itertools.takewhile(lambda pair: pair[1] is not None, reversed(every))
        clauses = "; ".join(f"{one.name} is torn ({wrong})" for one, wrong in newer)
        because = f": {clauses}" if clauses else ""
        if whole is not None:
            return cls(path, f"this recipe's run goes on from {whole.name}{because}", named, whole)
        return cls(path, f"this recipe's run left no checkpoint and begins again{because}", True)

    def refuse_other_rows(self, splits: Splits) -> None:
        """Raise UserError where the run to resume was on other rows than `splits`, with those that differ.

        A run of a release that stored no digests matches any rows.
        """
        resumes = self.checkpoint is not None or self.pending
        before, others = _stored_digests(self.path).get("splits", {}) if resumes else {}, []
        for split in dict.fromkeys((*before, *splits)) if before else ():
            then, now = before.get(split), splits.get(split)
            if then == now:
                continue
            counts = [f"{one['rows']:,}" if one and "rows" in one else "no" for one in (then, now)]
            how = f"{counts[0]} rows then, {counts[1]} now" if counts[0] != counts[1] else "other content"
            if any("bytes" in one for one in (then, now) if one is not None):
                how = "other files"
            others.append(f"{split} ({how})")
        if others:
            way_on = f"next: the rows as they were, or --fresh, which trains beside it in {next_free(self.path)}"
            raise UserError(f"{self.path} holds an unfinished run on other rows: {', '.join(others)}; {way_on}")

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
                        sweep(path)  # half-written files of a killed run
                        shutil.rmtree(taken.staging, ignore_errors=True)  # of a run that was killed
                        taken.staging.mkdir()
                        break
                except OSError as error:
                    raise _unmakable(path, error) from error
                held.close()  # another run took the folder between the choice and the lock
                if self.named or self.checkpoint:
                    raise UserError(GOING_ON.format(path, next_free(path)))
                path = next_free(path)
            yield taken

    def refuse_held(self) -> None:
        """Raise UserError where a run is going on in the folder, or where it cannot be made: sooner than `lock`, before
        rows and model are read.
        """
        above = next(folder for folder in (self.path, *self.path.parents) if folder.exists())
        try:
            with tempfile.TemporaryDirectory(dir=above, prefix=".hf-mps-"):  # os.access says yes of /proc
                pass
        except OSError as error:
            raise _unmakable(self.path, error) from error
        if (self.named or self.checkpoint) and self.path.is_dir() and not World.here().restarts:
            with ExitStack() as held:
                if not _lock(self.path, held):
                    raise UserError(GOING_ON.format(self.path, next_free(self.path)))

    def _refuse_changed(self) -> None:
        """Raise UserError where another run has written into the folder since it was chosen."""
        last = next(reversed(checkpoints(self.path)), None)
        further = last != self.checkpoint and not self.pending  # whose report needs no checkpoint
        if further or (self.path / RESULTS).exists() or (self.path / PENDING).exists() != self.pending:
            raise UserError(f"{self.path}: another run has written into it meanwhile; next: the same command again")

    @property
    def writes(self) -> bool:
        """Return whether this process is the one that writes into the folder."""
        world = World.here()
        return world.main if self.shared else world.local_main

    @property
    def staging(self) -> Path:
        """Return the hidden folder inside the run's own, for files that are moved out once they are whole."""
        return self.path / STAGING

    def publish(self) -> None:
        """Move every file of the staging folder into the run's own, the configuration last, since it makes a model."""
        for file in sorted(self.staging.iterdir(), key=lambda path: (path.name in MODEL_FILES, path.name)):
            replace_file(file, self.path / file.name)
        self.staging.rmdir()

    def holds_model(self) -> bool:
        """Return whether a trained model was published into the folder."""
        return any((self.path / name).is_file() for name in MODEL_FILES)

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


def store(output: Path, resolved: ResolvedRecipe, splits: Splits) -> None:
    """Write into a run's folder what a later call knows it by: the recipe, and digests of its rows and local files.

    The recipe has the command line's words and runs by itself; `splits` are those of `digest_rows`.
    """
    head = f"# The recipe of this run, as it was given: {resolved.command('finetune')}\n"
    text = yaml.safe_dump(stored_values(resolved), sort_keys=False, allow_unicode=True, width=120)
    write_atomic(output / RECIPE, head + text)
    write_json(output / DIGESTS, {"splits": splits, "files": _files(resolved.recipe.data)})


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
        f"{key} {before.get(key, 'not given')} → {now.get(key, 'not given')}"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key) and not key.startswith(free)
    ]


def checkpoints(output: Path) -> list[Path]:
    """Return the whole checkpoints below `output`, oldest first."""
    return [path for path, wrong in _every_checkpoint(output) if wrong is None]


def numbered(path: Path) -> list[Path]:
    """Return the folder itself, NAME-2, NAME-3, … as long as they exist."""
    there = [path]
    while (following := path.with_name(f"{path.name}-{len(there) + 1}")).exists():
        there.append(following)
    return there


def next_free(path: Path) -> Path:
    """Return the first of NAME-2, NAME-3, … that does not exist."""
    return path.with_name(f"{path.name}-{len(numbered(path)) + 1}")


def _every_checkpoint(output: Path) -> list[tuple[Path, str | None]]:
    """Return Trainer's checkpoint folders, oldest first, each with what is torn in it."""
    folders = [path for path in output.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    return [(path, torn(path, STATE)) for path in sorted(folders, key=lambda path: int(path.name.rpartition("-")[2]))]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return each plain value under its dotted key."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _lock(path: Path, held: ExitStack, patience: float = 0.0) -> bool:
    """Lock the folder until `held` is closed or the process ends, however it ends; False where another one has it.

    A held one is asked for again for `patience` seconds.
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
            # A file system without locks, as exFAT on macOS: a hidden folder with this process's number is the lock.
            sweep(path)
            if any(path.glob(".run.locked-*")):
                return False
            held.enter_context(locked(path))
        return True


def _used(path: Path) -> bool:
    """Return whether a folder holds anything but hidden files: of a run that was killed as it began, or of Finder."""
    return path.exists() and (not path.is_dir() or any(inside.name[0] != "." for inside in path.iterdir()))


def _unmakable(path: Path, error: OSError) -> UserError:
    return UserError(f"output_dir {path}: cannot be made: {error.strerror}; next: output_dir=~/{path.name}")
