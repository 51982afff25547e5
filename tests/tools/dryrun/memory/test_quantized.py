"""A model planned in 4 or 8 bits holds what the loaded one does, and what its products make on the way is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from hf_mps.finetune.models import checkpoint, quantization
from hf_mps.tools.dryrun import meta_model, metal_device
from hf_mps.tools.dryrun.memory import trace
from hf_mps.tools.dryrun.meta_model import MetaCheckpoint
from hf_mps.tools.dryrun.modules import ModuleTracker
from tests.finetune import builders

pytest.importorskip("bitsandbytes")


def held(model: Any) -> list[tuple[Any, ...]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    kept = [("", each.shape, each.dtype) for each in meta_model.statistics(model)]
    return [(name, each.shape, each.dtype) for name, each in tensors] + kept


@pytest.mark.parametrize("kind", get_args(quantization.Kind))
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_without_weights_has_the_shapes_of_the_loaded_one(kind: Any, family: str, tmp_path: Path) -> None:

    source = checkpoint.resolve(str(builders.model(tmp_path, family)))
    config = quantization.config(kind, "float32")
    loaded, _ = source.model("AutoModelForCausalLM", quantization_config=config, device_map={"": "cpu"})
    planned, told = MetaCheckpoint(source.name, source.source, local=True, size=source.config()).model(
        "AutoModelForCausalLM", quantization_config=quantization.config(kind, "float32")
    )
    for model in (loaded, planned):
        quantization.settle(model, "float32")
    assert held(planned) == held(loaded)
    assert all(each.is_meta for each in planned.parameters())
    assert "M parameters, without their weights" in told.reason


@pytest.mark.rotated
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_product_s_passing_memory_is_the_device_s_own(kind: str) -> None:
    import bitsandbytes

    metal_device()
    layer = bitsandbytes.nn.Linear4bit(256, 512, bias=False, compute_dtype=torch.float32, quant_type=kind).to("mps")
    x = torch.ones(4, 256, device="mps")
    peaks = []
    for _ in range(2):  # followed, then from memory
        memory = trace.Memory(ModuleTracker())
        with memory, torch.no_grad():
            layer(x)
            first = memory.peak.bytes
            layer(x)
        assert memory.peak.bytes == pytest.approx(first, abs=8192)
        peaks.append(first)
    numbers = 256 * 512
    # Codes of 4 bytes beside the values that they name, or those beside their products with the scales.
    assert 8 * numbers <= peaks[0] <= 10 * numbers
    assert peaks[0] == peaks[1]
