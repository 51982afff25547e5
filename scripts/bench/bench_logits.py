"""Peak memory of a causal language model's training step: the stock Trainer, and its loss taken in chunks.

    python scripts/bench/bench_logits.py
    python scripts/bench/bench_logits.py --layers 4 --batch 2

A Qwen2 of 151,936 words and width 896 with few layers and random weights, tied as Qwen2-0.5B is, batches of 4 x 512
tokens, Trainer's own settings, two steps each (the second holds the optimizer's state), on the device mps: simulated,
where there is no Mac. Exit code 1 where the chunked peak is more than half of the stock one, or the losses differ.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if sys.platform != "darwin":
    os.environ.setdefault("HF_MPS_SIMULATE", "1")

import measured_on
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

from hf_mps.finetune.loss import deferred_head
from hf_mps.metal import simulator
from hf_mps.metal.device import memory

STEPS = 2


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value, what in (
        ("words", 151_936, "words in the vocabulary"),
        ("width", 896, "the hidden size"),
        ("layers", 2, "decoder layers"),
        ("batch", 4, "rows of a batch"),
        ("length", 512, "tokens of a row"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{what} (default {value})")
    given = parser.parse_args()
    print(measured_on.line())
    peaks, losses = {}, {}
    for name in ("stock Trainer", "loss in chunks"):
        peaks[name], losses[name], seconds = measured(given, chunks=name != "stock Trainer")
        print(f"{name:<16}{peaks[name] / 2**20:10.0f} MiB peak   loss {losses[name]:.6f}   {seconds:6.1f} s a step")
        gc.collect()
    stock, ours = peaks.values()
    print(f"in chunks / stock  {ours / stock:.3f}")
    same = abs(losses["stock Trainer"] - losses["loss in chunks"]) < 1e-4
    return 0 if ours <= stock / 2 and same else 1


def measured(given: argparse.Namespace, *, chunks: bool) -> tuple[int, float, float]:
    """Peak bytes on the device, the mean loss and the seconds a step of one short training."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=given.words,
        hidden_size=given.width,
        num_hidden_layers=given.layers,
        num_attention_heads=given.width // 64,
        num_key_value_heads=2,
        intermediate_size=given.width * 5,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = Qwen2ForCausalLM(config)
    if chunks and (choice := deferred_head.install(model)).value != deferred_head.CHUNKS:
        raise SystemExit(str(choice))
    rows = torch.randint(given.words, (STEPS * given.batch, given.length))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=given.batch, max_steps=STEPS, report_to="none", disable_tqdm=True
        )
        trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
        simulator.reset_peak_memory()
        start = time.perf_counter()
        with memory.Peak("mps") as peak:
            loss = trainer.train().training_loss
        seconds = (time.perf_counter() - start) / STEPS
    # The simulated device counts tensors exactly; a Mac has no call for a peak, so there the driver's is sampled.
    return simulator.peak_memory() or peak.result.value, loss, seconds


if __name__ == "__main__":
    sys.exit(main())
