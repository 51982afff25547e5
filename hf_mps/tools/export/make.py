"""Exports a saved model: refusals first, then the files in a hidden folder, the comparison, the record, the name.

A killed export leaves its hidden folder, which the next one beside it removes, and nothing under the name it was given.
"""

from __future__ import annotations

import platform
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from hf_mps.core import status
from hf_mps.core.checkpoint_files import staged
from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError, nearest, user_path
from hf_mps.core.files import refuse_unwritable, write_json
from hf_mps.core.text import MIB, duration, memory, summary
from hf_mps.finetune import tasks
from hf_mps.finetune.report import screen
from hf_mps.finetune.report.results import versions
from hf_mps.finetune.run import failures
from hf_mps.finetune.run.logging import no_bars
from hf_mps.tools.export import base
from hf_mps.tools.export.base import Comparison, Format, Job, Options
from hf_mps.tools.export.merged import Merged
from hf_mps.tools.export.runtimes import GGUF, MLX, ONNX, CoreML
from hf_mps.tools.saved.run import open_run

RECORD = "hf-mps-export.json"
SCHEMA = 1
FORMATS: dict[str, Format] = {kind.name: kind() for kind in (Merged, GGUF, MLX, CoreML, ONNX)}


def named(name: str) -> Format:
    """Return the format of that name. Raises UserError for one that is not known."""
    if name not in FORMATS:
        raise UserError(f"'{name}' is not a format; allowed: {', '.join(FORMATS)}{nearest(name, FORMATS)}")
    return FORMATS[name]


def refuse_task(form: Format, task: str, who: str) -> None:
    """Raise UserError where the format does not hold the model of `task`; `who` names that model."""
    shape = tasks.find(task).shape
    if shape not in form.shapes:
        held = ", ".join(kind.name for kind in tasks.every() if kind.shape in form.shapes)
        holding = [other.name for other in FORMATS.values() if shape in other.shapes]
        others = "".join(f", or {other}" for other in holding[1:])
        instead = f"hf-mps export {holding[0]} RUN OUT{others}" if holding else "hf-mps push RUN OWNER/NAME"
        problem = f"{who} is a model for {task}, which export {form.name} cannot hold"
        raise UserError(f"{problem}; allowed: {held}; next: {instead}")


def export(name: str, where: str, out: str, weights: str | None = None, options: Options | None = None) -> Path:
    """Write the model saved at `where` as the format `name` into the new folder `out`, compare it, and print what came.

    Raises UserError for what cannot be exported so, and RunError for a failure or for logits that are too far from the
    model's; nothing is then at `out`.
    """
    form, options, target = named(name), options or Options(), user_path(out)
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists already, and an export overwrites nothing; give another OUT")
    if options.lengths is not None and form.name != "coreml":
        raise UserError(f"--lengths is for export coreml; leave it out of {form.name}")
    if options.converter is not None and form.name != "gguf":
        raise UserError(f"--converter is for export gguf; leave it out of {form.name}")
    refuse_unwritable(target, str(target))
    form.refuse_missing()
    kind = form.choose(weights)
    saved = open_run(where)
    refuse_task(form, saved.task.value, where)
    began = time.monotonic()
    with status.shown(f"loading {where} …"), no_bars():
        with base.silent():
            form.check(saved, options)
            dtype = base.precision(saved)
            model = base.load(saved, dtype.value)
            batches = base.samples(saved, model)
            reference = base.logits(model, batches)
            choices: dict[str, Choice[Any]] = {"task": saved.task, "weights": kind, "compared in": dtype}
            architecture = type(base.plain(model)).__name__
            job = Job(saved, kind.value, model, architecture, batches, reference, options, choices)
        status.now(f"writing {name} …")
        # The folder takes its name last, with the record in it: a killed export leaves none that looks whole.
        with _in_one_line(form, where), staged(target, RECORD) as stage:
            with base.silent():
                form.write(job, stage)
            # Its logits are here, and the export may need the room.
            job.model = None
            status.now("comparing its logits with the model's …")
            with base.silent():
                comparison = form.compare(job, stage)
            comparison.refuse(f"export {name} of {where}")
            seconds = time.monotonic() - began
            write_json(stage / RECORD, _record(form, job, comparison, target, seconds, stage))
    _say(form, job, comparison, target, seconds)
    return target


@contextmanager
def _in_one_line(form: Format, where: str) -> Iterator[None]:
    """Turn a failure of the machine, or of the format's library, into one line; --debug shows its traceback."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:
        library = " ".join(next(iter(_versions(form.packages[-1:]).items())))
        words = failures.describe(error) or f"{library} fails on it: {summary(error)}"
        raise RunError(f"export {form.name} of {where}: {words}; nothing was written") from error


def _record(
    form: Format, job: Job, comparison: Comparison, target: Path, seconds: float, stage: Path
) -> dict[str, Any]:
    """Return what is stored beside an export."""
    # It names no folder of this machine, since it is shared with the model.
    command = f"hf-mps export {form.name} {shlex.quote(job.name)} {shlex.quote(target.name)} --weights {job.weights}"
    if job.options.lengths is not None:
        command += f" --lengths {','.join(map(str, job.options.lengths))}"
    return {
        "schema": SCHEMA,
        "format": form.name,
        "model": job.name,
        "architecture": job.architecture,
        "command": command,
        "choices": job.choices,
        "comparison": comparison,
        "texts": [list(next(iter(batch.values())).shape) for batch in job.batches],
        "files": sizes(stage),
        "seconds": round(seconds, 1),
        "versions": versions() | _versions(form.packages),
    }


def _versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed: a model without an adapter needs no peft."""
    installed = {package.metadata["Name"]: package.version for package in metadata.distributions()}
    return {name: installed[name] for name in packages if name in installed}


def sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file below `folder` by its path in it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def told(size: int) -> str:
    """Return the size of files in words: `812 B`, `24.5 KiB`, `44 MiB`."""
    return memory(size) if size >= MIB else f"{size / 1024:.1f} KiB" if size >= 1024 else f"{size} B"


def _say(form: Format, job: Job, comparison: Comparison, target: Path, seconds: float) -> None:
    """Print what was decided, how far the export is from the model, and what it takes on the disk."""
    written = sizes(target)
    rows = [(name, choice.value, choice.reason) for name, choice in job.choices.items()]
    rows.append(("compared", comparison.opened_by, ""))
    screen.header(rows, title=f"hf_mps export {form.name} {job.saved.where}")
    print(*comparison.lines(), sep="\n")
    on = f"{platform.system()} on {platform.machine()}"
    print(f"written  {target}, {told(sum(written.values()))} in {len(written)} files, {duration(seconds)} ({on})")
