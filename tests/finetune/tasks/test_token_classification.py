"""Tagging words: which token carries which tag, what is measured, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from inline_snapshot import snapshot
from transformers import ByT5Tokenizer, RobertaConfig, RobertaModel, RobertaTokenizer

from hf_mps.core.errors import UserError
from hf_mps.finetune.tasks import token_classification
from tests.finetune import tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command

RECIPE = """# Tag animals and places.
task: token-classification
model: model
data:
  files: {train: train.jsonl, validation: dev.jsonl}
seed: 1
training:
  per_device_train_batch_size: 8
  learning_rate: 1e-2
  num_train_epochs: 4
"""


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Sentences of the tiny model's words: animals are names of two words (`the cat`), places of one."""
    draw, made = random.Random(seed), []
    for _ in range(count):
        animal, place = draw.choice(tiny.ANIMALS), draw.choice(tiny.PLACES)
        tokens = ["the", animal, "was", "on", place]
        made.append({"tokens": tokens, "ner_tags": ["B-ANIMAL", "I-ANIMAL", "O", "O", "B-PLACE"]})
        if draw.random() < 0.5:
            made[-1] = {"tokens": ["it", "is", "good"], "ner_tags": ["O", "O", "O"]}
    return made


@pytest.fixture
def tagging(desk: Path) -> Path:
    """The desk with a recipe that tags, and its rows."""
    tiny.write_jsonl(desk / "train.jsonl", rows(48))
    tiny.write_jsonl(desk / "dev.jsonl", rows(16, seed=1))
    (desk / "my.yaml").write_text(RECIPE, encoding="utf-8")
    return desk


@pytest.mark.usefixtures("rendered")
def test_a_model_learns_the_tags_and_every_kind_of_name_is_measured(tagging: Path, finetune: Command) -> None:
    finetune("my.yaml").finished()
    said = results(tagging / "runs/my")
    assert said["main_metric"] == "overall_f1"
    overall = [f"overall_{number}" for number in ("f1", "precision", "recall", "accuracy")]
    kinds = [f"{kind}_{number}" for kind in ("ANIMAL", "PLACE") for number in ("precision", "recall", "f1")]
    assert set(said["metrics"]) == {*overall, *kinds, "loss"}
    assert said["metrics"]["overall_f1"] == 1.0
    assert said["baseline"]["metrics"]["overall_f1"] == 0.0
    assert said["baseline"]["what"].startswith("always answers O, the tag of ")
    assert said["device"]["value"] == "mps"
    config = json.loads((tagging / "runs/my/config.json").read_text(encoding="utf-8"))
    assert config["id2label"] == {"0": "O", "1": "B-ANIMAL", "2": "I-ANIMAL", "3": "B-PLACE"}
    assert said["fallback"] == []
    # A line for each word.
    lines = predictions(tagging / "runs/my")
    given = [
        (str(number + 1), word, tag)
        for number, row in enumerate(rows(16, seed=1))
        for word, tag in zip(*row.values(), strict=True)
    ]
    assert [(line["row"], line["word"], line["label"]) for line in lines] == given
    assert all(line["prediction"] == line["label"] for line in lines)  # F1 is 1.0
    assert all(0.25 < float(line["probability"]) <= 1 for line in lines)
    assert (tagging / "runs/my/confusion_matrix.png").read_bytes().startswith(b"\x89PNG")
    card = (tagging / "runs/my/README.md").read_text(encoding="utf-8")
    assert 'pipeline("token-classification", model=".", aggregation_strategy="simple")' in card


def test_tags_of_single_words_are_measured_by_word(tagging: Path, finetune: Command) -> None:
    for name in ("train", "dev"):
        path = tagging / f"{name}.jsonl"
        path.write_text(path.read_text(encoding="utf-8").replace("B-", "").replace("I-", ""), encoding="utf-8")
    assert finetune("my.yaml").code == 0
    assert set(results(tagging / "runs/my")["metrics"]) == {"accuracy", "f1_macro", "loss"}
    assert finetune("my.yaml", "metrics=seqeval", "output_dir=other").refused() == snapshot(
        "metrics has seqeval, which counts names, and the tags (O, ANIMAL, PLACE) mark none (B-PER, I-PER,"
        " O); allowed: accuracy, f1/macro, f1/micro, f1/weighted, precision/macro, precision/micro,"
        " precision/weighted, recall/macro, recall/micro, recall/weighted"
    )


