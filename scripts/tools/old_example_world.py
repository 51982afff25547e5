"""Tiny models and data for the example scripts of older transformers releases: all that they read, with no network.

Every file is made here from a few sentences; nothing of anybody's data is in it.
"""

from __future__ import annotations

import csv
import json
import wave
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 16
_NOUNS = ("cat", "dog", "house", "garden", "river", "teacher", "market", "winter")
_VERBS = ("sees", "likes", "finds", "leaves", "paints", "crosses")
TEXTS = tuple(f"The {noun} {verb} the {other}." for noun in _NOUNS for verb in _VERBS for other in _NOUNS[:3])
SIZE = 32  # pixels
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
# The head of a data set's page, where load_dataset reads its configurations, files and columns.
XNLI = """---
dataset_info:
- config_name: en
  features:
  - name: premise
    dtype: string
  - name: hypothesis
    dtype: string
  - name: label
    dtype:
      class_label:
        names:
          '0': entailment
          '1': neutral
          '2': contradiction
configs:
- config_name: en
  data_files:
  - split: train
    path: train.json
  - split: validation
    path: validation.json
  - split: test
    path: test.json
---
"""


def make(folder: Path) -> None:
    """Write `models/`, the data files and the data set folders below `folder`."""
    _texts(folder)
    _data_sets(folder)
    _images(folder)
    _sounds(folder)
    _sentence_splitter(folder)
    for name, write in MODELS.items():
        write(folder / "models" / name)


def _rows(make_one: Callable[[int, str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    return [make_one(at, TEXTS[at], TEXTS[-1 - at]) for at in range(ROWS)]


def _lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _answer(at: int, text: str, other: str) -> dict[str, Any]:
    noun = text.split()[1]
    answers = {"text": [noun], "answer_start": [text.index(noun)]}
    return {"id": str(at), "title": "t", "context": f"{text} {other}", "question": "Who is it?", "answers": answers}


def _texts(folder: Path) -> None:
    (folder / "text.txt").write_text("\n".join(TEXTS * 4), encoding="utf-8")
    pairs = _rows(lambda at, text, other: {"sentence1": text, "sentence2": other, "label": f"l{at % 2}"})
    with (folder / "pairs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(pairs[0]))
        writer.writeheader()
        writer.writerows(pairs)
    questions = {"version": "v2.0", "data": _rows(_answer)}
    (folder / "questions.json").write_text(json.dumps(questions), encoding="utf-8")
    tags = ("O", "B-X")

    def tagged(at: int, text: str, other: str) -> dict[str, Any]:
        return {"tokens": text.split(), "ner_tags": [tags[word in ("cat", "dog")] for word in text.split()]}

    _lines(folder / "words.json", _rows(tagged))
    endings = {f"ending{number}": _NOUNS[number] for number in range(4)}
    choices = _rows(lambda at, text, _: {"sent1": text, "sent2": "It", **endings, "label": at % 4})
    _lines(folder / "endings.json", choices)
    _lines(folder / "summaries.json", _rows(lambda at, text, other: {"text": f"{text} {other}", "summary": text}))
    translation = _rows(lambda at, text, other: {"translation": {"en": text, "de": other}})
    _lines(folder / "translation.json", translation)


def _data_sets(folder: Path) -> None:
    """Folders with the hub's names, which load_dataset finds before it asks the hub."""
    nli = _rows(lambda at, text, other: {"premise": text, "hypothesis": other, "label": at % 3})
    for split in ("train", "validation", "test"):
        _lines(folder / "xnli" / f"{split}.json", nli)
    (folder / "xnli" / "README.md").write_text(XNLI, encoding="utf-8")


def _images(folder: Path) -> None:
    from PIL import Image

    random = np.random.default_rng(0)
    captions = []
    for split in ("train", "validation"):
        for at in range(ROWS):
            path = folder / "images" / split / ("dark", "light")[at % 2] / f"{at}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 120, (40, 48, 3), dtype=np.uint8) + np.uint8(120 * (at % 2))
            Image.fromarray(pixels).save(path)
            captions.append({"image_path": str(path), "caption": TEXTS[at]})
    _lines(folder / "captions.json", captions)


def _sounds(folder: Path) -> None:
    random = np.random.default_rng(0)
    for split in ("train", "validation"):
        rows = []
        for at in range(ROWS):
            path = folder / "sounds" / split / f"{at}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            with wave.open(str(path), "wb") as file:
                file.setparams((1, 2, 16_000, 0, "NONE", ""))
                file.writeframes((random.standard_normal(16_000) * 3000).astype("<i2").tobytes())
            rows.append({"file_name": path.name, "label": ("low", "high")[at % 2], "text": TEXTS[at]})
        _lines(folder / "sounds" / split / "metadata.jsonl", rows)


def _sentence_splitter(folder: Path) -> None:
    """What nltk's sentence splitter reads, with no abbreviations: the summarization scripts ask for it."""
    tables = folder / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    tables.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (tables / name).write_text("", encoding="utf-8")
    (folder / "nltk_data" / "tokenizers" / "punkt").mkdir()


def _text_model(name: str, words: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        from hf_mps.finetune import smoke
        from hf_mps.finetune.smoke.processors import Family

        smoke.write(Family(name, "text", words, {}), folder, TEXTS, 0)  # type: ignore[arg-type]  # one of its kinds

    return write


def _image_model(name: str, **more: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        from transformers import AutoConfig, AutoModel

        from hf_mps.finetune import smoke

        folder.mkdir(parents=True)
        smoke.image_processor(folder, (SIZE, SIZE), "ViTImageProcessor")
        config = AutoConfig.for_model(name, **TINY, image_size=SIZE, patch_size=8, **more)
        AutoModel.from_config(config).save_pretrained(folder)

    return write


def _clip(folder: Path) -> None:
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    from hf_mps.finetune.smoke.processors import train

    tokenizer = train("wordpiece", TEXTS, parts=False)
    tokenizer.save_pretrained(folder)
    text = CLIPTextConfig(**TINY, vocab_size=len(tokenizer), projection_dim=8, eos_token_id=tokenizer.sep_token_id)
    vision = CLIPVisionConfig(**TINY, image_size=SIZE, patch_size=8, projection_dim=8)
    config = CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8)
    CLIPModel(config).save_pretrained(folder)
    square = {"height": SIZE, "width": SIZE}
    CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=square).save_pretrained(folder)


def _sound_model(folder: Path) -> None:
    from hf_mps.finetune import smoke
    from hf_mps.finetune.smoke.processors import Family

    smoke.write(Family("wav2vec2", "sound", "", {}), folder, TEXTS, 0)


MODELS: dict[str, Callable[[Path], None]] = {
    "bert": _text_model("bert", "wordpiece"),
    "gpt2": _text_model("gpt2", "bytes"),
    "t5": _text_model("t5", "pieces"),
    "xlnet": _text_model("xlnet", "pieces"),
    "vit": _image_model("vit"),
    "vit_mae": _image_model("vit_mae", **dict.fromkeys(("decoder_hidden_size", "decoder_intermediate_size"), 16)),
    "clip": _clip,
    "wav2vec2": _sound_model,
}
