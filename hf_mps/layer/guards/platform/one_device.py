"""one-device: several processes that would each train the whole run on the one Metal device are refused."""

from __future__ import annotations

import os
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.patching import CONNECTORS
from hf_mps.distributed.metal.claim import claim
from hf_mps.distributed.world import World
from hf_mps.layer.guards.base import Guard


class OneDevice(Guard):
    """Looks before a library waits for other processes: Accelerate's state, which Trainer has, chooses a device later.

    Lightning's connectors have chosen theirs.
    """

    name = "one-device"
    what = (
        "under torchrun or --multi_gpu each process takes mps as if it were alone: many whole runs into one output_dir"
    )
    issue = "https://github.com/huggingface/accelerate/blob/main/src/accelerate/state.py (PartialState)"
    until = "Accelerate refuses it"
    patches = {
        # notebook_launcher starts processes itself.
        "accelerate.launchers:notebook_launcher": "_launch",
        "accelerate.accelerator:PartialState.__init__": "_state_made",
        **{f"{connector}._lazy_init_strategy": "_lightning_starts" for connector in CONNECTORS},
    }

    def applies(self) -> Choice[bool]:
        """Whether this process is one of several, which may be on one host."""
        world = _world()
        if world.local_size > 1:
            return Choice(True, f"{world.local_size} processes were started on this host")
        if not world.alone:
            return Choice(True, f"{world.size} processes were started, and each has to be on a host of its own")
        return Choice(False, "this process is alone")

    def _launch(
        self, stock: Any, function: Any, args: Any = (), num_processes: int | None = None, *more: Any, **kwargs: Any
    ) -> Any:
        if (num_processes or 1) > 1 and _takes_metal():
            self.acted("several processes on one Metal device were refused", aloud=False)
            raise UserError(
                f"notebook_launcher(num_processes={num_processes}): there is one Metal device, and every process would "
                f"train the whole model on it; next: num_processes=1, and gradient_accumulation_steps="
                f"{num_processes} for the same batch"
            )
        return stock(function, args, num_processes, *more, **kwargs)

    def _state_made(self, stock: Any, state: Any, cpu: bool = False, **kwargs: Any) -> None:
        world = _world()
        if not world.alone and not cpu and not state._shared_state and _takes_metal():
            self._refuse_others(world)
        stock(state, cpu, **kwargs)

    def _lightning_starts(self, stock: Any, connector: Any) -> None:
        if type(connector.accelerator).__name__ == "MPSAccelerator":
            world, hosts = _world(), int(connector._num_nodes_flag)
            if world.alone and hosts > 1:  # started by hand on each host, with Lightning's own NODE_RANK
                number = connector.cluster_environment.node_rank()
                world = World(rank=number, size=hosts, node=number)
            self._refuse_others(world)
        stock(connector)

    def _refuse_others(self, world: World) -> None:
        """Raise UserError where another process of `world` has this host's Metal device, or would have it."""
        several = world.local_size
        try:
            if several > 1:
                hosts = f"torchrun --nnodes {world.hosts} --nproc_per_node 1 on each host" if world.hosts > 1 else ""
                raise UserError(
                    f"{several} processes were started on this host and there is one Metal device: each would train the"
                    f" whole run into the same output_dir; next: {hosts or 'python script.py without torchrun'}, "
                    f"or HF_MPS_DEVICE=cpu for {several} processes on the CPU"
                )
            claim(world)
        except UserError:
            self.acted("several processes on one Metal device were refused", aloud=False)
            raise


def _takes_metal() -> bool:
    from hf_mps.metal.device.choice import metal

    return os.environ.get("ACCELERATE_TORCH_DEVICE", "mps").partition(":")[0] == "mps" and metal().value


def _world() -> World:
    try:
        return World.here()
    except UserError:  # a launcher's variable without a number: the library that reads it says so
        return World()


GUARD = OneDevice()
