"""A program for the tests: imports in the order it is told, and prints as JSON which device each library takes.

    python report_devices.py torch activate transformers accelerate lightning.pytorch use_cpu=True …

A word with "=" is an argument of what follows the imports: use_cpu, cpu, accelerator, devices; `fail` makes the device
refuse each allocation, `cuda` makes torch believe in a CUDA GPU.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
import tempfile


def main(words: list[str]) -> None:
    before = dict(os.environ)
    given = {name: value(text) for name, _, text in (word.partition("=") for word in words if "=" in word)}
    done: dict[str, object] = {}
    for word in words:
        if "=" not in word:
            bring(word)
    for name in ("transformers", "accelerate", "lightning.pytorch", "pytorch_lightning"):
        if name in words:
            done.update(DEVICES[name](given))
    done["changed"] = sorted(name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name))
    print(json.dumps(done))


def bring(word: str) -> None:
    if word == "activate":
        from hf_mps.layer.activation.activate import activate

        activate()
    elif word == "simulate":
        from hf_mps.metal import simulator

        simulator.load("m1-8gb")
    elif word == "fail":
        import torch

        torch.mps.set_per_process_memory_fraction(1e-12)
    elif word == "cuda":
        import torch

        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: 1
        torch.cuda.get_device_name = lambda: "NVIDIA H200"
        torch.cuda.set_device = lambda device: None
    elif word == "ask":
        from transformers.utils import is_torch_mps_available

        is_torch_mps_available()
    else:
        importlib.import_module(word)


def value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def trainer(given: dict[str, object]) -> dict[str, str]:
    """A real Trainer that makes one step."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=16, **sizes))
    row = {"input_ids": torch.ones(4, dtype=torch.long), "labels": 1}
    with tempfile.TemporaryDirectory() as folder:
        keywords = {name: given[name] for name in ("use_cpu",) if name in given}
        arguments = TrainingArguments(
            folder, max_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, **keywords
        )
        if "cuda" in sys.argv and arguments.device.type == "cuda":
            return {"arguments": "cuda"}
        run = Trainer(model=model, args=arguments, train_dataset=[row] * 8)
        run.train()
    return {
        "arguments": arguments.device.type,
        "trainer": next(run.model.parameters()).device.type,
        "its accelerator": run.accelerator.device.type,
    }


def accelerator(given: dict[str, object]) -> dict[str, str]:
    """A plain loop with Accelerator, as in a notebook."""
    import torch
    from accelerate import Accelerator, PartialState
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    keywords = {name: given[name] for name in ("cpu",) if name in given}
    own = Accelerator(**keywords)
    second = Accelerator(**keywords)
    if own.device.type == "cuda":
        return {"accelerator": "cuda"}
    layer = torch.nn.Linear(2, 1)
    layer, optimizer = own.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    own.backward(layer(torch.ones(1, 2, device=own.device)).sum())
    optimizer.step()
    assert second.device == own.device
    return {
        "accelerator": own.device.type,
        "loop": layer.weight.device.type,
        "partial state": PartialState().device.type,
    }


def lightning(name: str, given: dict[str, object]) -> dict[str, str]:
    """A real Lightning Trainer that makes one step, and Fabric."""
    import torch

    library = importlib.import_module(name)
    fabric = importlib.import_module("lightning.fabric" if name.startswith("lightning.") else "lightning_fabric")

    class Module(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            self.where = batch.device.type
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    chosen = {name: given[name] for name in ("accelerator", "devices") if name in given}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = library.Trainer(max_steps=1, enable_model_summary=False, **quiet, **chosen)
    done = {name: trainer.strategy.root_device.type, f"{name} fabric": fabric.Fabric(**chosen).device.type}
    if trainer.strategy.root_device.type != "cuda":
        module = Module()
        trainer.fit(module, torch.utils.data.DataLoader(torch.ones(2, 2)))
        done[f"{name} step"] = module.where
    return done


DEVICES = {
    "transformers": trainer,
    "accelerate": accelerator,
    "lightning.pytorch": lambda given: lightning("lightning.pytorch", given),
    "pytorch_lightning": lambda given: lightning("pytorch_lightning", given),
}

if __name__ == "__main__":
    main(sys.argv[1:])
