"""Groups of ranks, each of them processes forked from this one, which has imported all that is slow: `torchrun` without
its start, 3 s for its own and 10 s for each rank's.

    python -m tests.distributed.agent    reads a line of JSON for each group, answers with one on how it ended

Like torchrun's agent it holds the store, gives each rank its variables, and where one of them fails it ends the others
by SIGTERM, and after `PATIENCE` seconds by SIGKILL. tests/distributed/agents.py starts it and asks it.
"""

from __future__ import annotations

import json
import os
import platform
import runpy
import shutil
import signal
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import datasets
import peft  # noqa: F401  slow, and needed by every child
import transformers.trainer  # noqa: F401  the same
from torch._C._distributed_c10d import TCPStore

from hf_mps.finetune.run import runner, stages  # noqa: F401  the same
from scripts.tools.hosts import Host, hosts

PATIENCE = 15.0
# What a rank on a host of its own has beside its number.
ALONE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
READ = ("my.yaml", "train.csv", "dev.csv", "model")


def main() -> None:
    """Let one group after the other run, until nobody asks any more."""
    for line in sys.stdin:
        print(json.dumps(group(**json.loads(line))), flush=True)


def group(
    ranks: int,
    words: list[str],
    cwd: str,
    env: dict[str, str],
    restarts: int = 0,
    apart: bool = False,
    own: bool = False,
) -> dict[str, Any]:
    """How the ranks of one group ended: each one's exit code and what it printed, and how long the end took.

    With `apart` each is the only one of a host of its own, with a network between them; with `own` it counts as that,
    and has files of its own, in mac-0, mac-1, …
    """
    with ExitStack() as stack:
        macs = stack.enter_context(hosts(ranks)) if apart else []
        if macs:  # as mpirun starts them: the first one's process has the store
            variables = {"MASTER_ADDR": macs[0].address, "MASTER_PORT": "29500"}
            variables |= {"GLOO_SOCKET_IFNAME": "net0"}
        else:
            store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            variables = {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
            variables |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
            variables |= {"TORCHELASTIC_RESTART_COUNT": str(restarts)}
        variables |= {"WORLD_SIZE": str(ranks), **env}
        alone = [ALONE | {"GROUP_RANK": str(rank)} if apart or own else {} for rank in range(ranks)]
        texts = [[Path(cwd) / f"rank-{rank}.{name}" for name in ("out", "err")] for rank in range(ranks)]
        places = [own_files(Path(cwd), rank) if own else Path(cwd) for rank in range(ranks)]
        datasets.config.HF_DATASETS_CACHE = Path(cwd) / "cache"
        children = [
            forked(rank, words, places[rank], variables | alone[rank], texts[rank], macs[rank] if macs else None, own)
            for rank in range(ranks)
        ]
        codes, seconds = ended(children, together=not apart and not own)
    out, err = ([pair[which].read_text(encoding="utf-8") for pair in texts] for which in (0, 1))
    for pair in texts:
        for text in pair:
            text.unlink()
    return {"codes": codes, "seconds": seconds, "out": out, "err": err}


def own_files(folder: Path, rank: int) -> Path:
    """A folder with a copy of all that the recipe reads."""
    place = folder / f"mac-{rank}"
    if not place.exists():
        place.mkdir()
        for name in READ:
            copy = shutil.copytree if (folder / name).is_dir() else shutil.copy
            copy(folder / name, place / name)
    return place


def forked(
    rank: int, words: list[str], cwd: Path, variables: dict[str, str], texts: list[Path], host: Host | None, own: bool
) -> int:
    """The process of a rank, which prints into `texts`, on another host where one is given.

    With its `own` folder it is on a host of that folder's name.
    """
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        os.chdir(cwd)
        os.environ.update({"LOCAL_RANK": str(rank)} | variables, RANK=str(rank))
        if host is not None:
            host.enter()
            platform._uname_cache = None  # type: ignore[attr-defined]  # the name of this machine
        if own:
            platform.node = lambda: cwd.name
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, text in enumerate(texts, start=1):
            os.dup2(os.open(text, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
        code = run(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(words: list[str]) -> int:
    """Run `python *words`, a program or `-m` and a module with its arguments; its exit code."""
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def ended(children: list[int], *, together: bool = True) -> tuple[list[int], float]:
    """The exit codes, and the seconds from the first failure to the last end.

    Processes of one agent, which are `together`, get its SIGTERM at the first failure.
    """
    codes: dict[int, int] = {}
    failed: float | None = None
    while len(codes) < len(children):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[child] = os.waitstatus_to_exitcode(status)
            if codes[child] and failed is None:
                failed = time.monotonic()
                if together:
                    signal_all(set(children) - set(codes), signal.SIGTERM)
            continue
        if failed is not None and time.monotonic() > failed + PATIENCE:
            signal_all(set(children) - set(codes), signal.SIGKILL)
        time.sleep(0.02)
    return [codes[child] for child in children], time.monotonic() - failed if failed is not None else 0.0


def signal_all(processes: set[int], number: int) -> None:
    for one in processes:
        os.kill(one, number)


if __name__ == "__main__":
    main()
