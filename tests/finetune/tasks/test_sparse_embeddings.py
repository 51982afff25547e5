"""Sparse encoders: SPLADE learns which words find a text, and fewer of them where they cost more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_mps.cli.main import main
from hf_mps.finetune import smoke
from hf_mps.finetune.smoke.processors import Family
from tests.finetune import tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command

pytest.importorskip("sentence_transformers")

RECIPE = """# Which one belongs to it?
task: sparse-embeddings
model: masked
data:
  files: {train: train.csv, validation: dev.csv}
  columns: {text: first, text_pair: second}
seed: 1
training:
  per_device_train_batch_size: 4
  learning_rate: 5e-3
  num_train_epochs: 1
  eval_strategy: 'no'
  save_strategy: 'no'
"""


def pairs() -> list[dict[str, Any]]:
    """A text for each animal and place, and another that says the same in other words: they share none."""
    others = {"cat": "one", "dog": "two", "bird": "three", "mat": "red", "tree": "blue", "house": "green"}
    return [
        {"first": f"the {animal} on the {place}", "second": f"it was {others[place]} and {others[animal]}"}
        for animal in tiny.ANIMALS
        for place in tiny.PLACES
    ]


@pytest.fixture(scope="module")
def _masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked") / "masked"
    said = [text for row in pairs() for text in row.values()]
    smoke.write(Family("distilbert", "text", "wordpiece", {}), folder, said, 0)
    return folder


@pytest.fixture
def pairing(desk: Path, _masked: Path) -> Path:
    """The desk with pairs and a masked language model."""
    shutil.copytree(_masked, desk / "masked")
    for name in ("train.csv", "dev.csv"):
        tiny.write_csv(desk / name, pairs())
    (desk / "my.yaml").write_text(RECIPE, encoding="utf-8")
    return desk


@pytest.mark.usefixtures("rendered")
def test_words_are_learned_that_find_the_other_text_and_saved_for_sentence_transformers(
    pairing: Path, finetune: Command
) -> None:
    from sentence_transformers import SparseEncoder

    finetune("my.yaml", "training.num_train_epochs=12").finished()
    run = pairing / "runs/my"
    said = results(run)
    assert said["device"]["value"] == "mps"
    assert said["fallback"] == []
    assert said["main_metric"] == "dot_accuracy@1"
    assert {"dot_accuracy@1", "dot_mrr@10", "active_dims", "loss"} <= set(said["metrics"])
    assert said["baseline"]["metrics"]["dot_accuracy@1"] < 0.2
    assert said["metrics"]["dot_mrr@10"] > said["baseline"]["metrics"]["dot_mrr@10"] + 0.3
    lines = predictions(run)
    ranks = [int(line["rank"]) for line in lines]
    assert said["metrics"]["dot_accuracy@1"] == pytest.approx(sum(rank == 1 for rank in ranks) / 9)
    assert (run / "ranks.png").read_bytes().startswith(b"\x89PNG")
    # The saved model, through the library's own front door, says the same.
    model = SparseEncoder(str(run), device="cpu")
    first, second = (model.encode([line[role] for line in lines]) for role in ("text", "text_pair"))
    theirs = model.similarity_pairwise(first, second).tolist()
    assert theirs == pytest.approx([float(line["score"]) for line in lines], rel=2e-3)
    words = json.loads(lines[0]["words"])
    assert words == {word: pytest.approx(weight, rel=2e-3) for word, weight in model.decode(first[0], top_k=5)}


def test_embeddings_are_sparser_where_a_dimension_costs_more(pairing: Path, finetune: Command) -> None:
    active = []
    for cost in ("1e-6", "1"):
        words = (f"document_regularizer={cost}", f"query_regularizer={cost}", "training.num_train_epochs=4")
        finetune("my.yaml", *words, f"output_dir=at-{cost}").finished()
        active.append(results(pairing / f"at-{cost}")["metrics"]["active_dims"])
    assert active[1] < active[0] / 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model=model",), "model model: it has no head that predicts masked words; allowed: masked language models"),
        (("metrics=retrieval",), "which sparse-embeddings does not compute; allowed: sparse_retrieval, active_dims"),
        (("document_regularizer=0",), "document_regularizer"),
    ],
)
def test_what_does_not_fit_is_refused(pairing: Path, finetune: Command, words: tuple[str, ...], message: str) -> None:
    assert message in finetune("my.yaml", *words).refused()


def test_a_saved_model_weighs_the_words_of_texts_and_scores_pairs(
    pairing: Path, finetune: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    assert finetune("my.yaml", "training.max_steps=1").code == 0
    for columns, key in ((("first", "second"), "score"), (("first",), "words")):
        tiny.write_csv(pairing / "new.csv", [{name: row[name] for name in columns} for row in pairs()])
        capfd.readouterr()
        assert main(["predict", "runs/my", "new.csv", "--out", f"{key}.jsonl"]) == 0
        lines = [json.loads(one) for one in Path(f"{key}.jsonl").read_text(encoding="utf-8").splitlines()]
        assert len(lines) == 9
        assert all(key in line for line in lines)
