"""Which of several GPUs a process by itself trains on."""

from __future__ import annotations

from hf_mps.core.choice import Choice
from hf_mps.distributed.world import World
from hf_mps.finetune.features.base import Draft, Feature


class OneGpu(Feature):
    """The first, of several: Trainer's own way, DataParallel, would copy the model to all of them at every step and
    multiply the batch.
    """

    def decide(self, draft: Draft) -> None:
        """Choose the key `gpus`; nothing where there is one for each process."""
        draft.choices |= gpus(draft.device)


def gpus(device_type: str) -> dict[str, Choice[str]]:
    """Return the choice `gpus` of a process on a device of this type."""
    import torch

    count = torch.cuda.device_count() if device_type == "cuda" and World.here().alone else 1
    if count < 2:
        return {}
    every = f"torchrun --nproc_per_node {count} -m hf_mps.finetune … trains on all"
    return {"gpus": Choice(f"1 of {count}", f"the first, CUDA_VISIBLE_DEVICES names another; {every}")}
