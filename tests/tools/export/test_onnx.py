"""`hf-mps export onnx`: transformers' exporter writes, ONNX Runtime answers as the model does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.finetune.tiny import Ended
from tests.tools.export.conftest import record

pytest.importorskip("onnxruntime")
Run = Callable[..., Ended]


@pytest.mark.slow
def test_a_classifier_answers_alike_whatever_the_batch_and_length(
    hf_mps: Run, classifier: Path, tmp_path: Path
) -> None:
    """By the export's own comparison, and by one that takes other rows, batches and lengths than it was traced with."""
    import onnxruntime

    ended = hf_mps("export", "onnx", classifier, tmp_path / "out")
    assert (ended.code, ended.err) == (0, "")
    found = record(tmp_path / "out")["comparison"]
    assert found["difference"]["relative"] < 1e-5
    assert found["opened_by"].startswith("onnxruntime")
    model = AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    assert {tuple(given.shape) for given in session.get_inputs()} == {("batch", "sequence")}
    for texts in (["the cat is good"], ["it is bad", "the bird was on the house on the tree", "mat"] * 3):
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        [logits] = session.run(["logits"], {name: ids.numpy() for name, ids in batch.items()})
        with torch.no_grad():
            expected = model(**batch).logits.numpy()
        numpy.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-6)
