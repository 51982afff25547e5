"""Metrics with evaluate's interface give the figures of its documentation, or of the library behind them, as named."""

from __future__ import annotations

import math
import warnings
from tempfile import TemporaryDirectory
from typing import Any

import evaluate  # noqa: F401  importing torch sets a variable, which no test may do
import numpy
import pytest
import sklearn  # noqa: F401  sets two environment variables when it is first imported, here and not in a test

from hf_mps.metrics import as_evaluate
from hf_mps.metrics.table import GLUE


def computed(name: str, predictions: Any, references: Any, config: str | None = None, **keywords: Any) -> Any:
    with TemporaryDirectory() as folder:
        metric = as_evaluate.load(name, config, cache_dir=folder)
        return metric.compute(predictions=predictions, references=references, **keywords)


def approx(expected: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, int) else pytest.approx(value) for name, value in expected.items()}


def truths(*texts: str) -> dict[str, Any]:
    return {"text": list(texts), "answer_start": [0] * len(texts)}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("cola", {"matthews_correlation": 1 / 3}),
        ("stsb", {"pearson": 1 / 3, "spearmanr": 1 / 3}),
        *((task, {"accuracy": 2 / 3, "f1": 0.8}) for task in ("mrpc", "qqp")),
        *((task, {"accuracy": 2 / 3}) for task in GLUE if task not in ("cola", "stsb", "mrpc", "qqp")),
    ],
)
def test_each_glue_task_has_the_names_of_evaluate(task: str, expected: dict[str, float]) -> None:
    predictions, references = ([1, 1, 0], [1, 0, 1]) if task in ("cola", "stsb") else ([1, 1, 1], [1, 0, 1])
    if task in ("cola", "stsb"):
        expected = dict.fromkeys(expected, -0.5)
    assert computed("glue", predictions, references, task) == approx(expected)


# The examples in the documentation of evaluate's accuracy, f1, precision and recall.
SIX = ([0, 2, 1, 0, 0, 1], [0, 1, 2, 0, 1, 2])
FIVE = ([0, 0, 1, 1, 0], [0, 1, 0, 1, 0])


@pytest.mark.parametrize(
    ("name", "rows", "keywords", "expected"),
    [
        ("accuracy", SIX, {"normalize": False}, 2.0),
        ("accuracy", SIX, {"sample_weight": [0.5, 2, 0.7, 0.5, 9, 0.4]}, 0.0763358778625954),
        ("f1", FIVE, {}, 0.5),
        ("f1", FIVE, {"pos_label": 0}, 2 / 3),
        ("f1", FIVE, {"sample_weight": [0.9, 0.5, 3.9, 1.2, 0.3]}, 0.3529411764705882),
        ("f1", SIX, {"average": "macro"}, 0.26666666666666666),
        ("f1", SIX, {"average": "micro"}, 1 / 3),
        ("f1", SIX, {"average": "weighted"}, 0.26666666666666666),
        ("f1", SIX, {"average": None}, [0.8, 0.0, 0.0]),
        ("f1", SIX, {"average": "macro", "labels": [0, 1]}, 0.4),
        ("precision", FIVE, {"pos_label": 0}, 2 / 3),
        ("precision", SIX, {"average": "macro"}, 2 / 9),
        ("precision", ([0, 2, 1, 1, 2, 0], [0, 1, 2, 0, 1, 2]), {"average": None, "zero_division": 1}, [0.5, 0.0, 0.0]),
        ("precision", ([0, 0], [0, 1]), {"zero_division": 1}, 1.0),
        ("recall", ([0, 0], [0, 0]), {"zero_division": 0}, 0.0),
        ("recall", SIX, {"average": None}, [1.0, 0.0, 0.0]),
    ],
)
def test_label_metrics_take_scikit_learns_keywords(name: str, rows: Any, keywords: Any, expected: Any) -> None:
    found = computed(name, *rows, **keywords)
    assert list(found) == [name]
    assert found[name] == pytest.approx(expected)


def test_several_labels_a_row_are_the_configuration_multilabel() -> None:
    predictions, references = [[0, 1, 1], [1, 1, 0]], [[0, 1, 1], [0, 1, 0]]
    assert computed("f1", predictions, references, "multilabel", average="macro")["f1"] == pytest.approx(2 / 3)
    assert computed("accuracy", predictions, references, "multilabel") == {"accuracy": 0.5}
    found = computed("matthews_correlation", [[0, 1], [1, 0]], [[0, 1], [1, 1]], "multilabel", average="macro")
    assert found == {"matthews_correlation": 0.5}


