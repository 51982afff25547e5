"""A small Llama, its tokenizer of whole words and rows for it, in a folder."""

from __future__ import annotations

import random
from pathlib import Path

WORDS = 600


def language_model(folder: Path, **sizes: int) -> list[str]:
    """Write them, and return the words of a causal-lm recipe that trains it in a few steps on the CPU."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2} | sizes
    wide = {"intermediate_size": 4 * shape["hidden_size"], "max_position_embeddings": 256, "vocab_size": WORDS}
    LlamaForCausalLM(LlamaConfig(**shape, **wide)).save_pretrained(folder / "model")
    known = {word: number for number, word in enumerate(["</s>", *(f"w{number}" for number in range(WORDS - 1))])}
    made = Tokenizer(models.WordLevel(known, unk_token="</s>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(folder / "model")
    draw = random.Random(0)
    for split, rows in (("train", 120), ("validation", 8)):
        lines = (" ".join(f"w{draw.randrange(400)}" for _ in range(64)) for _ in range(rows))
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = [f"data.files.{split}={folder / split}.txt" for split in ("train", "validation")]
    said = [f"model={folder / 'model'}", *files, "max_length=64", "training.per_device_train_batch_size=4"]
    said += ["training.gradient_accumulation_steps=1", "training.eval_on_start=false", "training.logging_steps=1"]
    return [*said, "training.eval_strategy=no", "training.learning_rate=1e-3"]
