"""Sentence embeddings: scored pairs and ranked pairs, batches of few shapes, and what the cosines are measured by."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from datasets import Dataset

from hf_mps import metrics
from hf_mps.core.errors import UserError
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.models import embeddings
from hf_mps.finetune.text.lengths import Lengths
from tests.finetune import tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command

pytest.importorskip("sentence_transformers")

SCORED = """# How alike are they?
task: sentence-embeddings
model: model
data:
  files: {train: train.csv, validation: dev.csv}
  columns: {text: first, text_pair: second, score: points}
seed: 1
training:
  per_device_train_batch_size: 8
  learning_rate: 5e-3
  lr_scheduler_type: constant
  num_train_epochs: 8
  eval_strategy: 'no'
  save_strategy: 'no'
"""
RANKED = """# Which one belongs to it?
task: sentence-embeddings
model: model
data:
  files: {train: train.csv, validation: dev.csv}
  columns: {text: first, text_pair: second}
seed: 1
training:
  per_device_train_batch_size: 4
  learning_rate: 3e-3
  num_train_epochs: 4
"""


def scored(count: int, offset: int = 0) -> list[dict[str, Any]]:
    """Pairs about animals: 5 points for the same one, 1 for another."""
    made = []
    for number in range(offset, offset + count):
        one, other = tiny.ANIMALS[number % 3], tiny.ANIMALS[(number // 3) % 3]
        place = tiny.PLACES[number % 2]
        made.append({"first": f"the {one} is good", "second": f"it is the {other} on the {place}"})
        made[-1]["points"] = 5.0 if one == other else 1.0
    return made


def ranked() -> list[dict[str, Any]]:
    """A text for each animal and place, and another that says the same."""
    return [
        {"first": f"the {animal} on the {place}", "second": f"it was the {place} it was the {animal}"}
        for animal in tiny.ANIMALS
        for place in tiny.PLACES
    ]


@pytest.fixture
def pairing(desk: Path) -> Path:
    """The desk with scored pairs."""
    tiny.write_csv(desk / "train.csv", scored(48))
    tiny.write_csv(desk / "dev.csv", scored(18, 48))
    (desk / "my.yaml").write_text(SCORED, encoding="utf-8")
    return desk


@pytest.mark.usefixtures("rendered")
def test_scored_pairs_are_learned_measured_and_saved_for_sentence_transformers(
    pairing: Path, finetune: Command
) -> None:
    from scipy import stats
    from sentence_transformers import SentenceTransformer

    finetune("my.yaml").finished()
    run = pairing / "runs/my"
    said = results(run)
    assert said["device"]["value"] == "mps"
    assert said["main_metric"] == "spearman_cosine"
    assert set(said["metrics"]) == {"spearman_cosine", "pearson_cosine", "loss"}
    assert said["metrics"]["pearson_cosine"] > 0.9
    assert said["fallback"] == []
    assert said["choices"]["loss"]["value"] == "CosineSimilarityLoss"
    assert said["choices"]["scores"]["value"] == "0 to 5"
    assert said["choices"]["sampling"]["value"] == "random"
    assert not (run / "eval").exists()
    lines = predictions(run)
    assert [line["text"] for line in lines] == [row["first"] for row in scored(18, 48)]
    cosines = [float(line["cosine"]) for line in lines]
    points = [float(line["score"]) for line in lines]
    assert stats.pearsonr(cosines, points)[0] == pytest.approx(said["metrics"]["pearson_cosine"], abs=1e-3)
    assert (run / "similarities.png").read_bytes().startswith(b"\x89PNG")
    # The saved model, through the library's own front door, says the same.
    model = SentenceTransformer(str(run), device="cpu")
    first, second = (model.encode([line[role] for line in lines]) for role in ("text", "text_pair"))
    theirs = model.similarity_pairwise(first, second).tolist()
    assert theirs == pytest.approx(cosines, abs=2e-4)
    assert "from sentence_transformers import SentenceTransformer" in (run / "README.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("rendered")
def test_pairs_without_a_score_are_told_apart_within_their_batch(pairing: Path, finetune: Command) -> None:
    for name in ("train.csv", "dev.csv"):
        tiny.write_csv(pairing / name, ranked())
    (pairing / "my.yaml").write_text(RANKED, encoding="utf-8")
    finetune("my.yaml").finished()
    said = results(pairing / "runs/my")
    assert set(said["metrics"]) == {"cosine_accuracy@1", "cosine_mrr@10", "loss"}
    assert said["choices"]["loss"]["value"] == "MultipleNegativesRankingLoss"
    assert said["choices"]["sampling"]["value"] == "random, no text twice"
    lines = predictions(pairing / "runs/my")
    ranks = [int(line["rank"]) for line in lines]
    assert said["metrics"]["cosine_accuracy@1"] == pytest.approx(sum(rank == 1 for rank in ranks) / 9)
    assert said["metrics"]["cosine_mrr@10"] == pytest.approx(sum(1 / rank for rank in ranks) / 9)
    assert said["metrics"]["cosine_accuracy@1"] > 1 / 9
    assert all((line["nearest"] == line["text_pair"]) == (line["rank"] == "1") for line in lines)
    assert (pairing / "runs/my/ranks.png").is_file()


def test_a_hard_negative_is_one_more_wrong_answer(pairing: Path, finetune: Command) -> None:
    rows = [row | {"wrong": f"{row['second']} it is bad"} for row in ranked()]
    for name in ("train.csv", "dev.csv"):
        tiny.write_csv(pairing / name, rows)
    (pairing / "my.yaml").write_text(RANKED, encoding="utf-8")
    finetune("my.yaml", "data.columns.negative=wrong", "training.max_steps=2").finished()
    assert predictions(pairing / "runs/my")[0]["negative"].endswith("it is bad")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("loss=MultipleNegativesRankingLoss",),
            "has loss MultipleNegativesRankingLoss, and the pairs are with a score; allowed: CosineSimilarityLoss,"
            " CoSENTLoss",
        ),
        (("metrics=accuracy",), "metrics has 'accuracy', which sentence-embeddings does not compute; allowed: sts"),
        (
            ("data.score_range=[0,4]",),
            "train.csv: row 1 has the score 5; allowed: 0 to 4, data.score_range in the recipe",
        ),
        (
            ("training.train_sampling_strategy=group_by_length",),
            "is not set here: sentence-transformers draws its batches itself; training.batch_sampler says how",
        ),
    ],
)
def test_what_does_not_fit_is_refused(pairing: Path, finetune: Command, words: tuple[str, ...], message: str) -> None:
    assert message in finetune("my.yaml", *words).refused()


def test_a_score_that_is_no_number_is_named(pairing: Path, finetune: Command) -> None:
    rows = scored(12)
    rows[3]["points"] = "high"
    tiny.write_csv(pairing / "train.csv", rows)
    assert finetune("my.yaml").refused() == "train.csv: row 4 has the score 'high'; allowed: a number in every row"


def test_each_column_of_a_batch_is_padded_by_itself_to_a_length_of_the_list(pairing: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(pairing / "model"), device="cpu")
    collator = embeddings.collator(model, Lengths(16, "list", (8, 16)), None)
    rows = [{"anchor": "the cat", "positive": "it was on the mat it was on the tree", "score": 0.5}] * 2
    batch = collator(rows)
    assert batch["anchor_input_ids"].shape == batch["anchor_attention_mask"].shape == (2, 8)
    assert batch["positive_input_ids"].shape == batch["positive_token_type_ids"].shape == (2, 16)
    assert batch["anchor_attention_mask"].sum(-1).tolist() == [4, 4]
    assert batch["label"].tolist() == [0.5, 0.5]
    prompted = embeddings.collator(model, Lengths(16, "list", (8, 16)), {"anchor": "good "})
    assert prompted(rows)["anchor_attention_mask"].sum(-1).tolist() == [5, 5]
    assert prompted.texts(["the cat"], "anchor")["attention_mask"].sum().item() == 5
    assert prompted.texts(["the cat"], "positive")["attention_mask"].sum().item() == 4


class Vectors:
    """Stands in for a collator and a model: a text is its own vector, written as numbers."""

    device = "cpu"
    training = True

    def eval(self) -> None: ...

    def train(self, mode: bool) -> None: ...

    def texts(self, texts: list[str], column: str) -> dict[str, Any]:
        import torch

        return {"vectors": torch.tensor([[float(number) for number in text.split()] for text in texts])}

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"sentence_embedding": batch["vectors"]}


def judge(rows: list[dict[str, Any]], metric: str) -> embeddings.EmbeddingEvaluator:
    data = Dataset.from_list(rows)
    return embeddings.EmbeddingEvaluator(Rows(data, "here"), data, metrics.load([metric]), Vectors())


def test_ranks_count_what_is_nearer_than_the_right_text_among_all_answers_and_negatives() -> None:
    rows = [
        {"anchor": "1 0", "positive": "2 0.1", "negative": "0 1"},  # first
        {"anchor": "0 1", "positive": "1 1", "negative": "-1 0"},  # its own text stands among the answers: not counted
        {"anchor": "1 1", "positive": "-1 -1", "negative": "1 0.9"},  # the last of five: its own text stands among them
    ]
    told = list(judge(rows, "retrieval").rows(Vectors()))
    assert [row["rank"] for row in told] == [1, 1, 5]
    assert told[2]["nearest"] == "1 0.9"
    assert judge(rows, "retrieval").measure(Vectors()) == {
        "cosine_accuracy@1": pytest.approx(2 / 3),
        "cosine_mrr@10": pytest.approx((1 + 1 + 1 / 5) / 3),
    }


def test_ranks_are_the_same_whatever_the_block_that_they_are_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = numpy.random.default_rng(0)
    rows = [
        {role: " ".join(f"{number:.4f}" for number in draw.normal(size=3)) for role in ("anchor", "positive")}
        for _ in range(50)
    ]
    whole = [row["rank"] for row in judge(rows, "retrieval").rows(Vectors())]
    monkeypatch.setattr(embeddings, "BLOCK", 7)
    assert [row["rank"] for row in judge(rows, "retrieval").rows(Vectors())] == whole
    assert len(set(whole)) > 10


def test_a_right_answer_that_stands_twice_is_one_candidate() -> None:
    rows = [{"anchor": "1 0", "positive": "1 0.2"}, {"anchor": "1 0.1", "positive": "1 0.2"}]
    assert [row["rank"] for row in judge(rows, "retrieval").rows(Vectors())] == [1, 1]


def test_a_cosine_that_is_no_number_is_never_the_best() -> None:
    rows = [{"anchor": "nan 0", "positive": "1 0"}, {"anchor": "0 1", "positive": "0 2"}]
    assert [row["rank"] for row in judge(rows, "retrieval").rows(Vectors())] == [3, 1]


def test_cosines_of_scored_pairs_are_of_vectors_of_any_length() -> None:
    rows = [
        {"anchor": "1 0", "positive": "5 0", "score": 1.0},
        {"anchor": "1 0", "positive": "0 3", "score": 0.0},
        {"anchor": "1 0", "positive": "1 1", "score": 0.7},
    ]
    told = judge(rows, "sts")
    assert [row["cosine"] for row in told.rows(Vectors())] == [1.0, 0.0, 0.7071]
    assert told.measure(Vectors())["spearman_cosine"] == 1.0


def test_without_the_library_the_command_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers", None)
    message = r"^sentence-embeddings needs sentence-transformers 6; next: pip install 'sentence-transformers>=6'$"
    with pytest.raises(UserError, match=message):
        embeddings.library("sentence-embeddings")


def test_the_trainer_asks_no_hub_about_model_and_data(pairing: Path) -> None:
    made = embeddings.trainer(SimpleNamespace(measure=lambda model: {}))  # type: ignore[arg-type]
    from sentence_transformers import SentenceTransformerTrainer

    assert issubclass(made, SentenceTransformerTrainer)
    made.add_model_card_callback(SimpleNamespace(), {})  # a stock trainer would reach for its callback handler
