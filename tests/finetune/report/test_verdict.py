"""A run that has learnt nothing says so, in one line with what to try: at its end, in results.json and in the card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from hf_mps.core.choice import Choice
from hf_mps.finetune import report
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.report.predictions import Written, only_answer
from hf_mps.finetune.report.results import doubt
from hf_mps.finetune.run.record import closing_table
from hf_mps.metrics import Baseline
from tests.finetune.records import a_record


def rows(*answers: Any, truths: str = "abab") -> list[dict[str, Any]]:
    return [{"label": truth, "prediction": answer} for truth, answer in zip(truths, answers, strict=False)]


def test_one_answer_for_all_rows_is_known() -> None:
    assert only_answer(rows("a", "a", "a")) == "a"
    assert only_answer([{"row": 1, "prediction": []}, {"row": 2, "prediction": []}]) == "[]"
    for fine in (rows("a", "b"), rows("a"), [], rows("a", "a", truths="aa"), [{"cosine": 0.5}, {"cosine": 0.5}]):
        assert only_answer(fine) is None


def scores(*values: float) -> list[dict[str, Any]]:
    return [{"eval_f1": value, "step": 10 * number} for number, value in enumerate(values, start=1)]


def test_a_run_that_has_learnt_says_nothing() -> None:
    assert doubt(a_record(log_history=scores(0.8, 0.8821))) is None
    assert doubt(a_record(log_history=[{"reward": 0.0}, {"reward": 0.5}])) is None
    assert doubt(a_record(metrics={"f1": 0.1}, choices={"smoke": Choice("a tiny bert", "")}), "1") is None
    assert doubt(a_record(metrics={"f1": float("nan")}, baseline=None)) is None


NO_BETTER = snapshot(
    "f1 0.8100 is no better than the baseline (0.8100), which always answers 1, the label of 67.4% of the training rows"
    "; next: more training.num_train_epochs, another training.learning_rate, or more rows"
)


@pytest.mark.parametrize(
    ("changes", "answer", "said"),
    [
        (
            {"log_history": [{"reward": 0.0}, {"reward": 0}]},
            None,
            snapshot("every reward was 0; next: easier prompts, a larger model, or a reward that some answers get"),
        ),
        (
            {},
            "not_equivalent",
            snapshot(
                "all rows have one answer, 'not_equivalent': the model has learnt nothing; next: more"
                " training.num_train_epochs, another training.learning_rate, or more rows"
            ),
        ),
        ({"metrics": {"f1": 0.81}}, None, NO_BETTER),
        ({"metrics": {"f1": 0.81004}}, None, NO_BETTER),  # which is shown as 0.8100 too
        (
            {"metrics": {"f1": 1.0}, "baseline": Baseline("always answers 1", {"f1": 1.0})},
            None,
            snapshot(
                "f1 1.0000 is no better than the baseline (1.0000), which always answers 1; next: validation rows that"
                " the baseline gets wrong"
            ),
        ),
        (
            {"log_history": scores(0.9, 0.8821)},
            None,
            snapshot(
                "f1 was better before: 0.9000 at step 10; next: training.load_best_model_at_end=true, or fewer epochs"
            ),
        ),
    ],
)
def test_it_says_what_is_wrong_and_what_to_try(changes: dict[str, Any], answer: str | None, said: str) -> None:
    assert doubt(a_record(**changes), answer) == said


def test_the_line_is_in_results_card_and_closing_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = a_record()
    report.write(tmp_path, record, lambda: Written([], "1"))
    assert record.doubt is not None
    assert report.results(record)["doubt"] == record.doubt
    assert f"**To look at:** {record.doubt}." in (tmp_path / "README.md").read_text(encoding="utf-8")
    closing_table(load_recipe("glue/mrpc"), a_record(doubt="every reward was 0"), [Path("run")])
    assert "verdict" in (shown := capsys.readouterr().out)
    assert "every reward was 0" in shown