def test_tags_of_bilou_count_names_and_the_cards_pipeline_does_not_join_them(tagging: Path, finetune: Command) -> None:
    as_bilou = {'"B-PLACE"': '"U-PLACE"', '"I-ANIMAL"': '"L-ANIMAL"'}
    for name in ("train", "dev"):
        path = tagging / f"{name}.jsonl"
        text = path.read_text(encoding="utf-8")
        for tag, other in as_bilou.items():
            text = text.replace(tag, other)
        path.write_text(text, encoding="utf-8")
    finetune("my.yaml", "training.max_steps=1").finished()
    assert results(tagging / "runs/my")["main_metric"] == "overall_f1"
    assert "aggregation_strategy" not in (tagging / "runs/my/README.md").read_text(encoding="utf-8")


def test_a_tag_of_minus_100_is_doubted(tagging: Path, finetune: Command) -> None:
    numbers = {"O": -100, "B-ANIMAL": 1, "I-ANIMAL": 2, "B-PLACE": 3}
    made = [{**row, "ner_tags": [numbers[tag] for tag in row["ner_tags"]]} for row in rows(48)]
    for name in ("train", "dev"):
        tiny.write_jsonl(tagging / f"{name}.jsonl", made)
    assert "'-100' is a class, and often means a gap" in finetune("my.yaml", "--plan").out


def test_a_tag_stands_at_its_words_first_token_and_nowhere_else() -> None:
    # [CLS] Wash ##ing ##ton is . [SEP]
    assert token_classification.align([None, 0, 0, 0, 1, 2, None], [3, 0, 0]) == [-100, 3, -100, -100, 0, 0, -100]
    # Cut after the second word, and a word (number 1) of which the tokenizer makes nothing.
    assert token_classification.align([None, 0, 2, None], [1, 2, 3, 4]) == [-100, 1, 3, -100]


def test_words_that_are_cut_off_are_told_of_and_left_without_an_answer(tagging: Path, finetune: Command) -> None:
    assert finetune("my.yaml", "max_length=5", "training.max_steps=1").code == 0
    cut = sum(len(row["tokens"]) == 5 for row in rows(48)) * 2
    dev = sum(len(row["tokens"]) == 5 for row in rows(16, seed=1)) * 2
    said = results(tagging / "runs/my")["choices"]["words_left_out"]
    of_train, of_dev = (sum(len(row["tokens"]) for row in made) for made in (rows(48), rows(16, seed=1)))
    assert said["value"] == f"{cut} of {of_train} train words, {dev} of {of_dev} validation words"
    lines = predictions(tagging / "runs/my")
    assert sum(line["prediction"] == "" for line in lines) == dev
    assert len(lines) == of_dev