def test_metrics_of_values_take_evaluates_keywords() -> None:
    answers, there = [10.0, 9.0, 2.5, 6.0, 4.0], [1.0, 2.0, 3.0, 4.0, 5.0]
    found = computed("pearsonr", answers, there, return_pvalue=True)
    assert {name: round(value, 2) for name, value in found.items()} == {"pearsonr": -0.74, "p-value": 0.15}
    found = computed("spearmanr", answers, there, return_pvalue=True)
    assert {name: round(value, 2) for name, value in found.items()} == {"spearmanr": -0.7, "spearmanr_pvalue": 0.19}
    assert list(computed("spearmanr", answers, there)) == ["spearmanr"]
    assert computed("mse", [2.5, 0.0, 2, 8], [3, -0.5, 2, 7]) == {"mse": 0.375}
    assert computed("mse", [2.5, 0.0, 2, 8], [3, -0.5, 2, 7], squared=False) == {"mse": pytest.approx(0.375**0.5)}
    pairs = [[0, 2], [-1, 2], [8, -5]], [[0.5, 1], [-1, 1], [7, -6]]
    assert computed("mse", *pairs, "multilist", multioutput="raw_values")["mse"] == pytest.approx([5 / 12, 1.0])
    assert computed("mae", [2.5, 0.0, 2, 8], [3, -0.5, 2, 7]) == {"mae": 0.5}


def test_squad_counts_as_the_benchmark_after_its_normalisation(capsys: pytest.CaptureFixture[str]) -> None:
    predictions = [
        {"id": "a", "prediction_text": "the  Cat!"},
        {"id": "b", "prediction_text": "red dog"},
        {"id": "c", "prediction_text": "the"},
    ]
    references = [
        {"id": "b", "answers": truths("a dog", "bird")},
        {"id": "a", "answers": truths("cat")},
        # Articles alone: the same text in the end, without a word that both have. SQuAD 1.1 gives it no F1.
        {"id": "c", "answers": truths("A")},
    ]
    assert computed("squad", predictions, references) == approx({"exact_match": 200 / 3, "f1": 500 / 9})
    references.append({"id": "d", "answers": truths("fish")})
    with TemporaryDirectory() as folder:
        metric = as_evaluate.load("squad", cache_dir=folder)
    found = metric._compute(predictions=predictions, references=references)
    assert found == approx({"exact_match": 50.0, "f1": 125 / 3})
    assert "hf-mps: no prediction for question d, which scores 0" in capsys.readouterr().err


def test_squad_v2_takes_the_probability_of_no_answer_and_a_threshold() -> None:
    predictions = [
        {"id": "a", "prediction_text": "cat", "no_answer_probability": 0.1},
        {"id": "b", "prediction_text": "dog", "no_answer_probability": 0.8},
        {"id": "c", "prediction_text": "fish", "no_answer_probability": 0.9},
        {"id": "d", "prediction_text": "", "no_answer_probability": 1.0},
    ]
    references = [
        {"id": "a", "answers": truths("a cat")},
        {"id": "b", "answers": truths("big dog")},
        {"id": "c", "answers": truths()},
        {"id": "d", "answers": truths()},
    ]
    best = {"best_exact": 75.0, "best_exact_thresh": 0.1, "best_f1": 100 * (3 + 2 / 3) / 4, "best_f1_thresh": 0.8}
    assert computed("squad_v2", predictions, references) == approx(
        {"exact": 50.0, "f1": 100 * (2 + 2 / 3) / 4, "total": 4}
        | {"HasAns_exact": 50.0, "HasAns_f1": 100 * (1 + 2 / 3) / 2, "HasAns_total": 2}
        | {"NoAns_exact": 50.0, "NoAns_f1": 50.0, "NoAns_total": 2}
        | best
    )
    strict = computed("squad_v2", predictions, references, no_answer_threshold=0.5)
    assert {name: strict[name] for name in ("exact", "HasAns_f1", "NoAns_f1")} == {
        "exact": 75.0,
        "HasAns_f1": 50.0,
        "NoAns_f1": 100.0,
    }


