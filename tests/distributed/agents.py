"""Asks tests/distributed/agent.py for groups of ranks; one of it for each kind of world, from its first use on."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests import CHECKOUT
from tests.distributed.launching import QUIET

# A group that takes this many seconds hangs.
LIMIT = 300.0


@dataclass(frozen=True)
class Ranks:
    """How a group of ranks ended: an exit code and two texts for each, and the seconds from a failure to the end."""

    codes: list[int]
    seconds: float
    out: list[str]
    err: list[str]

    @property
    def texts(self) -> list[str]:
        """What each of them printed."""
        return [out + err for out, err in zip(self.out, self.err, strict=True)]


class Agent:
    """A Python that has imported what trainings need, with the CPU for its device, and forks ranks.

    `env` are variables that it is to see as it imports.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = dict(env or {})
        self._process: subprocess.Popen[str] | None = None

    def launch(
        self, ranks: int, *words: str | Path, cwd: Path, env: Mapping[str, str] | None = None, **settings: Any
    ) -> Ranks:
        """Run `torchrun --nproc_per_node ranks *words` in `cwd`, where prepared rows are cached too, to its end.

        `env` is not seen by what is imported already; `settings` are those of agent.py's `group`. A group that hangs
        is killed, with the agent.
        """
        asked = {"ranks": ranks, "words": [*map(str, words)], "cwd": str(cwd), "env": dict(env or {}), **settings}
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(asked), file=process.stdin, flush=True)
        answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=lambda: answers.put(process.stdout.readline()), daemon=True).start()  # type: ignore[union-attr]
        try:
            answer = answers.get(timeout=LIMIT)
        except BaseException:
            self.end()
            raise
        assert answer, "the agent ended, see what it printed"
        return Ranks(**json.loads(answer))

    def _started(self) -> subprocess.Popen[str]:
        # Beside the CPU a simulated device would be FSDP's.
        variables = {**os.environ, **QUIET, "HF_MPS_SIMULATE": "", **self._env}
        command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.agent"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(command, cwd=CHECKOUT, env=variables, text=True, **pipes)

    def end(self) -> None:
        """Kill it, and what it has forked; the next group gets another one."""
        process, self._process = self._process, None
        if process is None:
            return
        for one in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate()
