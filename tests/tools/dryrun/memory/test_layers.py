"""A deep model is planned from a few of its layers, and needs what the trace of all of them says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_mps.tools.dryrun import metal_device, prepare
from hf_mps.tools.dryrun.memory import layers
from hf_mps.tools.dryrun.memory.trace import Tracer, peak
from hf_mps.tools.dryrun.resolve import resolve_target

DEEP = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LORA = ["lora={r: 4}", "training.gradient_checkpointing=true"]


def both(folder: Path, words: list[str], **config: Any) -> tuple[Any, Any]:
    """What is planned of a step of a model of `config`, and the peak of the trace of all its layers."""
    (folder / "config.json").write_text(json.dumps(DEEP | config), encoding="utf-8")
    rows = ["training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2"]
    target, device = resolve_target(str(folder), [*rows, *words], "causal-lm"), metal_device()
    with prepare.weightless(target) as parts:
        tracer = Tracer(parts, device, 32)
        planned = tracer()
        return planned, peak(tracer._step({"gradient_accumulation_steps": 2}, 2))


@pytest.mark.rotated
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "config"),
    [
        ([], {}),
        (["training.gradient_checkpointing=true"], {}),
        (LORA, {}),
        ([*LORA, "quantization=nf4", "weights=bfloat16"], {"num_hidden_layers": 20}),
        ([], {"vocab_size": 40000, "hidden_size": 32}),
    ],
    ids=["all weights", "checkpointing", "LoRA", "LoRA over 4 bits", "a wide output layer"],
)
def test_a_few_layers_tell_the_peak_of_all(
    words: list[str], config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    stock = layers.scaled
    monkeypatch.setattr(layers, "scaled", lambda found, depth: used.append(depth) or stock(found, depth))
    planned, whole = both(tmp_path, words, **config)
    assert used == [config.get("num_hidden_layers", 12)]
    assert planned.bytes == pytest.approx(whole.bytes, rel=0.001)
    assert planned.parts == pytest.approx(whole.parts, rel=0.001, abs=0.001 * whole.bytes)
    assert planned.where.partition(":")[0] == whole.where[0]


def test_layers_that_differ_and_shallow_models_are_traced_whole() -> None:
    def model(*sizes: int) -> torch.nn.Module:
        made = torch.nn.Module()
        made.layers = torch.nn.ModuleList(torch.nn.Linear(8, size) for size in sizes)
        return made

    assert layers.identical_layers(model(*[8] * 12)) == "layers"
    assert layers.identical_layers(model(*[8] * 9)) is None
    assert layers.identical_layers(model(*[8] * 11, 16)) is None
    gemma = model(*[8] * 12)
    for number, layer in enumerate(gemma.layers):  # type: ignore[arg-type]
        layer.attention_type = "full" if number % 2 else "sliding"
    assert layers.identical_layers(gemma) is None


def test_a_model_is_whole_again_after_a_short_trace() -> None:
    made = torch.nn.Module()
    made.inner = torch.nn.Module()
    made.inner.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(12))
    whole = made.inner.layers
    short = layers.few(made, "inner.layers", 3)
    with short:
        assert len(made.inner.layers) == 3
    assert made.inner.layers is whole