def test_rouge_takes_evaluates_keywords() -> None:
    predictions, references = ["the cats sat", "a dog"], ["the cat sat", "the moon"]
    rows = computed("rouge", predictions, references, rouge_types=["rouge1"], use_aggregator=False)
    assert rows == {"rouge1": [pytest.approx(2 / 3), 0.0]}
    assert (rows["rouge1"][0].precision, rows["rouge1"][0].fmeasure) == (pytest.approx(2 / 3), rows["rouge1"][0])
    assert computed("rouge", predictions, references, rouge_types=["rouge1"], use_agregator=False) == rows
    letters = computed("rouge", ["ab"], ["ax"], rouge_types=["rouge1"], tokenizer=list)
    assert letters == {"rouge1": 0.5}
    nested = computed("rouge", predictions, [["the cat sat", "the cats sat"], ["the moon", "dog"]])
    assert nested["rouge1"] == pytest.approx((1 + 2 / 3) / 2, abs=0.2)


TRANSLATED = ["hello there general kenobi", "on our way to ankh morpork"]
TWO_EACH = [["hello there general kenobi", "hello there !"], ["goodbye ankh morpork", "ankh morpork"]]


def test_sacrebleu_and_chrf_take_lists_of_references() -> None:
    found = computed("sacrebleu", TRANSLATED, TWO_EACH)
    assert list(found) == ["score", "counts", "totals", "precisions", "bp", "sys_len", "ref_len"]
    assert round(found["score"], 1) == 39.8
    assert computed("sacrebleu", ["A cat sat on it"], ["a cat sat on it"], lowercase=True)["score"] == pytest.approx(
        100
    )
    with pytest.raises(ValueError, match="sacrebleu takes as many references for each row, not 1, 2"):
        computed("sacrebleu", TRANSLATED, [["hello"], ["ankh", "morpork"]])
    one = ["The relationship between cats and dogs is not exactly friendly."]
    other = "a good bookshop is just a genteel black hole that knows how to read."
    there = [
        ["The relationship between dogs and cats is not exactly friendly."],
        ["A good bookshop is just a genteel Black Hole that knows how to read."],
    ]
    assert computed("chrf", [*one, other], there) == approx(
        {"score": 84.64214891738334, "char_order": 6, "word_order": 0, "beta": 2}
    )
    plus = computed("chrf", [*one, other], there, word_order=2, lowercase=True)
    assert plus["score"] == pytest.approx(92.12853119829202)


