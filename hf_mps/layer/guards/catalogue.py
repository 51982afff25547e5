"""Which guards and sentinels there are, and after which module of a library each is armed. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_mps.core.import_hooks import Catalogue

if TYPE_CHECKING:
    from hf_mps.core.registry import Registry

    REGISTRY: Registry
    """All guards and sentinels of this process."""

# Module -> the guards that patch something in it; torch is patched when the layer is switched on, the others once they
# have been imported. A guard's file is its name with underscores. Of several around one function the first is the
# innermost: batch-waits is asked of each function of torch while it has a batch moved, and not while others look at it.
_AFTER: dict[str, tuple[str, ...]] = {
    "torch": (
        "checkpoint-rng",
        "non-blocking",
        "non-contiguous",
        "lstm-dropout",
        "huge-embedding",
        "mixed-dtypes",
        "lerp-weight",
        "index-add-gaps",
        "large-pad",
        "memory-budget",
        "shape-growth",
        "fork-workers",
        "cuda-optimizer",
        "cuda-words",
        "compile",
        "cuda-graphs",
        "large-k",
        "sliced-products",
        "expanded-operands",
        "linear-bias",
        "linear-shapes",
        "dtype-copies",
        "permuted-activations",
        "atomic-order",
        "huge-products",
        "huge-cat",
        "embedding-grad",
        "conv-batch",
        "conv3d-layout",
        "process-group",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param": ("process-group",),
    "transformers.distributed.mixin": ("node-weights",),
    "transformers.training_args": ("node-weights", "nan-hidden", "pin-memory", "half-precision", "fork-workers"),
    "transformers.trainer_utils": ("torn-checkpoint",),
    "transformers.trainer": (
        "batch-waits",
        "resume-rng",
        "resume-batches",
        "resume-loss",
        "resume-names",
        "resume-end",
        "atomic-checkpoint",
        "torn-checkpoint",
        "nan-hidden",
        "float64-columns",
        "pin-memory",
        "cuda-optimizer",
        "memory-metrics",
        "fork-workers",
        "memory-budget",
        "shape-growth",
        "index-range",
    ),
    "accelerate.data_loader": ("resume-epoch", "resume-batches"),
    "accelerate.accelerator": (
        "batch-waits",
        "resume-rng",
        "resume-epoch",
        "resume-batches",
        "atomic-checkpoint",
        "torn-checkpoint",
        "non-contiguous",
        "huge-embedding",
        "mixed-dtypes",
        "float64-columns",
        "one-device",
        "half-precision",
        "memory-budget",
        "shape-growth",
        "compile",
        "cuda-optimizer",
        "index-range",
    ),
    "transformers.modeling_utils": ("attention",),
    "transformers.core_model_loading": ("async-loading",),
    "transformers.masking_utils": ("batch-waits",),
    "accelerate.launchers": ("one-device",),
    "lightning.fabric.connector": ("one-device",),
    "lightning_fabric.connector": ("one-device",),
    "accelerate.utils.memory": ("oom-text",),
}
# Lightning comes under two names, and its modules of each.
for _lightning in ("lightning.pytorch", "pytorch_lightning"):
    _AFTER |= {
        f"{_lightning}.strategies.strategy": (
            "batch-waits",
            "float64-columns",
            "memory-budget",
            "shape-growth",
            "huge-embedding",
            "index-range",
        ),
        f"{_lightning}.trainer.connectors.accelerator_connector": ("half-precision", "one-device"),
        f"{_lightning}.trainer.connectors.checkpoint_connector": ("lightning-rng",),
        f"{_lightning}.loops.fetchers": ("lightning-rng",),
        f"{_lightning}.utilities.memory": ("oom-text",),
    }

# The folders of those that are not about numbers.
_FOLDERS = {
    "hf_mps.layer.guards.resume": (
        "atomic-checkpoint",
        "lightning-rng",
        "node-weights",
        "resume-batches",
        "resume-end",
        "resume-epoch",
        "resume-loss",
        "resume-names",
        "resume-rng",
        "torn-checkpoint",
    ),
    "hf_mps.layer.guards.platform": (
        "async-loading",
        "attention",
        "batch-waits",
        "compile",
        "cuda-graphs",
        "cuda-optimizer",
        "cuda-words",
        "float64-columns",
        "fork-workers",
        "half-precision",
        "memory-budget",
        "memory-metrics",
        "one-device",
        "oom-text",
        "pin-memory",
        "process-group",
        "shape-growth",
    ),
}

GUARDS = Catalogue("guard", "hf_mps.layer.guards.numerics", _AFTER, lambda module: module.GUARD, folders=_FOLDERS)
SENTINELS = Catalogue(
    "sentinel",
    "hf_mps.layer.guards.sentinels",
    {
        # non-finite is first: the others then see numbers alone. stopped-gpu is asked before any of them looks.
        "torch": ("non-finite", "weights-still", "gradient-norm", "loss-frozen", "stopped-gpu"),
        "transformers.training_args": ("non-finite",),
        "transformers.trainer": ("non-finite", "stopped-gpu"),
        "accelerate.accelerator": ("weights-still", "non-finite", "stopped-gpu"),
    },
    lambda module: module.SENTINEL,
    shared=("stream",),
)


# Made when it is first asked for: every `import torch` loads this file, and only those with Metal have any armed.
def __getattr__(name: str) -> Registry:
    if name != "REGISTRY":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_mps.core.registry import Registry

    registry: Registry = globals().setdefault(name, Registry(GUARDS, SENTINELS))
    return registry
