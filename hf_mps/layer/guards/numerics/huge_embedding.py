"""huge-embedding: a parameter of 2^31 elements or more is refused before it is trained."""

from __future__ import annotations

from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.layer.guards import training_hooks
from hf_mps.layer.guards.base import Guard

LIMIT = 2**31
"""Elements; kernels that index with 32 bits read other rows beyond (pytorch#188756)."""


class HugeEmbedding(Guard):
    """Looks at the sizes of the parameters when their optimizer is made, or their model moved; frozen ones are read."""

    name = "huge-embedding"
    what = "looking up rows in a tensor of 2^31 or more elements gives zeros"
    untried = "a trial would take 8 GB"
    patches = training_hooks.parameters("_look", frozen=True, lightning=True)

    def _look(self, parameters: list[Any]) -> None:
        huge = next((parameter for parameter in parameters if parameter.numel() >= LIMIT), None)
        if huge is not None and self.needed:
            self.acted(f"a parameter of shape {list(huge.shape)} was refused", aloud=False)
            raise UserError(
                f"a parameter of shape {list(huge.shape)} has {huge.numel():,} elements; on Metal torch before 2.14 "
                f"reads zeros beyond 2^31 (pytorch#188756); next: pip install 'torch>=2.14', or HF_MPS_DEVICE=cpu"
            )


GUARD = HugeEmbedding()
