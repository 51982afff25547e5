"""The features of a run in the order in which they decide: each sees what those before it have decided."""

from __future__ import annotations

from collections.abc import Sequence

from hf_mps.finetune.features.arguments import Evaluation, KeptModel, Loading, Optimizer, Output, Seed
from hf_mps.finetune.features.attention import Attention, AttentionKernels
from hf_mps.finetune.features.base import Feature
from hf_mps.finetune.features.batches import Batches
from hf_mps.finetune.features.cuda_graphs import CudaGraphs
from hf_mps.finetune.features.early_steps import EarlySteps
from hf_mps.finetune.features.machine import ExpectedFallback, NoSleep, OneGpu, Precision
from hf_mps.finetune.features.memory_fit import MemoryFit
from hf_mps.finetune.features.weights import FusedStep, QuantizedWeights, Sharding, Smoke

# Evaluation counts by the steps of Batches, and CudaGraphs is ruled out by EarlySteps; Smoke explains what
# others have chosen; the rest of the order is that of the header.
FEATURES: Sequence[Feature] = (
    Precision(),
    Sharding(),
    QuantizedWeights(),
    Batches(),
    Evaluation(),
    KeptModel(),
    Loading(),
    Optimizer(),
    FusedStep(),
    OneGpu(),
    MemoryFit(),
    EarlySteps(),
    Attention(),
    AttentionKernels(),
    CudaGraphs(),
    Seed(),
    ExpectedFallback(),
    NoSleep(),
    Output(),
    Smoke(),
)
