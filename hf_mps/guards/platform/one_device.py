"""one-device: several processes that would each train the whole run on the one Metal device are refused."""

from __future__ import annotations

import os
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.distributed.metal.claim import claim
from hf_mps.distributed.world import World
from hf_mps.guards.base import Guard


class OneDevice(Guard):
    """Looks at Accelerate's state, which Trainer has too, before it chooses a device and waits for other processes."""

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
        several = world.local_size
        if several > 1 and not cpu and not state._shared_state and _takes_metal():
            self.acted("several processes on one Metal device were refused", aloud=False)
            hosts = f"torchrun --nnodes {world.hosts} --nproc_per_node 1 on each host" if world.hosts > 1 else ""
            raise UserError(
                f"{several} processes were started on this host and there is one Metal device: each would train the "
                f"whole run into the same output_dir; next: {hosts or 'python script.py without torchrun'}, "
                f"or HF_MPS_DEVICE=cpu for {several} processes on the CPU"
            )
        if several == 1 and not cpu and not state._shared_state and not world.alone and _takes_metal():
            try:
                claim(world)
            except UserError:
                self.acted("several processes on one Metal device were refused", aloud=False)
                raise
        stock(state, cpu, **kwargs)


def _takes_metal() -> bool:
    from hf_mps.device.choice import metal

    return os.environ.get("ACCELERATE_TORCH_DEVICE", "mps").partition(":")[0] == "mps" and metal().value


def _world() -> World:
    try:
        return World.here()
    except UserError:  # a launcher's variable without a number: the library that reads it says so
        return World()


GUARD = OneDevice()
