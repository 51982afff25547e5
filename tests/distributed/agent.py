"""Runs in which something befalls a rank, each of them processes forked from this one, which has imported all that is
slow: `torchrun` without its start.

    python -m tests.distributed.agent FOLDER    reads FOLDER/plan.json, leaves FOLDER/NAME.json for each run

Like torchrun's agent it holds the store, gives each rank its variables, and where one of them fails it ends the others
by SIGTERM, and after `PATIENCE` seconds by SIGKILL.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import transformers.trainer  # noqa: F401  slow, and needed by every child
from torch._C._distributed_c10d import TCPStore

from hf_mps.finetune.run import runner, train  # noqa: F401  the same
from scripts.tools.hosts import Host, hosts
from tests.distributed import faulty

PATIENCE = 15.0


def main(folder: Path) -> None:
    """Run the plan: for each name the ranks of one part after the other."""
    for name, parts in json.loads((folder / "plan.json").read_text()).items():
        ended = [part(folder, **one) for one in parts]
        (folder / f"{name}.json").write_text(json.dumps(ended))


def part(
    folder: Path, ranks: int, fault: str, words: list[str], restarts: int = 0, apart: bool = False
) -> dict[str, Any]:
    """How one group of processes ended: each one's exit code and what they printed, and how long the end took.

    With `apart` each is the only one of a host of its own, with a network between them.
    """
    if apart:
        with hosts(ranks) as macs:
            return on_hosts(folder, macs, fault, words)
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


def on_hosts(folder: Path, macs: list[Host], fault: str, words: list[str]) -> dict[str, Any]:
    """The same, each rank on a host, as mpirun starts them: the first one's process has the store."""
    variables = {
        "WORLD_SIZE": str(len(macs)),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": macs[0].address,
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "net0",
        "HF_MPS_SILENCE": "3",
    }
    texts = [folder / f"rank-{mac.index}.txt" for mac in macs]
    children = [forked(mac.index, variables, fault, words, texts[mac.index], mac) for mac in macs]
    codes, seconds = ended(children, together=False)
    return {"codes": codes, "seconds": seconds, "texts": [text.read_text() for text in texts]}


def forked(
    rank: int, variables: dict[str, str], fault: str, words: list[str], text: Path, host: Host | None = None
) -> int:
    """The process of a rank, which prints into `text`, on another host where one is given."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank if host is None else 0))
        if host is not None:
            host.enter()
            os.environ["GROUP_RANK"] = str(rank)
            platform._uname_cache = None  # type: ignore[attr-defined]  # the name of this machine
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
    main(Path(sys.argv[1]))
