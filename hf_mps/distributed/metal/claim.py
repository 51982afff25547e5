"""One process of a run on each Metal device, also where each was started by its own agent that counts one.

A lock on a file of this host tells them apart, whatever the launcher's variables say and though several Macs may have
one name; the system takes it back when the process ends. Other runs are not asked: two trainings may share a Mac.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import platform
import tempfile
from pathlib import Path

from hf_mps.core import cache
from hf_mps.core.errors import UserError
from hf_mps.distributed.world import World

_held: dict[Path, int] = {}


def claim(world: World) -> None:
    """Keep this host's Metal device for this process, as long as it lives; alone nothing is done.

    Several of one agent are the guard one-device's. Raises UserError where another process of the same run has it.
    """
    if world.alone or world.local_size > 1 or (place := _place(world)) in _held:
        return
    # The name can be guessed, so a link that waits there is refused, wherever it leads.
    descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # Of a process and not of a file that is open: what is forked from it, a loader's worker, does not have it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 100).decode()
        os.close(descriptor)
        raise UserError(
            f"{holder or 'another process'} of this run has this host's one Metal device, and {world} was started here"
            " too; next: one process on each Mac (--nnodes is the number of Macs), or HF_MPS_DEVICE=cpu for several"
            " processes on the CPU"
        ) from error
    os.truncate(descriptor, 0)
    os.write(descriptor, f"rank {world.rank} (process {os.getpid()})".encode())
    _held[place] = descriptor
    atexit.register(_let_go, place)


def _let_go(place: Path) -> None:
    place.unlink(missing_ok=True)
    os.close(_held.pop(place))


def _place(world: World) -> Path:
    """Return the file for all processes of this run on this host, in a folder that nobody else can write to.

    Raises UserError where there is no such folder.
    """
    meeting = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")]
    words = "/".join([platform.node(), str(os.getuid()), str(world.size), *meeting])
    if (private := cache.spare()) is None:
        raise UserError(
            f"others can write to {tempfile.gettempdir()}/hf_mps-{os.getuid()}, where the processes of a run keep a"
            " lock; next: remove that folder, or TMPDIR=FOLDER"
        )
    return private.parent / f"metal-{hashlib.sha256(words.encode()).hexdigest()[:16]}.lock"
