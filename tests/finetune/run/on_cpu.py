"""Runs on the CPU, where nothing of Metal is armed, each in a process of its own; one is killed at a step, and resumed.

Run as a program in a folder that `write` made, with the name of a recipe and a number of processes: it trains the
recipe unbroken into `whole`, and into `stopped-WHERE` for each place that the other arguments name: 4 is a SIGKILL
before the step behind step 4, 7-SIGTERM that signal in the evaluation at step 7.
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
    "save_steps": 1,
    "eval_strategy": "epoch",
    "data_seed": 3,
}


def write(folder: Path, name: str, dropout: float) -> None:
    """Write a recipe into `folder`, its rows and its model."""
    every_task.write(folder, (name,), dropout=dropout)


def started(words: list[str], where: str, rank: int, world: int, port: int) -> int:
    """Fork a process that runs the recipe as one rank, stopped there; return its number."""
    child = os.fork()
    if child:
        return child
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    code = 1
    try:
        code = _run(words, where)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(words: list[str], where: str) -> int:
    from hf_mps.cli.main import main
    from hf_mps.finetune.run import callbacks

    step, _, name = where.partition("-")

    def stopped(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if str(state.global_step) == step:
            os.kill(os.getpid(), signal.Signals[name or "SIGKILL"])

    event = "on_prediction_step" if name else "on_step_begin"  # that is behind the checkpoint of the step before
    setattr(callbacks.OwnDraws, event, stopped)
    return main(["finetune", *words])


def train(name: str, folder: str, world: int, where: str = "") -> list[int]:
    """Train in `world` processes and return how each ended, as os.waitpid says it."""
    words = [f"{name}.yaml", f"output_dir={folder}", *(f"training.{key}={value}" for key, value in SETTINGS.items())]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [started(words, where, rank, world, port) for rank in range(world)]
    return [os.waitpid(child, 0)[1] for child in children]


def main() -> int:
    """Train `name` in so many processes, unbroken and stopped at each place; 1 where one did not end well."""
    name, world, *places = sys.argv[1:]
    import matplotlib.pyplot  # noqa: F401
    import sklearn  # noqa: F401
    import transformers.trainer  # noqa: F401  stock, as a program may have imported it before

    from hf_mps.finetune import tasks
    from hf_mps.finetune.run import stages  # noqa: F401

    tasks.find(every_task.RECIPES[name]["task"])

    ended = [train(name, "whole", int(world))]
    for where in places:
        if 0 in train(name, f"stopped-{where}", int(world), where):
            return 1
        ended.append(train(name, f"stopped-{where}", int(world)))
    return int(any(code for codes in ended for code in codes))


if __name__ == "__main__":
    sys.exit(main())
