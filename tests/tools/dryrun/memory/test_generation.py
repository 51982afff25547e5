"""A step that generates is planned with what it generates: the keys and values of all completions at their end."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from hf_mps.tools.dryrun import audit
from hf_mps.tools.dryrun.memory.plan import estimate
from hf_mps.tools.dryrun.memory.trace import CACHE, Estimate
from hf_mps.tools.dryrun.resolve import Target, resolve_target
from tests.finetune import builders

LENGTH, TOKEN = 256, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builders.model(tmp_path_factory.mktemp("models"), "qwen2")


def target(model: Path, at_once: int, *further: str) -> Target:
    sizes = ["training.per_device_train_batch_size=1", f"training.gradient_accumulation_steps={at_once}"]
    words = [f"model={model}", "lora=null", f"max_length={LENGTH}", "training.max_completion_length=128"]
    return resolve_target("grpo/gsm8k", [*words, *sizes, *further])


def estimated(model: Path, at_once: int) -> Estimate:
    return estimate(target(model, at_once))


def cache_of(model: Path, rows: int) -> int:
    """Bytes of keys and values of `rows` completions at their end, by the model's own configuration."""
    config = AutoConfig.from_pretrained(model)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * width * LENGTH * TOKEN * rows)


@pytest.mark.slow
def test_completions_that_are_generated_at_once_are_counted(model: Path) -> None:
    few, many = estimated(model, 128), estimated(model, 256)
    assert many.where.startswith("generation")
    assert few.rows == many.rows == 1
    assert many.parts[CACHE] > cache_of(model, 256)
    assert many.parts[CACHE] == pytest.approx(2 * few.parts[CACHE], rel=0.02)


def test_every_operator_of_generation_and_of_the_loss_has_a_kernel(model: Path) -> None:
    found = audit.audit(target(model, 8, "training.beta=0.1"))
    assert found.facts["generation"].value == "2 of 128 passes"
    assert found.facts["tensors"].value == "fake"
    phases = {phase for entry in found.entries for phase, *_ in entry.places}
    assert {"generation", "forward", "backward", "optimizer"} <= phases
    assert [entry.operator for entry in found.entries if entry.kind in ("fallback", "refused")] == []
    assert "aten::multinomial" in {entry.operator for entry in found.entries}
