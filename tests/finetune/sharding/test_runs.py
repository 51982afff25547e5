"""A recipe under FSDP2 in two processes: the numbers of DDP, a whole model, and the same end after a break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed.agents import Agent
from tests.distributed.launching import accelerate, file_on_page
from tests.finetune.sharding.made import language_model

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.together]
STEPS = ("training.max_steps=6", "training.save_strategy=steps", "training.save_steps=3", "training.save_total_limit=5")
SHARDED = "training.fsdp=true"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return language_model(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def trained(by: Agent | Path, folder: Path, name: str, *words: str) -> dict[str, Any]:
    """Train in two processes, by the agent or with a file of accelerate's, and return what results.json says."""
    command = ("-m", "hf_mps.finetune", "causal-lm/wikitext", *words, f"output_dir={folder / name}")
    if isinstance(by, Path):
        env = {"HF_MPS_SIMULATE": ""}  # the simulated device beside the CPU would be FSDP's
        ended = accelerate(by, *command, cwd=folder, env=env)
        assert ended.returncode == 0, ended.stderr[-3000:]
    else:
        ranks = by.launch(2, *command, cwd=folder)
        assert ranks.codes == [0, 0], ranks.err
    return json.loads((folder / name / "results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def sharded(agent: Agent, folder: Path, words: list[str]) -> dict[str, Any]:
    return trained(agent, folder, "sharded", *words, *STEPS, SHARDED)


def losses(said: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in said["log_history"] if "loss" in entry]


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


def test_the_losses_are_those_of_whole_models(
    agent: Agent, folder: Path, words: list[str], sharded: dict[str, Any]
) -> None:
    whole = trained(agent, folder, "whole", *words, *STEPS[:1], "training.save_strategy=no")
    assert losses(sharded) == pytest.approx(losses(whole), rel=1e-5)
    assert len(losses(sharded)) == 6
    assert sharded["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], rel=1e-5)
    assert sharded["choices"]["sharding"]["value"] == "FSDP2 over 2 ranks"
    assert sharded["choices"]["loss"]["value"] == "cross-entropy in chunks"


def test_the_saved_model_is_whole(folder: Path, sharded: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "sharded")
    ids = AutoTokenizer.from_pretrained(folder / "sharded")("w1 w2 w3", return_tensors="pt").input_ids
    assert type(model).__name__ == "LlamaForCausalLM"
    assert torch.isfinite(model(ids).logits).all()
    assert json.loads((folder / "sharded/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_checkpoint_is_of_parts_and_a_run_by_accelerate_s_file_ends_from_it_as_the_other_would_have(
    folder: Path, words: list[str], sharded: dict[str, Any]
) -> None:
    begun = folder / "sharded/checkpoint-3"
    assert len(list((begun / "pytorch_model_fsdp_0").glob("*.distcp"))) == 2
    file = folder / "fsdp.yaml"
    file.write_text(file_on_page("fsdp.yaml"), encoding="utf-8")
    resumed = trained(file, folder, "resumed", *words, *STEPS, f"training.resume_from_checkpoint={begun}")
    assert resumed["choices"]["sharding"]["reason"].startswith("accelerate's configuration file; ")
    assert losses(resumed)[-3:] == losses(sharded)[-3:]
    one, other = weights(folder / "sharded"), weights(folder / "resumed")
    assert all(torch.equal(one[name], other[name]) for name in one)
