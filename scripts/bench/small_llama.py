"""Trains a small Llama on real text, for measurements that want weights that have learned something.

    python scripts/bench/small_llama.py ../shared/data FOLDER [--steps 400]

Hidden 256, 3 layers, a byte-level BPE of 2,048 tokens, 2.9 M parameters: learned from the validation and test texts of
WikiText-2 and the sentences of SST-2 and CoLA in float32 on the CPU, 400 steps of 4 x 256 tokens, to a held-out loss of
5.26; 9 minutes on a core that others use too. FOLDER gets the model and its tokenizer as from_pretrained reads them.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from pathlib import Path
from typing import Any

VOCABULARY, WIDTH, LAYERS, INNER, HEADS = 2048, 256, 3, 704, 4
ROWS, TOKENS = 4, 256
RATE, WARMUP = 2e-3, 40
END = "<|end|>"
HELD_OUT = 0.02
"""Of the tokens, for the loss that is printed."""


def make(data: Path, folder: Path, *, steps: int = 400, seed: int = 0) -> Path:
    """Train a model on the texts of `data` and write it to `folder`; return the folder."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    said = texts(data)
    tokenizer = tokenizer_of(said)
    ids = torch.tensor([token for row in tokenizer(said)["input_ids"] for token in [*row, tokenizer.eos_token_id]])
    cut = round(len(ids) * (1 - HELD_OUT))
    model: Any = LlamaForCausalLM(_config(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {cut / 1e3:.0f} k tokens", flush=True)
    started = time.perf_counter()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = _rate(step, steps)
        at = torch.randint(cut - TOKENS, (ROWS,))
        batch = torch.stack([ids[start : start + TOKENS] for start in at.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49 or step == steps - 1:
            told = f"step {step + 1}  loss {loss.item():.3f}  held out {_held_out(model, ids[cut:]):.3f}"
            print(f"{told}  {time.perf_counter() - started:.0f} s", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _rate(step: int, steps: int) -> float:
    """A rise of WARMUP steps, and half a cosine down to a tenth."""
    return RATE * min((step + 1) / WARMUP, 0.55 + 0.45 * math.cos(math.pi * step / steps))


def _held_out(model: Any, ids: Any) -> float:
    import torch

    whole = ids[: len(ids) // TOKENS * TOKENS].reshape(-1, TOKENS)
    with torch.no_grad():
        losses = [model(input_ids=rows, labels=rows).loss.item() * len(rows) for rows in whole.split(ROWS)]
    return sum(losses) / len(whole)


def texts(data: Path) -> list[str]:
    """Return WikiText-2's paragraphs, and the sentences of SST-2 and CoLA that were found good."""
    found = []
    for name in ("wiki.valid.tokens", "wiki.test.tokens"):
        lines = (data / "wikitext2" / name).read_text(encoding="utf-8").splitlines()
        found += [line.strip() for line in lines if len(line.strip()) > 40]
    for name in ("glue_sst2/train.csv", "glue_cola/train.csv"):
        with (data / name).open(encoding="utf-8", newline="") as opened:
            rows = list(csv.DictReader(opened))
        found += [row["sentence"] for row in rows if name.startswith("glue_sst2") or row["label"] == "1"]
    return found


def tokenizer_of(said: list[str]) -> Any:
    """Return a byte-level BPE tokenizer of these texts."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(said, VOCABULARY, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token=END, bos_token=END, pad_token=END, model_max_length=2048
    )


def _config(tokenizer: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )


def main() -> int:
    """Train one and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path, help="the folder shared/data")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    make(given.data, given.folder, steps=given.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
