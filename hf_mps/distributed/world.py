"""Which of several processes this is, as its launcher's variables say: the only reader of them. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hf_mps.core.errors import UserError

# torchrun's names (docs.pytorch.org/docs/stable/elastic/run.html, which accelerate launch has too), then those of Intel
# MPI, Open MPI and MVAPICH, in the order in which accelerate reads them (utils/environment.py,
# get_cpu_distributed_information).
SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
NODE = ("GROUP_RANK",)
RESTARTS = ("TORCHELASTIC_RESTART_COUNT",)
# What accelerate's launcher of one process sets where its file or its command says several (utils/launch.py,
# prepare_simple_launcher_cmd_env), and a variable that all of its launchers set.
MEETING, OF_ACCELERATE = ("MASTER_ADDR", "MASTER_PORT"), "ACCELERATE_DYNAMO_BACKEND"


@dataclass(frozen=True)
class World:
    """One process among the `size` of a run, the one numbered `rank`; `local_rank` of `local_size` on its host.

    Alone, which is the default, it is rank 0 of 1. `node` numbers the hosts, `restarts` says how often torchrun's agent
    has started the processes again.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    restarts: int = 0

    @classmethod
    def here(cls) -> World:
        """Return the world that torchrun, accelerate launch or mpirun started this process in.

        Raises UserError for a variable that holds no number, and for a rank that is not in the world.
        """
        size = _number(SIZE, 1)
        if size <= 1:
            return cls()
        rank = _number(RANK, 0)
        if rank >= size:
            raise UserError(f"{_name(RANK)}={rank} is no rank of {_name(SIZE)}={size}; allowed: 0 to {size - 1}")
        local_size = max(1, _number(LOCAL_SIZE, 1))
        node = _number(NODE, rank // local_size)
        return cls(rank, size, _number(LOCAL_RANK, 0), local_size, node, _number(RESTARTS, 0))

    @classmethod
    def asked_for(cls) -> bool:
        """Return whether accelerate launch was to start several processes, and started this one by itself.

        It does for `distributed_type: MULTI_CPU`, and for several machines or processes without a type.
        """
        told = all(os.environ.get(name) for name in (*MEETING, OF_ACCELERATE))
        return told and not any(os.environ.get(name) for name in SIZE)

    @property
    def alone(self) -> bool:
        """Return whether no other process takes part."""
        return self.size == 1

    @property
    def main(self) -> bool:
        """Return whether this is the process that prints and writes."""
        return self.rank == 0

    @property
    def local_main(self) -> bool:
        """Return whether this is the first process of its host."""
        return self.local_rank == 0

    @property
    def hosts(self) -> int:
        """Return how many hosts there are, where each has as many processes as this one."""
        return -(-self.size // self.local_size)

    def __str__(self) -> str:
        where = f" on host {self.node} of {self.hosts}" if self.hosts > 1 else ""
        return f"rank {self.rank} of {self.size}{where}"


def _name(names: tuple[str, ...]) -> str:
    """Return the first of `names` that the environment has, else the first."""
    return next((name for name in names if os.environ.get(name)), names[0])


def _number(names: tuple[str, ...], default: int) -> int:
    """Return the number in the first of the variables `names` that is set, or `default`."""
    name = _name(names)
    text = os.environ.get(name, "").strip()
    # Older launchers write -1 for unset.
    if text in ("", "-1"):
        return default
    if not text.isdecimal():
        problem = f"{name}={text} is no number of processes"
        raise UserError(f"{problem}; allowed: 0, 1, 2, …; next: unset {name}, or torchrun")
    return int(text)
