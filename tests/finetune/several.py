"""Recipes that one, two and four processes train: tiny models without dropout, rows that none of them divides evenly.

Run as a program in a folder that `write` made, it trains them all in worlds of one, two and four processes, each forked
from one that has imported everything: a start of Python for each would take longer than all trainings.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from pathlib import Path

from tests import share
from tests.finetune import every_task

# Four processes, and recipes beyond these, are tried each night: a run takes a minute and a half with all.
WORLDS = (1, 2, 4) if share.is_whole() else (1, 2)
GLOBAL_BATCH, EVALUATED = 8, 4
EVERY = ("classification", "tokens", "packed", "several-labels", "pairs", "embeddings")
FURTHER = ("quantized", "sparse", "speech", "masks", "boxes", "questions")
RECIPES = tuple(name for name in EVERY if share.is_whole() or name in ("classification", "packed", "embeddings"))
BY_TWO = tuple(name for name in FURTHER if share.has(name, len(FURTHER)))
"""Those that one and two processes train."""


def trained_by(processes: int) -> tuple[str, ...]:
    """The recipes that a world of so many processes trains."""
    return RECIPES if processes > 2 else (*RECIPES, *BY_TWO)


def write(folder: Path) -> None:
    """Write models, rows and recipes into `folder`."""
    every_task.write(folder, (*RECIPES, *BY_TWO), dropout=0.0)


def words_of(name: str, processes: int) -> list[str]:
    """The command line's words for a recipe in so many processes, the rows of a step always the same."""
    settings = {
        "per_device_train_batch_size": GLOBAL_BATCH // processes,
        "per_device_eval_batch_size": EVALUATED,
        "num_train_epochs": 1,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "bf16": "false",
        "save_strategy": "'no'",
    }
    agreed = ["trust_reward_code=true"] if name == "rewards" else []
    return [
        f"{name}.yaml",
        *agreed,
        f"output_dir={name}-{processes}",
        *(f"training.{key}={v}" for key, v in settings.items()),
    ]


def world(size: int, port: int) -> int:
    """Train every recipe in a world of `size` processes; the number of those that failed."""
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
            os._exit(_train(size))
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def _train(processes: int) -> int:
    from hf_mps.cli.main import main

    try:
        codes = [main(["finetune", *words_of(name, processes)]) for name in trained_by(processes)]
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return max(codes)


def main() -> int:
    """Train in every world, smallest first; exit code 1 where a process failed."""
    import sentence_transformers  # noqa: F401
    import transformers  # noqa: F401

    from hf_mps.finetune import tasks
    from hf_mps.finetune.run import stages  # noqa: F401

    for name in trained_by(1):
        tasks.module(every_task.RECIPES[name]["task"])
    for size in WORLDS:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        if world(size, port):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
