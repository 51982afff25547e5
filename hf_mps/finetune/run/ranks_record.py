"""What each of several processes did in a run: its host, its device, its rows a second, and how long it waited."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hf_mps.distributed.metal.traffic import traffic
from hf_mps.distributed.ranks import Ranks

if TYPE_CHECKING:
    from hf_mps.finetune.run.stages import Trained

NANOSECONDS = 1e9


@dataclass(frozen=True)
class RankRecord:
    """One process: rows that it trained on in a second, and the seconds that its steps waited for other processes.

    `waited_seconds` is what DistributedDataParallel's own clock says, which looks at the first ten steps and then at
    each hundredth: the time from the first gradient sent to the last one received, less what the backward pass ran
    meanwhile. None where another way averages the gradients, such as steps recorded as CUDA graphs, and on mps, which
    that clock leaves out.
    """

    rank: int
    host: str
    device: str
    samples_per_second: float
    waited_seconds: float | None


def of_all(trained: Trained, samples: float) -> dict[str, Any] | None:
    """Return the `world` of results.json for a training of `samples` rows; None for a process alone.

    Its keys: `processes`, `hosts` (their names), `strategy` and `backend` (accelerate's and torch.distributed's words),
    `samples_per_second` of all, `efficiency` (the mean share of the time in which they did not wait for each other, or
    None), over several Macs `metal_bytes` and `metal_bytes_copied` (what the main process gave to collectives in a step
    and what of it had to be copied, evaluation included), and for each of `ranks` a RankRecord's fields. Called by all
    processes.
    """
    ranks = Ranks.here()
    if ranks.world.alone:
        return None
    trainer, seconds = trained.trainer, trained.watch.seconds
    own = RankRecord(
        rank=ranks.world.rank,
        host=platform.node(),
        device=_device(trainer.args.device),
        samples_per_second=samples / ranks.world.size / seconds if seconds > 0 else 0.0,
        waited_seconds=waited(trainer, trained.watch.first_step),
    )
    every = ranks.gather((own, seconds))
    shares = [1 - one.waited_seconds / total for one, total in every if one.waited_seconds is not None and total > 0]
    state = trainer.accelerator.state
    first, before = trained.watch.sent_before
    moved = (traffic() - before).per(trainer.state.global_step - first)
    of_metal = {"metal_bytes": moved.payload, "metal_bytes_copied": moved.copied} if moved.calls else {}
    return {
        "processes": ranks.world.size,
        "hosts": list(dict.fromkeys(one.host for one, _ in every)),
        "strategy": getattr(state.distributed_type, "value", str(state.distributed_type)),
        "backend": state.backend,
        "samples_per_second": samples / seconds if seconds > 0 else 0.0,
        "efficiency": max(0.0, sum(shares) / len(shares)) if len(shares) == len(every) else None,
        **of_metal,
        "ranks": [asdict(one) for one, _ in every],
    }


def _device(device: Any) -> str:
    """The device's name: `cuda:1 (NVIDIA H200)`, `cpu`, `mps:0`."""
    if device.type != "cuda":
        return str(device)
    import torch

    return f"{device} ({torch.cuda.get_device_name(device)})"


def waited(trainer: Any, first_step: int) -> float | None:
    """Return `RankRecord.waited_seconds` of a training that began behind step `first_step`; None is not measured."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped = trainer.model_wrapped
    if not isinstance(wrapped, DistributedDataParallel):
        return None
    clock = wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    sent, hidden = (clock.get(f"avg_backward_{name}_time") for name in ("comm", "compute_comm_overlap"))
    if sent is None or hidden is None:
        return None
    steps = trainer.state.global_step - first_step
    return float(max(0, sent - hidden) / NANOSECONDS * steps)
