"""A run over quantized weights: it resumes exactly, saves its adapter, and steps in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from safetensors.torch import load_file

from hf_mps.cli.main import main
from hf_mps.finetune.run import checks
from tests.finetune import builders, tiny
from tests.finetune.tiny import Command

pytest.importorskip("bitsandbytes")

RECIPE = """\
task: causal-lm
model: {model}
data: {{files: {{train: train.txt, validation: train.txt}}}}
max_length: 32
quantization: nf4
lora: {{r: 4}}
training: {{per_device_train_batch_size: 2, max_steps: 4, save_strategy: steps, save_steps: 2, learning_rate: 0.01}}
"""


def adapter(folder: Path) -> dict[str, Any]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.slow
def test_it_resumes_exactly_on_the_device_and_saves_an_adapter_that_is_measured_alike(
    qwen3: str, desk: Path, finetune: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    (desk / "train.txt").write_text("\n".join(builders.TEXTS * 3), encoding="utf-8")
    (desk / "q.yaml").write_text(RECIPE.format(model=qwen3), encoding="utf-8")
    whole = finetune("q.yaml", "output_dir=whole")
    assert whole.code == 0, whole.err
    results = json.loads((desk / "whole" / "results.json").read_text(encoding="utf-8"))
    choices = results["choices"]
    assert choices["quantization"]["value"] == "nf4"
    assert "the recipe says so: 14 linear layers, " in choices["quantization"]["reason"]
    assert "merged, weights would be rounded again; next, for whole ones: hf-mps export merged" in str(choices)
    assert results["metrics"]["loss"] < results["baseline"]["metrics"]["loss"] - 0.05
    assert results["unexpected_fallback"] == []
    assert 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")' in (desk / "whole/README.md").read_text()
    assert not list((desk / "whole").glob("model*.safetensors"))

    shutil.copytree(desk / "whole" / "checkpoint-2", desk / "half")
    again = finetune("q.yaml", "output_dir=again", f"training.resume_from_checkpoint={desk / 'half'}")
    assert again.code == 0, again.err
    ours, theirs = adapter(desk / "again"), adapter(desk / "whole")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(weight.abs().sum() > 0 for name, weight in ours.items() if "lora_B" in name)

    capfd.readouterr()
    assert main(["evaluate", "whole", "--json"]) == 0
    said = capfd.readouterr()
    measured = json.loads(said.out)["splits"]["validation"]["metrics"]
    assert measured == pytest.approx({name: results["metrics"][name] for name in measured})


def test_preferences_train_adapters_in_float32_over_it(qwen3: str, tmp_path: Path) -> None:
    """TRL's DPOTrainer rounds them to bfloat16, where a step of 5e-6 is lost."""
    rows = [{"question": f"Is it {n}?", "chosen": "Yes, it is.", "rejected": "The moon."} for n in range(4)]
    file = str(tiny.write_jsonl(tmp_path / "pairs.jsonl", rows))
    data = {"files": {"train": file, "validation": file}, "columns": {"prompt": "question"}}
    prepared = builders.prepare(
        task="dpo", model=qwen3, data=data, max_length=64, lora={"r": 4}, quantization="nf4", weights="bfloat16"
    )
    trained = {name: each.clone() for name, each in prepared.model.named_parameters() if each.requires_grad}
    trainer = builders.trainer(prepared, tmp_path / "run", use_cpu=True)
    now = {name: each for name, each in trainer.model.named_parameters() if each.requires_grad}
    assert {each.dtype for each in now.values()} == {torch.float32}
    assert all(torch.equal(now[name], each) for name, each in trained.items())


@pytest.mark.parametrize(
    ("stored", "given", "line"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            [],
            snapshot(
                "model {model}: its weights are quantized by GPTQ, above which nothing trains here; next: the model"
                " that it was made from, with quantization=nf4"
            ),
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            [],
            snapshot("model {model}: its weights are int8 already, and quantization is nf4; next: quantization=int8"),
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            ["quantization=null", "lora=null"],
            snapshot("model {model}: its weights are nf4 of bitsandbytes; next: quantization=nf4 with lora"),
        ),
    ],
    ids=["GPTQ", "another kind", "not said"],
)
def test_validation_refuses_quantized_weights_that_do_not_fit_in_the_words_of_a_run(
    qwen3: str, desk: Path, finetune: Command, stored: dict[str, Any], given: list[str], line: str
) -> None:
    shutil.copytree(qwen3, desk / "rounded")
    config = json.loads((desk / "rounded/config.json").read_text(encoding="utf-8"))
    (desk / "rounded/config.json").write_text(json.dumps(config | {"quantization_config": stored}), encoding="utf-8")
    (desk / "train.txt").write_text("\n".join(builders.TEXTS), encoding="utf-8")
    (desk / "q.yaml").write_text(RECIPE.format(model="rounded"), encoding="utf-8")
    ran = finetune("q.yaml", *given)
    [problem] = checks.problems("q.yaml", given)
    model = ran.err.split()[2].rstrip(":")
    assert (ran.code, ran.err) == (2, f"hf-mps: {line.format(model=model)}\n")
    assert str(problem) == f"q.yaml:2: {line.format(model=model)}"
