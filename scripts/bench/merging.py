"""Peak memory of merging a LoRA adapter: shard by shard, against peft's merge_and_unload and save_pretrained.

python scripts/bench/merging.py [--width 1024] [--layers 8] [--kind nf4]

Makes a Llama with random weights in bfloat16 and an adapter on every linear layer, merges it both ways in processes of
their own, and prints what each took at peak over what it took with the model loaded, and the ratio. With --kind the
base is quantized; peft then merges into the rounded weights, and its model stays in 4 bits.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

WAYS = ("ours", "peft")
SHARD = 50 * 10**6
"""Bytes; small, as the model is."""


def make(folder: Path, width: int, layers: int) -> None:
    """Write the base model and its adapter."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=width * 4,
        num_hidden_layers=layers,
        num_attention_heads=16,
    )
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    model = LlamaForCausalLM.from_pretrained(folder / "base")
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapted.save_pretrained(folder / "adapter")


def merge(way: str, folder: Path, kind: str | None) -> dict[str, float]:
    """Merge one way in this process; return MiB that are held: with the model loaded, and at most while merging."""
    import psutil
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from hf_mps.finetune.models import quantization
    from hf_mps.tools.export import merged
    from hf_mps.tools.saved.run import open_run

    settings = {"quantization_config": quantization.config(kind, "bfloat16"), "device_map": {"": "cpu"}} if kind else {}
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16, **settings)
    model = PeftModel.from_pretrained(base, folder / "adapter")
    process, peak, over = psutil.Process(), [0.0], threading.Event()

    def held() -> float:
        whole = process.memory_info()
        return (
            whole.rss - getattr(whole, "shared", 0)
        ) / 2**20  # without the checkpoint's pages, which can go any time

    def watch() -> None:
        while not over.wait(0.005):
            peak[0] = max(peak[0], held())

    loaded, watcher = held(), threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    if way == "ours":
        merged.save(open_run(str(folder / "base")), model, folder / way, "bf16", shard=SHARD)
    else:
        model.merge_and_unload().save_pretrained(folder / way)
    seconds = time.perf_counter() - began
    over.set()
    watcher.join()
    return {"loaded": loaded, "peak": max(peak[0], held()), "seconds": seconds}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--width", type=int, default=1024)
    words.add_argument("--layers", type=int, default=8)
    words.add_argument("--kind", choices=["nf4", "fp4", "int8"])
    words.add_argument("--in-process", nargs=2, help=argparse.SUPPRESS)
    said = words.parse_args()
    if said.in_process:
        print(json.dumps(merge(said.in_process[0], Path(said.in_process[1]), said.kind)))
        return
    with tempfile.TemporaryDirectory() as place:
        make(Path(place), said.width, said.layers)
        found = {}
        for way in WAYS:
            kind = ["--kind", said.kind] if said.kind else []
            done = subprocess.run(
                [sys.executable, __file__, "--in-process", way, place, *kind],
                capture_output=True,
                text=True,
                check=True,
            )
            found[way] = json.loads(done.stdout.splitlines()[-1])
            size = sum(file.stat().st_size for file in (Path(place) / way).glob("*.safetensors")) / 2**20
            more = found[way]["peak"] - found[way]["loaded"]
            print(
                f"{way:5} loaded {found[way]['loaded']:7.0f} MiB, at most {more:7.0f} MiB more while merging,"
                f" {found[way]['seconds']:5.1f} s, {size:.0f} MiB written"
            )
        more = {way: found[way]["peak"] - found[way]["loaded"] for way in WAYS}
        print(f"ours / peft  {more['ours'] / max(more['peft'], 1):.2f} of the memory beside the model")


if __name__ == "__main__":
    main()
