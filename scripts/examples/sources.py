"""Where the example scripts get data and a small model from when they are given neither.

Data: the folder shared/data beside the checkout where it is there, and sentences made up here otherwise. Model: a
tokenizer of the data's own words and a configuration small enough to train from nothing in a minute.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
LABELS = ["label", "labels", "idx"]
_READERS = {"csv": "csv", "json": "json", "jsonl": "json", "txt": "text", "text": "text", "tokens": "text"}


def read(train_file: str | None, validation_file: str | None) -> DatasetDict:
    """Read csv, json or text files; without a validation file a tenth of the training rows takes its place."""
    files = {"train": train_file, "validation": validation_file}
    files = {split: str(file) for split, file in files.items() if file is not None}
    endings = {Path(file).suffix.lstrip(".") for file in files.values()}
    if len(endings) != 1 or not endings <= _READERS.keys():
        raise SystemExit(
            f"files of one of these endings are read: {', '.join(_READERS)}; given: {list(files.values())}"
        )
    rows = load_dataset(_READERS[endings.pop()], data_files=files)
    if "train" in rows and "validation" not in rows:
        halves = rows["train"].train_test_split(0.1, seed=0)
        rows = DatasetDict(train=halves["train"], validation=halves["test"])
    return rows


def sentences(task: str, train_file: str | None, validation_file: str | None) -> DatasetDict:
    """Rows of one or two sentences and a label: the given files, the GLUE task `task`, or made-up ones."""
    if train_file or validation_file:
        return read(train_file, validation_file)
    folder = SHARED / f"glue_{task}"
    if folder.is_dir():
        return read(folder / "train.csv", folder / "dev.csv")
    return _split(_opinions(600))


def tagged(train_file: str | None, validation_file: str | None) -> DatasetDict:
    """Rows of words and a tag for each: the given files, the CoNLL sample, or made-up ones."""
    if train_file or validation_file:
        return read(train_file, validation_file)
    sample = SHARED / "samples" / "conll" / "sample.json"
    if sample.is_file():
        rows = read(sample, sample)
        return DatasetDict(
            {split: part.rename_columns({"words": "tokens", "ner": "ner_tags"}) for split, part in rows.items()}
        )
    return _split(_journeys(400))


def text(train_file: str | None, validation_file: str | None) -> DatasetDict:
    """Lines of text: the given files, WikiText-2's validation and test parts, or made-up ones."""
    if train_file or validation_file:
        return read(train_file, validation_file)
    folder = SHARED / "wikitext2"
    if folder.is_dir():
        return read(folder / "wiki.test.tokens", folder / "wiki.valid.tokens")
    return _split([{"text": " ".join(row["tokens"])} for row in _journeys(800)])


def sentence_columns(rows: Dataset) -> list[str]:
    """The one or two columns that hold the sentences: those that are no label and no number of a row."""
    names = [name for name in rows.column_names if name not in LABELS]
    if not 1 <= len(names) <= 2:
        raise SystemExit(f"one or two columns of sentences are expected beside {LABELS}, these are there: {names}")
    return names


def word_tokenizer(texts: Iterable[str], *, pairs: bool = False, size: int = 4000) -> PreTrainedTokenizerFast:
    """A tokenizer of the `size` most frequent words of `texts`, with BERT's special tokens where `pairs`."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=size, special_tokens=special))
    if pairs:
        words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_max_length=512,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def _split(rows: list[dict[str, object]]) -> DatasetDict:
    cut = len(rows) * 4 // 5
    return DatasetDict(train=Dataset.from_list(rows[:cut]), validation=Dataset.from_list(rows[cut:]))


def _opinions(count: int) -> list[dict[str, object]]:
    draw = random.Random(0)
    things = ["the film", "the book", "this song", "her play", "that meal", "the match", "our trip"]
    words = (["dull", "slow", "sad", "cold", "poor"], ["bright", "quick", "glad", "warm", "rich"])
    rows: list[dict[str, object]] = []
    for number in range(count):
        label = draw.randrange(2)
        parts = [f"{draw.choice(things)} was {draw.choice(words[label])}" for _ in range(2)]
        rows.append({"sentence": " and ".join(parts), "label": label, "idx": number})
    return rows


def _journeys(count: int) -> list[dict[str, object]]:
    draw = random.Random(0)
    people, places = ["Anna Berg", "Tom", "Lena Hall", "Omar"], ["Rome", "New York", "Oslo", "Lima"]
    rows: list[dict[str, object]] = []
    for _ in range(count):
        who, there, here = draw.choice(people), draw.choice(places), draw.choice(places)
        parts = [(who, "PER"), ("travelled from", ""), (here, "LOC"), ("to", ""), (there, "LOC"), ("today .", "")]
        tokens, tags = [], []
        for phrase, kind in parts:
            for place, word in enumerate(phrase.split()):
                tokens.append(word)
                tags.append(f"{'I' if place else 'B'}-{kind}" if kind else "O")
        rows.append({"tokens": tokens, "ner_tags": tags})
    return rows