def test_bleu_takes_texts_or_tokens() -> None:
    texts = computed("bleu", ["hello there general kenobi", "foo bar foobar"], [TWO_EACH[0], ["foo bar foobar"]])
    assert texts == approx(
        {"bleu": 1.0, "precisions": [1.0] * 4, "brevity_penalty": 1.0, "length_ratio": 7 / 6}
        | {"translation_length": 7, "reference_length": 6}
    )
    tokens = computed("bleu", [["a", "b", "c"]], [[["a", "b", "d"], ["a", "b", "c", "d"]]], max_order=2)
    assert tokens["bleu"] == pytest.approx(1.0)
    # Of the order 4 there is nothing: with smoothing one of one, (3+1)/(3+1), (2+1)/(2+1), … .
    assert computed("bleu", ["a b c"], ["a b x y"])["bleu"] == 0.0
    smooth = computed("bleu", ["a b c"], ["a b x y"], smooth=True)
    assert smooth["bleu"] == pytest.approx(math.exp(1 - 4 / 3) * (3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert computed("bleu", ["ab"], ["ab"], tokenizer=list, max_order=2)["bleu"] == 1.0


def test_error_rates_are_floats() -> None:
    said = ["this is the prediction", "there is an other sample"]
    there = ["this is the reference", "there is another one"]
    assert computed("wer", said, there) == 0.5
    assert computed("cer", said, there) == 0.34146341463414637
    assert computed("cer", ["ab", "c"], ["a", "bc"]) == 2 / 3
    assert computed("cer", ["ab", "c"], ["a", "bc"], concatenate_texts=True) == 0.0


# What seqeval 1.2.2 says: kind -> precision, recall, number; and the F1 over all.
@pytest.mark.parametrize(
    ("predictions", "references", "keywords", "kinds", "f1"),
    [
        ("I-PER I-PER O B-LOC I-PER", "B-PER I-PER O B-LOC I-LOC", {}, {"LOC": (0, 0, 1), "PER": (0.5, 1, 1)}, 0.4),
        ("PER-B PER-I O LOC-B", "PER-B PER-I O PER-B", {"suffix": True}, {"LOC": (0, 0, 0), "PER": (1, 0.5, 2)}, 0.5),
        ("NOUN NOUN VERB", "NOUN VERB VERB", {}, {"ERB": (0, 0, 1), "OUN": (0, 0, 1)}, 0.0),
    ],
)
def test_seqeval_takes_suffixes_and_tags_of_any_letters(
    predictions: str, references: str, keywords: Any, kinds: dict[str, tuple[float, float, int]], f1: float
) -> None:
    found = computed("seqeval", [predictions.split()], [references.split()], zero_division=0, **keywords)
    named = {kind: value for kind, value in found.items() if isinstance(value, dict)}
    assert {kind: (of["precision"], of["recall"], of["number"]) for kind, of in named.items()} == kinds
    assert found["overall_f1"] == pytest.approx(f1)


def test_seqeval_says_what_stands_where_nothing_is_divided() -> None:
    rows = [["O", "O"]], [["B-PER", "O"]]
    assert computed("seqeval", *rows, zero_division=1)["overall_precision"] == 1.0
    with pytest.warns(UserWarning, match="zero_division=0 or 1 says what it shall be"):
        assert computed("seqeval", *rows)["overall_precision"] == 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        computed("seqeval", *rows, zero_division=0)


def test_the_strict_mode_is_the_packages() -> None:
    with pytest.raises(ValueError, match="mode='strict' is the package's alone; next: pip install seqeval"):
        computed("seqeval", [["O"]], [["B-PER"]], mode="strict", scheme="IOB2")


# The example in the documentation of evaluate's mean_iou.
MAPS = (
    [[[1, 2], [3, 4], [5, 255]], [[2, 7], [9, 2], [3, 6]], [[2, 2, 3], [8, 2, 4], [3, 255, 2]]],
    [[[0, 3], [5, 4], [6, 255]], [[1, 7], [9, 2], [3, 6]], [[1, 2, 2], [8, 2, 1], [3, 255, 1]]],
)


def test_mean_iou_is_computed_from_maps_of_any_size() -> None:
    expected = {
        "mean_iou": 0.47750000000000004,
        "mean_accuracy": 0.5916666666666666,
        "overall_accuracy": 0.5263157894736842,
        "per_category_iou": [0.0, 0.0, 0.375, 0.4, 0.5, 0.0, 0.5, 1.0, 1.0, 1.0],
        "per_category_accuracy": [0.0, 0.0, 0.75, 2 / 3, 1.0, 0.0, 0.5, 1.0, 1.0, 1.0],
    }
    given = {"num_labels": 10, "ignore_index": 255, "reduce_labels": False}
    assert computed("mean_iou", *MAPS, **given) == approx(expected)
    # run_semantic_segmentation calls _compute itself, with arrays.
    arrays = [[numpy.array(each, dtype=numpy.uint8) for each in side] for side in MAPS]
    with TemporaryDirectory() as folder:
        metric = as_evaluate.load("mean_iou", cache_dir=folder)
    assert metric._compute(predictions=arrays[0], references=arrays[1], **given) == approx(expected)


def test_mean_iou_renames_and_reduces_labels_and_replaces_nan() -> None:
    predictions, references = [numpy.array([[0, 1], [1, 1]])], [numpy.array([[1, 2], [2, 0]], dtype=numpy.uint8)]
    found = computed("mean_iou", predictions, references, num_labels=3, ignore_index=255, reduce_labels=True)
    assert found["per_category_iou"] == pytest.approx([1.0, 1.0, math.nan], nan_ok=True)
    assert found["mean_iou"] == 1.0
    mapped = {"num_labels": 3, "ignore_index": 255, "label_map": {1: 0, 2: 1, 0: 2}, "nan_to_num": -1}
    found = computed("mean_iou", predictions, references, **mapped)
    assert found["per_category_accuracy"] == pytest.approx([1.0, 1.0, 0.0])
    only = computed("mean_iou", [[[0]]], [[[0]]], num_labels=2, ignore_index=255, nan_to_num=-1)
    assert only["per_category_iou"] == pytest.approx([1.0, -1.0])
