"""`push`: sends a run or an export with its card to the hub, by huggingface_hub."""

from __future__ import annotations

import fnmatch
import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_mps.core import status
from hf_mps.core.errors import RunError, UserError, neighbour, user_path
from hf_mps.core.text import aligned, counted, first_line
from hf_mps.finetune.models.checkpoint import TOKENIZER, VOCABULARY
from hf_mps.finetune.report.results import is_hub_id
from hf_mps.finetune.run.logging import no_bars
from hf_mps.tools.export.base import tensors
from hf_mps.tools.export.make import RECORD, told
from hf_mps.tools.saved.run import ADAPTER, Adapter, open_run

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
    _say(folder, upload, name)
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
    base = str(stored.get("base_model_name_or_path") or "")
    if is_hub_id(base):
        return file
    return json.dumps(stored | {"base_model_name_or_path": Path(base).name}, indent=2).encode()


def _say(folder: Path, upload: Upload, name: str) -> None:
    total = told(sum(upload.files.values()))
    print(f"hf_mps push {folder} to {name}: {counted(len(upload.files), 'file')}, {total}")
    rows = [(file, told(size), "") for file, size in upload.files.items()]
    rows += [(file, told(size), f"not sent: {why}") for file, (size, why) in upload.left_out.items()]
    print(*(f"  {line}" for line in aligned(rows, right=(1,))), sep="\n")
    if CARD not in upload.files:
        print(f"  there is no {CARD}, so the hub will show no card; a run's folder has one")
