"""Rerankers: lists, pairs and right with wrong ones, tokens padded by a list, and the order that is measured."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from datasets import Dataset
from inline_snapshot import snapshot

from hf_mps.cli.main import main
from hf_mps.finetune.data import load
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.run.trainer import recipe_trainer
from hf_mps.finetune.tasks import rerank
from hf_mps.finetune.tasks.rerank import Rerank
from hf_mps.metrics import scores
from tests.finetune import tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command
from tests.refusals import refusal

pytest.importorskip("sentence_transformers")

RECIPE = """# Which one is good?
task: rerank
model: model
data:
  files: {train: train.jsonl, validation: dev.jsonl}
  columns: {text: question, documents: answers, label: right}
seed: 1
training:
  per_device_train_batch_size: 8
  learning_rate: 5e-3
  num_train_epochs: 1
"""


def lists(count: int, seed: int) -> list[dict[str, Any]]:
    """Questions with two to four answers, of which one is good: no word tells which but that."""
    draw, made = random.Random(seed), []
    for _ in range(count):
        size = draw.randrange(2, 5)
        right = draw.randrange(size)
        answers = [f"the {draw.choice(tiny.ANIMALS)} is {'good' if place == right else 'bad'}" for place in range(size)]
        question = f"is the {draw.choice(tiny.ANIMALS)} on the {draw.choice(tiny.PLACES)}"
        made.append({"question": question, "answers": answers, "right": [int(p == right) for p in range(size)]})
    return made


@pytest.fixture
def asking(desk: Path) -> Path:
    """The desk with questions and lists of answers."""
    tiny.write_jsonl(desk / "train.jsonl", lists(48, 0))
    tiny.write_jsonl(desk / "dev.jsonl", lists(16, 1))
    (desk / "my.yaml").write_text(RECIPE, encoding="utf-8")
    return desk


@pytest.mark.usefixtures("rendered")
def test_lists_are_learned_measured_and_saved_for_sentence_transformers(asking: Path, finetune: Command) -> None:
    from sentence_transformers import CrossEncoder
    from sklearn.metrics import ndcg_score

    finetune(
        "my.yaml", "training.num_train_epochs=6", "training.eval_strategy=no", "training.save_strategy=no"
    ).finished()
    run = asking / "runs/my"
    said = results(run)
    assert said["device"]["value"] == "mps"
    assert said["fallback"] == []
    assert said["main_metric"] == "ndcg@10"
    assert set(said["metrics"]) == {"ndcg@10", "mrr@10", "loss"}
    # Shared words know nothing of it; a list that the model has learned is in order.
    assert said["metrics"]["ndcg@10"] > said["baseline"]["metrics"]["ndcg@10"] + 0.15
    assert said["choices"]["loss"]["value"] == "ListNetLoss"
    lines = predictions(run)
    by_row: dict[str, list[dict[str, str]]] = {}
    for line in lines:
        by_row.setdefault(line["row"], []).append(line)
    theirs = [
        ndcg_score([[float(one["label"]) for one in row]], [[float(one["score"]) for one in row]])
        for row in by_row.values()
    ]
    assert said["metrics"]["ndcg@10"] == pytest.approx(numpy.mean(theirs), abs=1e-3)
    assert (run / "relevance.png").read_bytes().startswith(b"\x89PNG")
    # The saved model, through the library's own front door, gives the same scores; its sigmoid is left out.

    model = CrossEncoder(str(run), device="cpu")
    scores = model.predict([(line["text"], line["document"]) for line in lines], activation_fn=torch.nn.Identity())
    assert scores.tolist() == pytest.approx([float(line["score"]) for line in lines], abs=2e-3)
    assert "from sentence_transformers import CrossEncoder" in (run / "README.md").read_text(encoding="utf-8")


def test_pairs_that_share_a_question_are_ranked_and_others_are_told_apart(asking: Path, finetune: Command) -> None:
    for name, some in (("train", lists(24, 0)), ("dev", lists(8, 1))):
        pairs = [
            {"question": row["question"], "answer": answer, "right": right}
            for row in some
            for answer, right in zip(row["answers"], row["right"], strict=True)
        ]
        tiny.write_jsonl(asking / f"{name}.jsonl", pairs)
    words = ("data.columns={text: question, text_pair: answer, label: right}", "training.max_steps=2")
    finetune("my.yaml", *words).finished()
    said = results(asking / "runs/my")
    assert said["choices"]["loss"]["value"] == "BinaryCrossEntropyLoss"
    assert set(said["metrics"]) == {"ndcg@10", "mrr@10", "loss"}
    assert finetune("my.yaml", *words, "metrics=[average_precision, rerank]", "output_dir=both").code == 0
    assert set(results(asking / "both")["metrics"]) == {"average_precision", "ndcg@10", "mrr@10", "loss"}


def test_a_right_and_a_wrong_answer_are_a_list_of_two(asking: Path, finetune: Command) -> None:
    for name in ("train", "dev"):
        rows = [
            {"question": f"is it the {animal}", "yes": f"the {animal} is good", "no": f"the {animal} is bad"}
            for animal in tiny.ANIMALS * 3
        ]
        tiny.write_jsonl(asking / f"{name}.jsonl", rows)
    columns = "data.columns={text: question, text_pair: yes, negative: no}"
    for loss in ("RankNetLoss", "LambdaLoss", "BinaryCrossEntropyLoss"):
        finetune("my.yaml", columns, f"loss={loss}", "training.max_steps=2", f"output_dir={loss}").finished()
        assert [line["label"] for line in predictions(asking / loss)] == ["1.0", "0.0"] * 9


def test_the_losses_see_the_tokens_of_the_batch_and_not_the_texts(asking: Path) -> None:
    """The library's loss over texts that it tokenises itself, and ours over tokens that the collator padded."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import losses

    made = load_recipe("my.yaml", ["data.rows.train=8", "loss=LambdaLoss"])
    rows = load.load(made.recipe.data, 1)
    prepared = Rerank(made.recipe, checkpoint.resolve("model"), "cpu").prepare(rows)
    args = prepared.arguments(output_dir="out", report_to="none", use_cpu=True)  # type: ignore[misc]
    trainer = recipe_trainer(prepared.trainer)(
        model=prepared.model,
        args=args,
        train_dataset=prepared.train,
        eval_dataset=prepared.validation,
        data_collator=prepared.collator,
        processing_class=prepared.processing_class,
        **prepared.trainer_settings,
    )
    prepared.model.eval()
    batch = prepared.collator(list(prepared.train))  # type: ignore[misc]
    assert batch["input_ids"].shape[0] == sum(batch["documents"]) == len(batch["label"])
    ours = trainer.compute_loss(prepared.model, dict(batch))
    texts = rows["train"].dataset
    stock = CrossEncoder("model", num_labels=1, device="cpu")
    stock.load_state_dict(prepared.model.state_dict())
    stock.eval()
    truths = [torch.tensor(one) for one in texts["label"]]
    theirs = losses.LambdaLoss(stock)([list(texts["text"]), list(texts["documents"])], truths)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    # Its own front door still takes texts.
    assert prepared.model.predict([("is it good", "it is")]).shape == (1,)


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({"right": [1]}, (), "train.jsonl: row 1 has 2 documents and 1 labels; allowed: one for each"),
        ({"right": [1, -1]}, (), "train.jsonl: row 1 has the label -1; allowed: 0 for irrelevant, and numbers above"),
        ({"answers": [], "right": []}, (), "train.jsonl: row 1 has no documents; allowed: a text for each"),
        ({"question": None}, (), "train.jsonl: row 1 has no text; allowed: one in every row"),
        ({"right": [3, 0]}, ("loss=BinaryCrossEntropyLoss",), "train.jsonl: row 1 has the label 3, and BinaryCross"),
        ({}, ("data.columns.documents=null",), "has neither documents nor text_pair; give one of the two"),
        ({}, ("data.columns.documents=question", "data.columns.text=answers"), "names a column of type"),
        ({}, ("metrics=wer",), "metrics has 'wer', which rerank does not compute; allowed: average_precision, rerank"),
        ({}, ("training.prompts=x",), "a cross-encoder reads query and document as they are"),
    ],
)
def test_what_does_not_fit_is_refused(
    asking: Path, finetune: Command, change: dict[str, Any], words: tuple[str, ...], message: str
) -> None:
    made = [row for row in lists(48, 0) if len(row["answers"]) == 2]
    made[0] |= change
    tiny.write_jsonl(asking / "train.jsonl", made)
    assert message in finetune("my.yaml", *words).refused()


