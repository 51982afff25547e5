"""Trainings that are killed and go on, each in a process forked from this one, which has imported all that is slow.

    python -m tests.resume.worker FOLDER    reads FOLDER/plan.json, writes FOLDER/NAME.pt for each scenario

The parent never uses the device: what is forked after that could not use it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401  slow, and needed by every child
import torch
import transformers.modeling_utils
import transformers.trainer  # noqa: F401
from transformers import BertForSequenceClassification, default_data_collator  # noqa: F401  the same

from hf_mps.layer import guards
from tests.resume.killing import Killer
from tests.resume.trainings import with_accelerator, with_trainer

LOOPS = {"trainer": with_trainer, "accelerator": with_accelerator}
Scenario = dict[str, Any]


def main(folder: Path) -> None:
    """Run every scenario of the plan."""
    for name, scenario in json.loads((folder / "plan.json").read_text()).items():
        (folder / f"{name}.status").write_text(str(run(folder, name, scenario)))


def run(folder: Path, name: str, scenario: Scenario) -> int:
    """A scenario's training, its kills one after the other, then to the end: the exit code of the last part."""
    place = folder / name
    found: list[list[str]] = []
    for kind, number in scenario["kills"]:
        status = forked(lambda: train(scenario, place, (kind, number)))  # noqa: B023  it has ended before the next
        assert os.WIFSIGNALED(status), f"{name}: not killed at {kind} {number}"
        assert os.WTERMSIG(status) == signal.SIGKILL
        found.append(files(place))
    return os.waitstatus_to_exitcode(forked(lambda: finish(scenario, place, folder / f"{name}.pt", found)))


def train(scenario: Scenario, place: Path, at: tuple[str, int]) -> Any:
    """Train until it ends, or until the moment `at`."""
    killer = Killer(at)
    killer.watch_writes()
    with guards.suspended(*scenario["without"]) if scenario["without"] else nullcontext():
        return LOOPS[scenario["loop"]](place, killer)


def finish(scenario: Scenario, place: Path, result: Path, found: list[list[str]]) -> None:
    """Train to the end, and keep how that was."""
    ended = train(scenario, place, ("never", 0))
    said = list(guards.get("torn-checkpoint").lines)
    torch.save({**ended, "found": found, "left": files(place), "said": said}, result)


def files(place: Path) -> list[str]:
    """Everything below a run's folder."""
    return sorted(path.relative_to(place).as_posix() for path in place.rglob("*"))


def forked(work: Callable[[], Any]) -> int:
    """The wait status of a child that did `work`."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
