"""`hf-mps finetune` in which something befalls one rank, or all of them, at a chosen moment.

    torchrun … -m tests.distributed.faulty WHAT@MOMENT[@RANK] RECIPE [key=value …]

WHAT is a signal's name, `FULL` (a full disk), `BUG` or `UNPLUG` (the host from its network); before the signal's name,
`launcher:` sends it to torchrun. It befalls a group that torchrun has started again no more. MOMENT is `step N`, in the
middle of that step, `evaluation`, `write N`, the N-th thing that this rank writes of checkpoints, or `never`. Without
RANK it befalls every rank.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any


def main(fault: str, words: list[str]) -> int:
    """Run the command with the fault in it; its exit code."""
    what, moment, *ranks = fault.split("@")
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first and (not ranks or os.environ["RANK"] in ranks):
        place, _, number = moment.partition(" ")
        PLACES[place](lambda: befall(what), int(number or 0))
    from hf_mps.cli.main import main as command

    return command(["finetune", *words], program="python -m hf_mps.finetune")


def befall(what: str) -> None:
    """Let it happen, here and now."""
    if what == "FULL":
        raise OSError(errno.ENOSPC, "No space left on device", "runs/my/checkpoint-3/optimizer.pt")
    if what == "BUG":
        raise IndexError("index 7 is out of range")
    if what == "UNPLUG":
        subprocess.run(["ip", "link", "set", "net0", "down"], check=True)
        return
    name = what.removeprefix("launcher:")
    os.kill(os.getpid() if name == what else os.getppid(), getattr(signal, name))


def in_step(act: Callable[[], None], number: int) -> None:
    """Act in the middle of a step, between its backward pass and the optimizer."""
    from transformers import Trainer

    stock = Trainer.training_step

    def training_step(self: Any, *arguments: Any, **settings: Any) -> Any:
        loss = stock(self, *arguments, **settings)
        if self.state.global_step == number - 1:
            act()
        return loss

    Trainer.training_step = training_step


def in_evaluation(act: Callable[[], None], number: int) -> None:
    """Act in the second batch of an evaluation."""
    from transformers import Trainer

    stock, seen = Trainer.prediction_step, [0]

    def prediction_step(self: Any, *arguments: Any, **settings: Any) -> Any:
        seen[0] += 1
        if seen[0] == 2:
            act()
        return stock(self, *arguments, **settings)

    Trainer.prediction_step = prediction_step


def in_write(act: Callable[[], None], number: int) -> None:
    """Act in the middle of what a checkpoint writes."""
    from tests.resume import killing

    killing.kill = act
    killing.Killer(("write", number)).watch_writes()


PLACES: dict[str, Callable[[Callable[[], None], int], None]] = {
    "step": in_step,
    "evaluation": in_evaluation,
    "write": in_write,
    "never": lambda act, number: None,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
