"""Where a run writes: a folder of its own, never one that holds another run."""

from __future__ import annotations

import shutil
from pathlib import Path

from hf_mps.choice import Choice
from hf_mps.errors import UserError
from hf_mps.finetune.failures import checkpoints

RUNS = Path("runs")
STAGING = ".saving"


def choose(name: str, output_dir: str | None) -> Choice[Path]:
    """Return a folder that is not used yet: `output_dir`, or `runs/NAME` with a number behind where a run lies there.

    A folder that the user named and that holds anything is refused (UserError), because a run elsewhere than asked for
    would be a surprise; the default steps aside.
    """
    if output_dir is not None:
        path = Path(output_dir).expanduser()
        if _used(path):
            raise UserError(_in_use(path))
        return Choice(path, "output_dir in the recipe")
    path = RUNS / name
    if path.exists():
        return Choice(_beside(path), f"{path} holds another run, which stays as it is")
    return Choice(path, "the default: runs/ and the recipe's name")


def claim(choice: Choice[Path], *, named: bool) -> Choice[Path]:
    """Make the chosen folder, with the hidden one for files in the making, and return it.

    Another run may have taken it in between: the default steps aside, a folder that the user named is refused.
    Raises UserError for that, and where the folder cannot be made.
    """
    path = choice.value
    while True:
        try:
            path.mkdir(parents=True, exist_ok=named)
            staging(path).mkdir()  # the claim: of two runs at the same moment only one makes it
            return Choice(path, choice.reason)
        except FileExistsError:
            if named:
                raise UserError(_in_use(path)) from None
            path = _beside(path)
        except OSError as error:
            raise UserError(f"output_dir {path}: cannot be made: {error.strerror}") from error


def staging(output: Path) -> Path:
    """The hidden folder inside a run's own, for files that are moved out once they are whole."""
    return output / STAGING


def publish(output: Path) -> None:
    """Move every file of the staging folder into the run's own, `config.json` last: a model without it is no model."""
    staged = staging(output)
    for file in sorted(staged.iterdir(), key=lambda path: (path.name == "config.json", path.name)):
        file.replace(output / file.name)
    staged.rmdir()


def tidy(output: Path) -> list[Path]:
    """Remove what a stopped run left half-written, and the folder where nothing is left; return whole checkpoints."""
    whole = checkpoints(output)
    for path in output.glob("checkpoint-*"):
        if path not in whole:
            shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(staging(output), ignore_errors=True)
    if output.is_dir() and not any(output.iterdir()):
        output.rmdir()
    return whole


def _used(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def _in_use(path: Path) -> str:
    return f"output_dir {path} is in use already, and a run never writes over another; next: output_dir={_beside(path)}"


def _beside(path: Path) -> Path:
    """The first of NAME-2, NAME-3, … that is not there."""
    number = 2
    while (there := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return there
