"""Runs in which something befalls a rank, each of them processes forked from this one, which has imported all that is
slow: `torchrun` without its start.

    python -m tests.distributed.agent FOLDER    reads FOLDER/plan.json, leaves FOLDER/NAME.json for each run

Like torchrun's agent it holds the store, gives each rank its variables, and where one of them fails it ends the others
by SIGTERM, and after `PATIENCE` seconds by SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import transformers.trainer  # noqa: F401  slow, and needed by every child
from torch._C._distributed_c10d import TCPStore

from hf_mps.finetune.run import runner, train  # noqa: F401  the same
from tests.distributed import faulty

PATIENCE = 15.0


def main(folder: Path) -> None:
    """Run the plan: for each name the ranks of one part after the other."""
    for name, parts in json.loads((folder / "plan.json").read_text()).items():
        ended = [part(folder, **one) for one in parts]
        (folder / f"{name}.json").write_text(json.dumps(ended))


def part(folder: Path, ranks: int, fault: str, words: list[str], restarts: int = 0) -> dict[str, Any]:
    """How one group of processes ended: each one's exit code and what they printed, and how long the end took."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    variables = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
    }
    texts = [folder / f"rank-{rank}.txt" for rank in range(ranks)]
    children = [forked(rank, variables, fault, words, texts[rank]) for rank in range(ranks)]
    codes, seconds = ended(children)
    return {"codes": codes, "seconds": seconds, "texts": [text.read_text() for text in texts]}


def forked(rank: int, variables: dict[str, str], fault: str, words: list[str], text: Path) -> int:
    """The process of a rank, which prints into `text`."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
        output = os.open(text, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = faulty.main(fault, words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(children: list[int]) -> tuple[list[int], float]:
    """The exit codes, and the seconds from the first failure to the last end."""
    codes: dict[int, int] = {}
    failed: float | None = None
    while len(codes) < len(children):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[child] = os.waitstatus_to_exitcode(status)
            if codes[child] and failed is None:
                failed = time.monotonic()
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
    main(Path(sys.argv[1]))
