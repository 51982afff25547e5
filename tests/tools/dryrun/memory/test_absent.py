"""A plan and an audit look at a training step: packages of metrics, sound and adapters are not needed for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import transformers

from hf_mps.cli.main import main
from hf_mps.tools.dryrun.audit import audit
from hf_mps.tools.dryrun.memory.plan import estimate
from hf_mps.tools.dryrun.resolve import resolve_target

ABSENT = ("rouge_score", "sacrebleu", "soundfile", "peft", "jiwer", "nltk")
ROWS = "training.per_device_train_batch_size=2"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without those packages, for what is imported from now on.

    transformers asks once whether peft is there, and Trainer imports it then: that is before.
    """
    assert transformers.Seq2SeqTrainer
    for name in [name for name in sys.modules if name.partition(".")[0] in ABSENT]:
        monkeypatch.delitem(sys.modules, name)
    for name in ABSENT:  # no import finds it then, and importlib.util.find_spec says None
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.rotated
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["summarization/xsum", "translation/opus-books", "speech-recognition/librispeech"])
def test_a_step_is_planned_and_audited_without_them(recipe: str, bare: None) -> None:
    target = resolve_target(recipe, [ROWS])
    assert estimate(target).bytes > 0
    assert {entry.operator for entry in audit(target).findings} <= {"aten::_ctc_loss", "aten::_ctc_loss_backward"}


@pytest.mark.parametrize(
    ("kind", "task", "words"),
    [
        ("detr", "image-classification", "transformers has no AutoModelForImageClassification for a detr"),
        ("mamba", "masked-lm", "transformers has no AutoModelForMaskedLM for a mamba"),
        ("parakeet_ctc", "speech-recognition", "it takes input_features; allowed: models that take the wave itself"),
        ("omniasr_ctc", "speech-recognition", "it takes padding_mask; allowed: models that take the wave itself"),
        ("esm", "masked-lm", "transformers cannot build a model from its EsmConfig: TypeError: "),
        ("xmod", "masked-lm", "it cannot take a step of the task masked-lm: ValueError: Input language unknown."),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "audit"])
def test_what_cannot_be_built_is_one_line_that_names_what_was_given(
    verb: str, kind: str, task: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    assert main([verb, str(tmp_path), "--task", task]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"hf-mps: model {tmp_path}: {words}")
    assert told.count("\n") == 1
    assert "hf-mps-smoke" not in told
