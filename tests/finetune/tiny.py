"""A BERT of a few thousand parameters with a tokenizer of its own, made on the spot, and rows that it can learn."""

from __future__ import annotations

import csv
import json
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

RECIPE = """# Tell good from bad.
task: text-classification
model: model
data:
  files: {train: train.csv, validation: dev.csv}
  columns: {text: first, text_pair: second}
metrics: [f1, accuracy]
seed: 1
training:
  per_device_train_batch_size: 8
  learning_rate: 5e-3
  num_train_epochs: 1
"""

ANIMALS = ("cat", "dog", "bird")
PLACES = ("mat", "tree", "house")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY = (*SPECIAL, "the", "it", "is", "was", "on", "good", "bad", *ANIMALS, *PLACES)


class Ended(NamedTuple):
    """How a command ended: its exit code and what it printed."""

    code: int
    out: str
    err: str

    def finished(self) -> Ended:
        """Itself, of a command that ended well and said nothing to stderr."""
        assert (self.code, self.err) == (0, ""), self.err
        return self

    def refused(self) -> str:
        """The one line that a command was refused in, behind `hf-mps: `."""
        assert (self.code, self.out, self.err[:8], self.err.count("\n")) == (2, "", "hf-mps: ", 1), self
        return self.err[8:-1]


Command = Callable[..., Ended]
Stop = Callable[..., None]


def model(folder: Path) -> Path:
    """Write a two-layer BERT with random weights and its tokenizer into `folder`, and return it."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    ids = {word: number for number, word in enumerate(VOCABULARY)}
    BertTokenizerFast(vocab=ids, model_max_length=64).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def rows(count: int, offset: int = 0) -> list[dict[str, Any]]:
    """`count` rows of a pair of texts and a label: 1 where the first holds the word `good`."""
    made = []
    for number in range(offset, offset + count):
        animal, place = ANIMALS[number % 3], PLACES[number // 2 % 3]
        label = (number // 3) % 2
        made.append(
            {
                "first": f"the {animal} is {'good' if label else 'bad'}",
                "second": f"it was on the {place}",
                "label": label,
            }
        )
    return made


def write_jsonl(path: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as JSON lines, and return the path."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def write_csv(path: Path, lines: Iterable[Mapping[str, Any]], delimiter: str = ",") -> Path:
    """Write rows as a csv with a header, and return the path."""
    lines = list(lines)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(lines)
    return path


def interrupt_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C, once, in the next evaluation's first batch."""
    from transformers import Trainer

    prediction_step = Trainer.prediction_step

    def predicted(self: Any, *arguments: Any, **settings: Any) -> Any:
        monkeypatch.setattr(Trainer, "prediction_step", prediction_step)
        os.kill(os.getpid(), signal.SIGINT)
        return prediction_step(self, *arguments, **settings)

    monkeypatch.setattr(Trainer, "prediction_step", predicted)
