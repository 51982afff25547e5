"""Makes a corpus of any size as JSON lines, and a small language model with a tokenizer for it; nothing is kept.

python scripts/bench/corpus.py FOLDER --gigabytes 20

Documents are drawn from a vocabulary of made-up words whose frequencies fall as Zipf's law says, between a few words
and some thousand long. A few thousand of them are drawn, and files are filled with random ones of these, numbered, at
the speed of the disk: each row is another one to a hash, and as much work to read and to tokenise as any.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

WORDS, DOCUMENTS = 20_000, 4_000
FILE = 512 * 2**20
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def write(folder: Path, size: int, *, file: int = FILE, seed: int = 0) -> list[Path]:
    """Write `size` bytes of rows {"text", "id"} into files of at most `file` bytes; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    documents = [json.dumps({"text": text})[:-1].encode() for text in texts(draw)]
    paths, number, left = [], 0, size
    while left > 0:
        path = folder / f"part-{len(paths):04d}.jsonl"
        written = 0
        with path.open("wb") as opened:
            while written < min(file, left):
                rows = [b'%s, "id": %d}\n' % (draw.choice(documents), number + row) for row in range(256)]
                number += len(rows)
                written += opened.write(b"".join(rows))
        left -= written
        paths.append(path)
    return paths


def texts(draw: random.Random) -> list[str]:
    """Return DOCUMENTS texts of sentences."""
    words = ["".join(draw.choices(LETTERS, range(26, 0, -1), k=draw.randint(2, 10))) for _ in range(WORDS)]
    shares = [1 / (rank + 2) for rank in range(WORDS)]
    made = []
    for _ in range(DOCUMENTS):
        count = min(4000, max(8, round(draw.lognormvariate(5.5, 1.0))))
        said = draw.choices(words, shares, k=count)
        made.append(". ".join(" ".join(said[at : at + 12]) for at in range(0, count, 12)) + ".")
    return made


def model(folder: Path, *, layers: int, width: int, vocabulary: int = 8192, positions: int = 1024) -> Path:
    """Write a GPT-2 of that size with random weights, and a byte-level BPE tokenizer of the corpus's texts."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts(random.Random(1))[:1000], vocabulary, special_tokens=["<|endoftext|>"])
    folder.mkdir(parents=True, exist_ok=True)
    trained.save_model(str(folder))
    GPT2TokenizerFast.from_pretrained(folder, model_max_length=positions).save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=positions, n_embd=width, n_layer=layers, n_head=max(1, width // 64)
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def main() -> None:
    """Write a corpus."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="its size (default %(default)s)")
    given = parser.parse_args()
    files = write(given.folder, round(given.gigabytes * 1e9))
    print(f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e9:.2f} GB in {given.folder}")


if __name__ == "__main__":
    main()
