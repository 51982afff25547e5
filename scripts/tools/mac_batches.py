"""Experiments of on_a_mac.py with batches and processes: copies that nobody waits for, children, loaders' workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

Told = dict[str, Any]


def copies(steps: int = 100) -> Told:
    """Copies with non_blocking=True whose source is given back at once, by stock torch and with the layer."""
    import torch

    from hf_mps.layer import guards

    def wrong() -> int:
        there = []
        for step in range(steps):
            source = torch.full((2**18,), float(step))
            there.append(source.to("mps", non_blocking=True))
            del source
            torch.full((2**18,), -1.0)  # what the memory is used for next
        return sum(bool((each.cpu() != step).any()) for step, each in enumerate(there))

    with guards.suspended():
        stock = wrong()
    layer = wrong()
    return {"as_expected": layer == stock == 0, "wrong_stock": stock, "wrong_with_layer": layer, "copies": steps}


def fork(steps: int = 1) -> Told:
    """Whether a child that is forked after `import torch` can use the device, as it can where hf_mps is off."""
    program = (
        "import os, torch\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(0 if (torch.ones(4, device='mps') + 1).sum().item() == 8 else 3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    ended = {}
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "HF_MPS": value},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for name, value in (("off", "0"), ("on", "1"))
    }
    for name, process in running.items():
        try:
            out, _ = process.communicate(timeout=120)
            ended[name] = out.strip()
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            ended[name] = "no end in 120 s"
    return {"as_expected": ended["on"] in ("0", ended["off"]), "exit_code_of_the_child": ended}


def workers(steps: int = 20) -> Told:
    """How long a Trainer with two loader workers takes, whose process has used the device before."""
    import tempfile

    import torch
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, x: Any, labels: Any) -> Told:
            scores = self.layer(x)
            return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}

    torch.ones(4, device="mps").sum().item()
    rows = [{"x": torch.ones(4) * n, "labels": torch.tensor(n % 2)} for n in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, dataloader_num_workers=2, report_to=[], save_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        begun = time.perf_counter()
        done = Trainer(Model(), arguments, train_dataset=rows).train()
        seconds = time.perf_counter() - begun
    return {"as_expected": done.global_step == steps, "seconds": seconds, "steps": done.global_step}


def batches(steps: int = 100) -> Told:
    """Whether batches that are filled into the same memory arrive whole, and what a wait for each of them costs."""
    import accelerate
    import torch

    from hf_mps.layer import guards

    layer, memory = torch.nn.Linear(1024, 1024, device="mps"), torch.empty(256, 1024).numpy()

    def run() -> tuple[int, float]:
        begun, last = time.perf_counter(), []
        for step in range(steps):
            memory.fill(step)
            there = accelerate.data_loader.send_to_device({"x": torch.from_numpy(memory)}, torch.device("mps"))
            layer(there["x"]).relu().square().mean().backward()
            last.append(there["x"][-1, -1])
        torch.mps.synchronize()
        return sum(each.item() != step for step, each in enumerate(last)), (time.perf_counter() - begun) / steps

    with guards.suspended():
        waiting = (run(), run())[1][1]  # the first compiles what both use
    wrong, seconds = run()
    return {"as_expected": wrong == 0, "wrong": wrong, "seconds": seconds, "seconds_stock": waiting, "steps": steps}
