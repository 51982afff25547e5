"""`hf-mps audit -- python train.py …`: a script as it is, stopped after its first optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError

if TYPE_CHECKING:
    from pathlib import Path

    from hf_mps.dryrun.audit.report import Audit


class _Stepped(BaseException):
    """The first optimizer step is taken. No Exception: scripts that catch those are not to catch it."""


def is_command(words: Sequence[str]) -> bool:
    """Whether some words begin as a script's command line does: python, a .py file, -m, a launcher."""
    first = words[0].rpartition("/")[2] if words else ""
    return first.startswith(("python", "-m", "torchrun", "accelerate")) or first.endswith(".py")


def audit(words: Sequence[str], torch_table: Path | None = None) -> Audit:
    """Run the script of the command line `words` until its first optimizer step; what it called on the device.

    What came before the step (moving the model, an evaluation) counts as well. The script's own files and words stay
    what they are. Raises UserError for a command that names no script, RunError where it ends without a step.
    """
    from hf_mps.dryrun import metal

    device = metal.present()  # before anything else imports torch
    from hf_mps.dryrun import audit as room
    from hf_mps.dryrun.audit.record import Record
    from hf_mps.dryrun.modules import Places
    from hf_mps.operators.support import OperatorSupport

    release = OperatorSupport(torch_table)
    where = Places()
    record = Record(where)
    _run(words, where, record)
    facts = {
        "device": device,
        "tensors": Choice("real", "the script's own, from its start to the end of its first optimizer step"),
    }
    return room.result(" ".join(words), record, release, facts)


def _run(words: Sequence[str], where: Any, record: Any) -> None:
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    from hf_mps.activation import run
    from hf_mps.dryrun.modules import BETWEEN, OPTIMIZER

    found = run._prepare(list(words))

    def before(*_: Any) -> None:
        where.phase = OPTIMIZER

    def after(*_: Any) -> None:
        where.phase = BETWEEN
        raise _Stepped

    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        with where, record:
            (run._module if found.module else run._script)(found)
    except _Stepped:
        return
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        words_ = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RunError(f"the script ended before its first optimizer step: {words_}") from error
    finally:
        for hook in hooks:
            hook.remove()
    raise RunError("the script ended and took no optimizer step; next: a command that trains")
