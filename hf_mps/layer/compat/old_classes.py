"""AutoModelWithLMHead, TextDataset, DataCollatorForWholeWordMask …: classes that transformers 5 removed.

AutoModelWithLMHead chose between a causal, a masked and a sequence-to-sequence language model; the three
AutoModelFor…LM replaced it (4.0). The order of the three is that of its mapping in 4.46. Text files as rows were
replaced by datasets.load_dataset("text") with a tokenizer, whole-word masking by
DataCollatorForLanguageModeling(whole_word_mask=True). Nothing is cached on disk: the old caches ignored a changed
tokenizer.
"""

from __future__ import annotations

import json
from collections import ChainMap
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    DataCollatorForLanguageModeling,
)

_THREE = {
    AutoModelForSeq2SeqLM: MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForMaskedLM: MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
}


MODEL_WITH_LM_HEAD_MAPPING = ChainMap(*_THREE.values())
"""Configuration class -> model class; a model's file is imported when its class is asked for."""


class AutoModelWithLMHead:
    """A language model of whichever kind the configuration has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise OSError("AutoModelWithLMHead is made by from_pretrained(name) or from_config(config)")

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """Return a model with random weights. Raises ValueError for a configuration without a language model."""
        return _class_of(config).from_config(config, **kwargs)

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the model `name`. Raises what its class's from_pretrained raises, and ValueError as from_config."""
        hub = {key: kwargs[key] for key in ("cache_dir", "revision", "token", "use_auth_token") if key in kwargs}
        config = kwargs.get("config") or AutoConfig.from_pretrained(name, **hub)
        return _class_of(config).from_pretrained(name, *args, **kwargs)


def _class_of(config: Any) -> Any:
    """Return the class of today that makes a model of that configuration."""
    found = next((auto for auto, mapping in _THREE.items() if type(config) in mapping), None)
    if found is None:
        raise ValueError(f"{type(config).__name__} has no language model; next: AutoModel.from_pretrained")
    return found


Rows = list[dict[str, torch.Tensor]]


def _file(path: str) -> Path:
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"Input file path {path} not found")
    return file


def _lines(path: str) -> list[str]:
    return [line for line in _file(path).read_text(encoding="utf-8").splitlines() if line.strip()]


class _Examples(Dataset):  # type: ignore[type-arg]
    examples: list[Any]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> Any:
        return self.examples[row]


class TextDataset(_Examples):
    """One text file cut into blocks of `block_size` tokens, special tokens included; the rest at its end is dropped.

    Row: the ids, int64 of length `block_size`. Raises ValueError for a path that is no file.
    """

    def __init__(
        self, tokenizer: Any, file_path: str, block_size: int, overwrite_cache: bool = False, cache_dir: Any = None
    ) -> None:
        block = block_size - tokenizer.num_special_tokens_to_add(pair=False)
        text = _file(file_path).read_text(encoding="utf-8")
        ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        starts = range(0, len(ids) - block + 1, block)
        self.examples = [tokenizer.build_inputs_with_special_tokens(ids[at : at + block]) for at in starts]

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.tensor(self.examples[row], dtype=torch.long)


class LineByLineTextDataset(_Examples):
    """A text file with a row for each line that is not blank, cut at `block_size` tokens.

    Row: {"input_ids": int64}. Raises ValueError for a path that is no file.
    """

    def __init__(self, tokenizer: Any, file_path: str, block_size: int) -> None:
        self.examples = _encoded(tokenizer, _lines(file_path), block_size)


class LineByLineWithRefDataset(_Examples):
    """As LineByLineTextDataset, with a file of JSON lists beside it that mark the parts of Chinese words.

    Row: {"input_ids": int64, "chinese_ref": int64}. Raises ValueError where the files do not have the same lines.
    """

    def __init__(self, tokenizer: Any, file_path: str, block_size: int, ref_path: str) -> None:
        lines, marks = _lines(file_path), _lines(ref_path)
        if len(lines) != len(marks):
            raise ValueError(f"{file_path} has {len(lines)} lines, {ref_path} {len(marks)}: they belong line to line")
        self.examples = _encoded(tokenizer, lines, block_size)
        for row, mark in zip(self.examples, marks, strict=True):
            row["chinese_ref"] = torch.tensor(json.loads(mark), dtype=torch.long)


def _encoded(tokenizer: Any, lines: list[str], length: int) -> Rows:
    ids = tokenizer(lines, add_special_tokens=True, truncation=True, max_length=length)["input_ids"] if lines else []
    return [{"input_ids": torch.tensor(row, dtype=torch.long)} for row in ids]


class DataCollatorForWholeWordMask(DataCollatorForLanguageModeling):  # type: ignore[misc]
    """DataCollatorForLanguageModeling with whole_word_mask=True."""

    def __post_init__(self) -> None:
        self.whole_word_mask = True
        super().__post_init__()