def test_ids_are_named_by_the_data_set_or_the_recipe(tagging: Path, finetune: Command) -> None:
    names = ["O", "B-ANIMAL", "I-ANIMAL", "B-PLACE"]
    features = datasets.Features(
        tokens=datasets.List(datasets.Value("string")), ner_tags=datasets.List(datasets.ClassLabel(names=names))
    )
    (tagging / "own").mkdir()
    for split, made in (("train", rows(48)), ("validation", rows(16, seed=1))):
        path = tagging / "own" / f"{split}.parquet"
        datasets.Dataset.from_list(made, features=features).to_parquet(path)
    assert finetune("my.yaml", "data.hub=own").code == 0
    choice = results(tagging / "runs/my")["choices"]["tags"]
    assert choice == {"value": "4 tags: O, B-ANIMAL, I-ANIMAL, B-PLACE", "reason": "the data set names them"}
    for name in ("train", "dev"):
        made = rows(48) if name == "train" else rows(16, seed=1)
        tiny.write_jsonl(
            tagging / f"{name}.jsonl",
            [{**row, "ner_tags": [names.index(tag) for tag in row["ner_tags"]]} for row in made],
        )
    assert finetune("my.yaml", f"data.labels=[{', '.join(names)}]", "output_dir=other").code == 0
    first, second = (results(tagging / folder)["metrics"] for folder in ("runs/my", "other"))
    assert first == second


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"ner_tags": ["O"]}, "dev.jsonl: row 3 has 2 words and 1 tags; allowed: a tag for each word"),
        ({"tokens": [], "ner_tags": []}, "dev.jsonl: row 3 has no words; allowed: one or more in every row"),
        ({"tokens": None}, "dev.jsonl: row 3 has no words; allowed: a list in every row"),
        ({"ner_tags": None}, "dev.jsonl: row 3 has no tags; allowed: a list in every row"),
        ({"tokens": ["it", None]}, "dev.jsonl: row 3: word 2 is missing; allowed: a text for each word"),
        ({"ner_tags": ["O", None]}, "dev.jsonl: row 3: word 2 has no tag; allowed: a tag for each word"),
        (
            {"ner_tags": ["O", "B-PLAICE"]},
            "dev.jsonl: row 3: word 2: tag 'B-PLAICE' is not in the set (O, B-ANIMAL, I-ANIMAL, B-PLACE), found in"
            " train.jsonl; did you mean 'B-PLACE'?",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_their_number(
    tagging: Path, finetune: Command, change: dict[str, Any], line: str
) -> None:
    made = rows(16, seed=1)
    made[2] = {"tokens": ["it", "is"], "ner_tags": ["O", "O"]} | change
    tiny.write_jsonl(tagging / "dev.jsonl", made)
    assert finetune("my.yaml").refused() == f"{line}"


def test_a_column_that_holds_no_lists_is_refused(tagging: Path, finetune: Command) -> None:
    assert finetune(
        "my.yaml", "data.files={train: train.csv, validation: dev.csv}", "data.columns={words: first, tags: label}"
    ).refused() == snapshot(
        "train.csv: data.columns.words names a column of type string; allowed: a list in each row, as JSON and"
        " Parquet have them, all of texts"
    )
    tiny.write_jsonl(tagging / "train.jsonl", [{**row, "ner_tags": [0.0] * len(row["tokens"])} for row in rows(8)])
    assert finetune("my.yaml").refused() == snapshot(
        "train.jsonl: data.columns.tags names a column of type lists of float64; allowed: a list in each row, as JSON"
        " and Parquet have them, all of texts, or all of whole numbers"
    )


def test_a_tokenizer_that_marks_spaces_sees_one_before_each_word(tagging: Path, finetune: Command) -> None:
    from tokenizers import pre_tokenizers

    texts = {word: number for number, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts |= {letter: len(texts) + number for number, letter in enumerate(alphabet)}
    RobertaTokenizer(vocab=texts, merges=[]).save_pretrained(tagging / "roberta")
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    RobertaModel(RobertaConfig(vocab_size=len(texts), max_position_embeddings=66, **size)).save_pretrained(
        tagging / "roberta"
    )
    finetune("my.yaml", "model=roberta", "training.max_steps=1").finished()
    assert "words_left_out" not in results(tagging / "runs/my")["choices"]


def test_a_tokenizer_that_cannot_tell_words_is_refused(tagging: Path, finetune: Command) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tagging / "model" / name).unlink()
    ByT5Tokenizer().save_pretrained(tagging / "model")
    assert finetune("my.yaml").refused() == snapshot(
        "model model: its tokenizer cannot tell which word a token is of; allowed: a fast tokenizer"
        " (https://huggingface.co/docs/transformers/fast_tokenizers)"
    )


def test_several_labels_a_word_are_refused_in_one_line(tagging: Path, finetune: Command) -> None:
    nested = [{**row, "ner_tags": [[tag] for tag in row["ner_tags"]]} for row in rows(8)]
    tiny.write_jsonl(tagging / "train.jsonl", nested)
    ended = finetune("my.yaml")
    assert (ended.code, ended.err) == snapshot(
        (
            2,
            "hf-mps: train.jsonl: data.columns.tags names a column with a list of labels for each word; allowed: one"
            " tag for each, such as its labels joined\n",
        )
    )


def test_a_saved_model_of_several_labels_a_word_is_refused() -> None:
    config = SimpleNamespace(problem_type="multi_label_classification", num_labels=2, id2label={0: "A", 1: "B"})
    with pytest.raises(UserError, match="several labels a word, which hf_mps does not answer; next: "):
        token_classification.TokenClassification.recall(SimpleNamespace(), config, {})  # type: ignore[arg-type]
