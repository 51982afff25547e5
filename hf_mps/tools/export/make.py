"""A saved model, written for others: exported, or sent to the hub with its card by huggingface_hub.

An export refuses first, then come the files in a hidden folder, the comparison, the record, the name. A killed export
leaves its hidden folder, which the next one beside it removes, and nothing under the name it was given.
"""

from __future__ import annotations

import fnmatch
import json
import platform
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from hf_mps.core import status
from hf_mps.core.checkpoint_files import staged
from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError, nearest, neighbour, user_path
from hf_mps.core.files import refuse_unwritable, write_json
from hf_mps.core.text import MIB, aligned, counted, duration, first_line, memory, summary
from hf_mps.finetune import tasks
from hf_mps.finetune.models.checkpoint import TOKENIZER, VOCABULARY
from hf_mps.finetune.report import screen
from hf_mps.finetune.report.results import is_hub_id, versions
from hf_mps.finetune.run import failures
from hf_mps.finetune.run.logging import no_bars
from hf_mps.tools.export import base
from hf_mps.tools.export.base import Comparison, Format, Job, Options, tensors
from hf_mps.tools.export.merged import Merged
from hf_mps.tools.export.runtimes import GGUF, MLX, ONNX, CoreML
from hf_mps.tools.saved.run import ADAPTER, Adapter, open_run

RECORD = "hf-mps-export.json"
SCHEMA = 1
FORMATS: dict[str, Format] = {kind.name: kind() for kind in (Merged, GGUF, MLX, CoreML, ONNX)}


def named(name: str) -> Format:
    """Return the format of that name. Raises UserError for one that is not known."""
    if name not in FORMATS:
        raise UserError(f"'{name}' is not a format; allowed: {', '.join(FORMATS)}{nearest(name, FORMATS)}")
    return FORMATS[name]


def refuse_task(form: Format, task: str, where: str) -> None:
    """Raise UserError where the format does not hold the model of `task`, which is saved at `where`."""
    shape = tasks.find(task).shape
    if shape not in form.shapes:
        held = ", ".join(kind.name for kind in tasks.every() if kind.shape in form.shapes)
        holding = [other.name for other in FORMATS.values() if shape in other.shapes]
        others = "".join(f", or {other}" for other in holding[1:])
        saved = shlex.quote(where)
        instead = f"hf-mps export {holding[0]} {saved} OUT{others}" if holding else f"hf-mps push {saved} OWNER/NAME"
        problem = f"{where} is a model for {task}, which export {form.name} cannot hold"
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


CARD = "README.md"
LOGIN = "hf auth login"
OF_TEXT = ("encoder", "decoder", "seq2seq", "choices")
"""The shapes of models that nobody can use without their tokenizer."""
# Of a checkpoint that is pushed itself: what only training reads, a pickle among it.
STATES = ("optimizer*", "scheduler.pt", "scaler.pt", "rng_state*", "trainer_state.json", "training_args.bin")
LEFT_OUT = {
    "checkpoint-*": "checkpoints hold the optimizer's state",
    "recipe.yaml": "it holds paths of this machine; the card has the recipe",
    **dict.fromkeys(STATES, "the trainer's state, which no model is loaded with"),
    ".*": "hidden",
}
"""Patterns of names, of files and of folders, that stay on this machine, and why."""


@dataclass
class Upload:
    """The files of a folder that are sent, by their paths in it, with their bytes; and those that are not, and why."""

    files: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, tuple[int, str]] = field(default_factory=dict)


def push(where: str, name: str, *, private: bool = False, dry_run: bool = False) -> None:
    """Send what is saved at `where` to the hub's repository `name`, made if it is not there, and print what went.

    Without a token, or with `dry_run`, it only prints the files with their sizes and the command that sends them.
    Raises UserError for a folder without a model and a name that the hub does not take, RunError where it refuses.
    """
    folder = _folder(where)
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        problem = f"{name}: the hub does not accept this name: {first_line(error).rstrip('.')}"
        raise UserError(f"{problem}; allowed: OWNER/NAME") from error
    upload, token = chosen(folder), get_token()
    _list(folder, upload, name)
    if token is None or dry_run:
        command = f"hf-mps push {shlex.quote(where)} {name}{' --private' * private}"
        print(f"nothing was sent: {'--dry-run' if dry_run else 'no token is stored'}")
        print(f"next  {'' if token else f'{LOGIN}, then '}{command}")
        return
    with status.shown(f"sending {where} to {name} …"), no_bars():
        url = _send(folder, upload, name, private)
    print(f"sent      {url}")


