"""Models to export, made once: a classifier, a Llama that knows stories, and an adapter on it; and the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.finetune import tiny
from tests.finetune.tiny import Ended


@pytest.fixture(scope="session")
def libraries() -> None:
    """Imports what sets environment variables when it is first imported: no single test is to answer for it."""
    import sklearn  # noqa: F401


@pytest.fixture(scope="session")
def classifier(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers with three classes."""
    import torch
    from transformers import AutoModelForSequenceClassification

    folder = tiny.model(tmp_path_factory.mktemp("classifier") / "sorter")
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def stories(libraries: None, shared_data: Path) -> Path:
    """A Llama of 260,032 weights that has learned to write."""
    return shared_data / "models" / "stories260K"


@pytest.fixture(scope="session")
def adapted(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter on `stories`, saved by peft; its part of the logits is no rounding."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("adapted") / "teller"
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", use_rslora=True)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(stories), config)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.03)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(stories).save_pretrained(folder)
    return folder


@pytest.fixture
def hf_mps(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run `hf-mps *arguments` in this process."""
    from hf_mps.cli.main import main

    def run(*arguments: str | Path) -> Ended:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Ended(code, out, err)

    return run


def record(folder: Path) -> Any:
    """What stands beside an export."""
    return json.loads((folder / "hf-mps-export.json").read_text(encoding="utf-8"))
