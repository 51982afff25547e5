"""Runs on the CPU, where nothing of Metal is armed, each in a process of its own; one is killed at a step, and resumed.

Run as a program in a folder that `write` made, with the name of a recipe and a number of processes: it trains the
recipe unbroken into `whole`, and into `killed-STEP` with a SIGKILL behind each step that the arguments name.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.finetune import every_task

SETTINGS = {
    "per_device_train_batch_size": 4,
    "num_train_epochs": 2,
    "learning_rate": 0.01,
    "logging_steps": 2,
    "save_strategy": "steps",
    "save_steps": 3,
    "eval_strategy": "epoch",
    "data_seed": 3,
}


def write(folder: Path, name: str, dropout: float) -> None:
    """Write a recipe into `folder`, its rows and its model."""
    every_task.write(folder, (name,), dropout=dropout)


def started(words: list[str], kill: int | None, rank: int, world: int, port: int) -> int:
    """Fork a process that runs the recipe as one rank, killed behind step `kill`; return its number."""
    child = os.fork()
    if child:
        return child
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    code = 1
    try:
        code = _run(words, kill)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(words: list[str], kill: int | None) -> int:
    from hf_mps.cli.main import main
    from hf_mps.finetune.run import callbacks

    def killed(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    callbacks.OwnDraws.on_step_begin = killed  # behind the checkpoint of the step before
    return main(["finetune", *words])


def train(name: str, folder: str, world: int, kill: int | None = None) -> list[int]:
    """Train in `world` processes and return how each ended, as os.waitpid says it."""
    words = [f"{name}.yaml", f"output_dir={folder}", *(f"training.{key}={value}" for key, value in SETTINGS.items())]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [started(words, kill, rank, world, port) for rank in range(world)]
    return [os.waitpid(child, 0)[1] for child in children]


def main() -> int:
    """Train `name` in so many processes, unbroken and killed behind each of the steps; 1 where one did not end well."""
    name, world, *steps = sys.argv[1:]
    import matplotlib.pyplot  # noqa: F401
    import sklearn  # noqa: F401
    import transformers.trainer  # noqa: F401  stock, as a program may have imported it before

    from hf_mps.finetune import tasks
    from hf_mps.finetune.run import prepare  # noqa: F401

    tasks.module(every_task.RECIPES[name]["task"])

    ended = [train(name, "whole", int(world))]
    for step in steps:
        if 0 in train(name, f"killed-{step}", int(world), int(step)):
            return 1
        ended.append(train(name, f"killed-{step}", int(world)))
    return int(any(code for codes in ended for code in codes))


if __name__ == "__main__":
    sys.exit(main())