def test_an_order_is_measured_as_scikit_learn_does_and_equal_scores_earn_nothing() -> None:
    from sklearn.metrics import ndcg_score

    draw = numpy.random.default_rng(0)
    for _ in range(20):
        drawn, relevance = draw.normal(size=14), draw.integers(0, 4, 14).astype(float)
        expected = ndcg_score([relevance], [drawn], k=10)
        assert scores.ndcg(drawn.tolist(), relevance.tolist()) == pytest.approx(expected)
    assert scores.reciprocal_rank([0.5, 0.9, 0.7], [1, 0, 0]) == 1 / 3
    # A model that says the same of all, or NaN, puts the relevant one last, wherever it stands.
    for scores_ in ([0.5, 0.5, 0.5], [float("nan")] * 3):
        assert {scores.reciprocal_rank(scores_, row) for row in ([1, 0, 0], [0, 1, 0], [0, 0, 1])} == {1 / 3}


def test_a_saved_model_ranks_the_documents_of_a_row(
    asking: Path, finetune: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    assert finetune("my.yaml", "training.max_steps=1").code == 0
    unlabelled = [{name: row[name] for name in ("question", "answers")} for row in lists(4, 1)]
    tiny.write_jsonl(asking / "new.jsonl", unlabelled)
    capfd.readouterr()
    assert main(["predict", "runs/my", "new.jsonl", "--out", "said.jsonl"]) == 0
    lines = [json.loads(one) for one in Path("said.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == sum(len(row["answers"]) for row in unlabelled)
    assert all(line["rank"] >= 1 and "label" not in line for line in lines)


def test_documents_that_are_numbers_are_refused() -> None:
    rows = Rows(Dataset.from_list([{"text": "a", "documents": [1, 2]}]), "rows.jsonl")
    assert refusal(rerank.read, rows) == snapshot(
        "rows.jsonl: data.columns.documents names a column of type list of int64; allowed: a list of texts in"
        " each row, as JSON and Parquet have them"
    )
