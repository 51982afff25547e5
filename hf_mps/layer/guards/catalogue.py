"""Which guards and sentinels there are, and after which module of a library each is armed. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_mps.core.import_hooks import Catalogue
from hf_mps.core.registry import registry_of

if TYPE_CHECKING:
    from types import ModuleType

    from hf_mps.layer.guards.base import Safeguard

# Module -> the guards that patch something in it; torch is patched when the layer is switched on, the others once they
# have been imported. Of several around one function the first is innermost: batch-waits is asked of each function of
# torch while it has a batch moved, and not while others look at it.
_AFTER = {
    "torch": (
        "checkpoint-rng non-blocking non-contiguous lstm-dropout huge-embedding mixed-dtypes lerp-weight "
        "index-add-gaps large-pad lone-scans adaptive-max-pool memory-budget shape-growth fork-workers cuda-optimizer "
        "cuda-words compile cuda-graphs large-k sliced-products expanded-operands linear-bias linear-shapes "
        "dtype-copies permuted-activations atomic-order huge-products huge-cat embedding-grad conv-batch "
        "conv3d-layout process-group"
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param": "process-group",
    "transformers.distributed.mixin": "node-weights",
    "transformers.training_args": "node-weights nan-hidden pin-memory half-precision fork-workers",
    "transformers.trainer_utils": "torn-checkpoint",
    "transformers.trainer": (
        "batch-waits resume-rng resume-batches resume-loss resume-names resume-end atomic-checkpoint torn-checkpoint "
        "nan-hidden float64-columns pin-memory cuda-optimizer memory-metrics fork-workers memory-budget shape-growth "
        "index-range"
    ),
    "accelerate.data_loader": "resume-epoch resume-batches",
    "accelerate.accelerator": (
        "batch-waits resume-rng resume-epoch resume-batches atomic-checkpoint torn-checkpoint non-contiguous "
        "huge-embedding mixed-dtypes float64-columns one-device half-precision memory-budget shape-growth compile "
        "cuda-optimizer index-range"
    ),
    "transformers.modeling_utils": "attention",
    "transformers.core_model_loading": "async-loading",
    "transformers.masking_utils": "batch-waits",
    "accelerate.launchers": "one-device",
    "lightning.fabric.connector": "one-device",
    "lightning_fabric.connector": "one-device",
    "accelerate.utils.memory": "oom-text",
}
# Lightning comes under two names, and its modules of each.
for _lightning in ("lightning.pytorch", "pytorch_lightning"):
    _AFTER |= {
        f"{_lightning}.strategies.strategy": (
            "batch-waits float64-columns memory-budget shape-growth huge-embedding index-range"
        ),
        f"{_lightning}.trainer.connectors.accelerator_connector": "half-precision one-device",
        f"{_lightning}.trainer.connectors.checkpoint_connector": "lightning-rng",
        f"{_lightning}.loops.fetchers": "lightning-rng",
        f"{_lightning}.utilities.memory": "oom-text",
    }

# Where each is written: one file for those of one subject, below hf_mps.layer.guards.
_FILES = {
    "numerics.atomic_order": "atomic-order",
    "numerics.checkpoint_rng": "checkpoint-rng",
    "numerics.convolutions": "conv-batch conv3d-layout",
    "numerics.index_range": "index-range",
    "numerics.indices": "index-add-gaps embedding-grad huge-embedding",
    "numerics.layouts": "non-blocking dtype-copies non-contiguous permuted-activations",
    "numerics.nan_hidden": "nan-hidden",
    "numerics.operators": "large-pad huge-cat lerp-weight lone-scans adaptive-max-pool lstm-dropout mixed-dtypes",
    "numerics.products": "large-k sliced-products expanded-operands linear-bias linear-shapes huge-products",
    "platform.batches": "batch-waits float64-columns",
    "platform.cuda": "cuda-words cuda-graphs cuda-optimizer compile",
    "platform.loaders": "fork-workers pin-memory",
    "platform.memory": "memory-budget shape-growth memory-metrics oom-text",
    "platform.process_group": "process-group",
    "platform.settings": "one-device half-precision attention async-loading",
    "resume.batches": "resume-epoch resume-batches",
    "resume.checkpoints": "atomic-checkpoint torn-checkpoint node-weights",
    "resume.resume_rng": "resume-rng lightning-rng",
    "resume.trainer_state": "resume-loss resume-names resume-end",
    "sentinels.numbers": "non-finite gradient-norm loss-frozen",
    "sentinels.stopped_gpu": "stopped-gpu",
    "sentinels.stream": "stream",
    "sentinels.weights_still": "weights-still",
}
_HOMES = {name: f"hf_mps.layer.guards.{file}" for file, names in _FILES.items() for name in names.split()}


def _written(module: ModuleType, name: str) -> Safeguard:
    """The guard large-k is LARGE_K of its file, where others need the object or it takes arguments; else it is made."""
    there: Safeguard | None = getattr(module, name.upper().replace("-", "_"), None)
    if there is not None:
        return there
    kinds = (each for each in vars(module).values() if isinstance(each, type))
    made: Safeguard = next(kind for kind in kinds if vars(kind).get("name") == name)()
    return made


GUARDS = Catalogue("guard", _AFTER, _HOMES.__getitem__, _written)
SENTINELS = Catalogue(
    "sentinel",
    {
        # non-finite is first: the others then see numbers alone. stopped-gpu is asked before any of them looks.
        "torch": "non-finite weights-still gradient-norm loss-frozen stopped-gpu",
        "transformers.training_args": "non-finite",
        "transformers.trainer": "non-finite stopped-gpu",
        "accelerate.accelerator": "weights-still non-finite stopped-gpu",
    },
    _HOMES.__getitem__,
    _written,
    shared=("stream",),
)
registry = registry_of(GUARDS, SENTINELS)
"""Returns all guards and sentinels of this process."""