def chosen(folder: Path) -> Upload:
    """Return which files of `folder` are sent. A folder that is not sent is one entry."""
    upload = Upload()
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        parts = path.relative_to(folder).parts
        for depth, part in enumerate(parts):
            pattern = next((pattern for pattern in LEFT_OUT if fnmatch.fnmatch(part, pattern)), None)
            if pattern is not None:
                stays = "/".join(parts[: depth + 1]) + ("/" if depth < len(parts) - 1 else "")
                size, _ = upload.left_out.get(stays, (0, ""))
                upload.left_out[stays] = (size + path.stat().st_size, LEFT_OUT[pattern])
                break
        else:
            upload.files["/".join(parts)] = path.stat().st_size
    return upload


def _folder(where: str) -> Path:
    """Return the folder to push. Raises UserError for a missing folder, and for one without a whole model."""
    folder = user_path(where)
    if not folder.is_dir():
        raise UserError(f"{where}: there is no such folder{neighbour(folder)}; allowed: a run's folder, or an export's")
    if not (folder / RECORD).is_file():
        saved = open_run(where)
        for file in sorted(folder.glob("*.safetensors")):
            tensors(file)
        # An adapter's tokenizer may be its base's.
        needs_one = saved.task_class.shape in OF_TEXT and not isinstance(saved.checkpoint, Adapter)
        names = [path.name for path in folder.iterdir()]
        # ByT5 has no vocabulary, and a tokenizer all the same.
        if needs_one and TOKENIZER not in names and not any(map(VOCABULARY.fullmatch, names)):
            raise saved.checkpoint._without_vocabulary()
    return folder


def _send(folder: Path, upload: Upload, name: str, private: bool) -> str:
    """Make the repository where it is not there, and send the files in one commit; return its address."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # The errors of whichever HTTP library this release of huggingface_hub goes by.
    unreachable: Any = (*HfHubHTTPError.__bases__, OSError)
    api = HfApi()
    try:
        repository = api.create_repo(name, private=private or None, exist_ok=True)
        added = [CommitOperationAdd(file, content(folder / file)) for file in upload.files]
        message = f"Upload {folder.resolve().name} with hf_mps"
        sent: Any = api.create_commit(repository.repo_id, added, commit_message=message)
    except OfflineModeIsEnabled as error:
        raise UserError("HF_HUB_OFFLINE forbids a push; next: unset HF_HUB_OFFLINE") from error
    except HfHubHTTPError as error:
        code = error.response.status_code if error.response is not None else None
        way_on = f"; next: {LOGIN}, with a token that may write" if code in (401, 403) else ""
        raise RunError(f"the hub refuses {name}: {first_line(error)}{way_on}") from error
    except unreachable as error:
        raise RunError(f"the hub cannot be reached: {first_line(error)}; next: the same command again") from error
    return str(sent.commit_url)


def content(file: Path) -> Path | bytes:
    """Return what goes to the hub of a file: the file, or an adapter's settings without the path of a local base model.

    Here peft finds the model by that path; elsewhere its last part says which one it was.
    """
    if file.name != ADAPTER:
        return file
    stored = json.loads(file.read_text(encoding="utf-8"))
    origin = str(stored.get("base_model_name_or_path") or "")
    if is_hub_id(origin):
        return file
    return json.dumps(stored | {"base_model_name_or_path": Path(origin).name}, indent=2).encode()


def _list(folder: Path, upload: Upload, name: str) -> None:
    total = told(sum(upload.files.values()))
    print(f"hf_mps push {folder} to {name}: {counted(len(upload.files), 'file')}, {total}")
    rows = [(file, told(size), "") for file, size in upload.files.items()]
    rows += [(file, told(size), f"not sent: {why}") for file, (size, why) in upload.left_out.items()]
    print(*(f"  {line}" for line in aligned(rows, right=(1,))), sep="\n")
    if CARD not in upload.files:
        print(f"  there is no {CARD}, so the hub will show no card; a run's folder has one")
