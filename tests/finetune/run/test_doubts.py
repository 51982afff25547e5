"""What a run can train on and a person should still look at, said in the plan; and labels that no run can train on."""

from __future__ import annotations

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path

import datasets
import pytest
from inline_snapshot import snapshot
from transformers import ByT5Tokenizer

from hf_mps.core import notices
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import labels
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.models.checkpoint import VOCABULARY
from tests.finetune import tiny
from tests.finetune.tiny import Command
from tests.refusals import refusal


def rows(given: list[object], *, textual: bool = True) -> Rows:
    return Rows(datasets.Dataset.from_dict({"label": given}), "a.csv", textual=textual)


def doubts(*given: object) -> tuple[str, ...]:
    return labels.decide(rows(list(given)), []).doubts


def test_whole_numbers_with_decimals_are_a_measure_and_said_to_be_classes_perhaps() -> None:
    found = labels.decide(rows(["0.0", "1.0", "1.0"]), [])
    assert found.problem_type == "regression"
    assert found.doubts == (
        snapshot(
            "every label is a whole number (0.0, 1.0), and taken for a measure;"
            " problem_type=single_label_classification takes them for classes"
        ),
    )
    assert doubts("0.5", "1.0") == ()
    assert doubts("0", "1", "1") == ()


def test_numbers_that_no_head_reaches_are_told_of_with_a_way_on() -> None:
    told: list[str] = []
    notices.forget()
    with notices.redirected(told.append):
        labels.decide(rows(["0.5", "99.5"]), [])
        assert told == []
        labels.decide(rows([1_250_000, 300_000]), [], problem_type="regression")
    assert told == snapshot(
        [
            "a.csv: labels reach 1.25e+06, and answers begin near 0: few trainings get that far; next: a column"
            " in another unit, such as (label - mean) / standard deviation"
        ]
    )


def test_a_measure_of_whole_numbers_is_told_the_key_that_takes_it_for_one() -> None:
    with pytest.raises(UserError, match=r"or problem_type=regression for a measure$"):
        labels.decide(rows([str(number) for number in range(20)]), [])


@pytest.mark.parametrize("word", ["nan", "null", "NA", "None"])
def test_a_word_for_a_gap_is_told_of_where_it_is_a_class(word: str) -> None:
    assert doubts("good", "bad", word, word, "good", "bad", "bad") == (f"'{word}' is a class, and often means a gap",)
    assert doubts("none", "all", "none", "all") == ()


def test_classes_that_differ_in_case_or_spaces_alone_are_told_of() -> None:
    assert doubts("POS", "pos", "neg", "POS", "pos", "neg") == (
        snapshot("POS and pos differ in case, spaces or invisible characters alone"),
    )
    assert doubts("very good", "verygood", "very good", "verygood") == (
        snapshot("very good and verygood differ in case, spaces or invisible characters alone"),
    )


def test_a_name_in_two_forms_of_unicode_is_one_class_and_an_invisible_letter_is_told_of() -> None:
    found = labels.decide(rows(["caf\u00e9", "cafe\u0301", "tea", "tea", "caf\u00e9"]), [])
    assert (found.names, found.encode("cafe\u0301")) == (("caf\u00e9", "tea"), 0)
    assert found.doubts == (snapshot("'café' is written in two forms of Unicode, which are one class"),)
    assert doubts("good", "good\u200b", "bad", "good", "good\u200b", "bad") == (
        snapshot("good and good\\u200b differ in case, spaces or invisible characters alone"),
    )


def test_a_class_of_one_row_is_told_of() -> None:
    assert doubts("a", "b", "a", "b", "a", "b", "posi") == (snapshot("one training row alone has the class posi"),)
    assert doubts("a", "b") == ()


def test_a_label_beyond_float32_is_refused_before_it_makes_the_loss_infinite() -> None:
    assert refusal(labels.decide, rows(["0.5", "1e40"]), []) == snapshot(
        "a.csv: row 2: label '1e40' is beyond 3.4e+38, the largest number of float32; next: labels of another unit"
    )
    with pytest.raises(UserError, match=r"row 1: label 'inf' is not a finite number"):
        labels.decide(rows(["inf", "0.5"]), [], problem_type="regression")


def test_labels_of_thousands_of_digits_are_classes_as_any_other_name() -> None:
    long = "9" * 5000
    train = rows([long, "2", "10", long, "2", "10"])
    found = labels.decide(train, [])
    assert found.names == ("2", "10", long)
    assert len(labels.choices(found, train)["labels"].value) < 200


def test_doubts_stand_in_the_header_with_the_labels(desk: Path, finetune: Command) -> None:
    made = tiny.rows(48)
    for number, row in enumerate(made):
        row["label"] = ("POS" if number % 5 else "pos") if row["label"] else "neg"
    tiny.write_csv(desk / "train.csv", made)
    tiny.write_csv(desk / "dev.csv", made[:16])
    ended = finetune("my.yaml", "metrics=[accuracy]", "--plan", "--json")
    assert ended.code == 0, ended.err
    choices = json.loads(ended.out)["choices"]
    assert choices["labels_to_check"] == {
        "value": snapshot("POS and pos differ in case, spaces or invisible characters alone"),
        "reason": snapshot("the rows are trained on as they are"),
    }
    assert "unknown_tokens" not in choices


def test_a_large_share_of_unknown_tokens_is_told_of(desk: Path, finetune: Command) -> None:
    made = tiny.rows(48)
    for row in made:
        row["first"] = "שלום עולם 🎉"
    tiny.write_csv(desk / "train.csv", made)
    choices = json.loads(finetune("my.yaml", "--plan", "--json").out)["choices"]
    # Three words of eight.
    assert choices["unknown_tokens"] == {
        "value": "38% of the train tokens",
        "reason": snapshot("each is [UNK] to the model, whatever it says; next: a model of the texts' language"),
    }


def test_a_model_folder_without_a_tokenizer_is_refused(desk: Path, finetune: Command) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (desk / "model" / name).unlink()
    line = (
        "it has no tokenizer (tokenizer.json, vocab.txt or the like), and one that is made up knows no word; next: with"
        " the tokenizer that the model was trained with: tokenizer.save_pretrained('{}')"
    )
    ended = finetune("my.yaml")
    place = "model"
    assert ended.code == 2
    assert ended.err == f"hf-mps: model {place}: {line.format(place)}\n"
    # A configuration that names a class of words, and no words.
    (desk / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}', encoding="utf-8")
    assert finetune("my.yaml").err == f"hf-mps: model {place}: {line.format(place)}\n"


def test_the_vocabulary_of_every_tokenizer_of_the_installed_transformers_is_known_by_its_name() -> None:

    root = Path(find_spec("transformers").origin).parent
    files = {}
    for path in root.glob("models/*/tokenization_*.py"):
        for found in re.findall(r"VOCAB_FILES_NAMES = (\{.*?\})", path.read_text(encoding="utf-8"), re.DOTALL):
            files[path.stem] = [str(name) for name in ast.literal_eval(found).values()]
    assert len(files) > 50
    unknown = [stem for stem, names in files.items() if not any(map(VOCABULARY.fullmatch, names))]
    assert unknown == []


def test_a_tokenizer_of_bytes_needs_no_vocabulary(tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}', encoding="utf-8")
    found = checkpoint.resolve(str(tmp_path)).tokenizer()
    assert found.decode(found("ab")["input_ids"], skip_special_tokens=True) == "ab"
