"""Forks processes of `hf-mps finetune` that a signal ends where it is told to; this one has imported what they need.

    LD_PRELOAD=at_operation.so python -m tests.resume.kills.server    a line of JSON each for what is asked and answered

The server itself never uses the device: what is forked after that could not use it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

MODULES = "modules.txt"
TOGETHER = 10.0
"""Seconds that the other ranks have to end after SIGTERM, as torchrun gives them 30."""


def main() -> None:
    """Answer until nobody asks any more."""
    import datasets
    import torch
    import transformers.trainer  # noqa: F401  slow, and needed by every child

    from hf_mps.finetune.report import plot
    from hf_mps.finetune.run import runner, stages, sweep  # noqa: F401

    plot._rendered = lambda figure: b"a picture takes longer to draw than the training"
    # Imports have asked for the device, and none has used it: a fork is as good as a process that begins.
    torch.mps._is_in_bad_fork = torch._C._mps_is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        datasets.config.HF_DATASETS_CACHE = Path(asked["cwd"]) / "cache"
        print(json.dumps(group(**asked)), flush=True)
        _import(Path(asked["cwd"]) / MODULES)


def _import(names: Path) -> None:
    """Import what a child had to, so that the next one need not."""
    for name in names.read_text().splitlines() if names.exists() else ():
        if name not in sys.modules:
            with suppress(Exception):
                importlib.import_module(name)
    names.unlink(missing_ok=True)


def group(
    words: list[str], cwd: str, folder: str, ranks: int, at: int, number: int, hit: int, together: bool, limit: float
) -> dict[str, Any]:
    """Run the command in `ranks` processes; rank `hit` gets signal `number` at its operation `at` in `folder`.

    Where one fails the others get SIGTERM, as from torchrun, or with `together` SIGKILL. Returns the exit codes, what
    was printed, the operations of each rank, and whether the seconds of `limit` were over first.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
        variables |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        aim = (folder, at if rank == hit else 0, number)
        children.append(forked(words, Path(cwd), rank, variables if ranks > 1 else {}, aim))
    codes, stuck = ended(children, together, limit)
    texts = {
        name: [(Path(cwd) / f"rank-{rank}.{name}").read_text(errors="replace") for rank in range(ranks)]
        for name in ("out", "err")
    }
    operations = [(Path(cwd) / f"rank-{rank}.log").read_text().splitlines() for rank in range(ranks)]
    return {"codes": codes, **texts, "operations": operations, "stuck": stuck}


def forked(words: list[str], cwd: Path, rank: int, variables: dict[str, str], aim: tuple[str, int, int]) -> int:
    """The number of a process that runs the command as one rank, in a group of processes of its own."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgrp()
        os.chdir(cwd)
        os.environ.update(variables)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        kinds = (os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
        log = os.open(cwd / f"rank-{rank}.log", kinds[0] | os.O_APPEND, kinds[1])
        for descriptor, name in enumerate(("out", "err"), start=1):
            os.dup2(os.open(cwd / f"rank-{rank}.{name}", *kinds), descriptor)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # as in a terminal
        code = run(words, lambda: ctypes.CDLL(None).kills_arm(os.fsencode(aim[0]), ctypes.c_long(aim[1]), aim[2], log))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if rank == 0 and code == 0:
            (cwd / MODULES).write_text("\n".join(sys.modules))
        os._exit(code)


def run(words: list[str], arm: Any) -> int:
    """The exit code of the command line."""
    from hf_mps.cli.main import main

    arm()
    try:
        return main(["finetune", *words], program="python -m hf_mps.finetune")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)


def ended(children: list[int], together: bool, limit: float) -> tuple[list[int], bool]:
    """The exit codes, a signal's negative, and whether the time was over."""
    codes: dict[int, int] = {}
    until, stuck, patience = time.monotonic() + limit, False, 0.0
    while len(codes) < len(children):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in children:
            codes[child] = os.waitstatus_to_exitcode(status)
            if codes[child] and not patience:
                patience = time.monotonic() + TOGETHER
                _signal(set(children) - set(codes), signal.SIGKILL if together else signal.SIGTERM)
            continue
        if time.monotonic() > until or (patience and time.monotonic() > patience):
            stuck = stuck or time.monotonic() > until
            _signal(set(children) - set(codes), signal.SIGKILL)
        time.sleep(0.01)
    for child in children:  # loaders' workers that it left
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return [codes[child] for child in children], stuck


def _signal(processes: set[int], number: int) -> None:
    for one in processes:
        os.kill(one, number)


if __name__ == "__main__":
    main()
