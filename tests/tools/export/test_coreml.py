"""`hf-mps export coreml`: an encoder whose inputs have one of a few lengths; predicted on macOS alone."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.finetune.tiny import Ended
from tests.tools.export.conftest import record

pytest.importorskip("coremltools")
Run = Callable[..., Ended]


@pytest.mark.slow
def test_a_classifier_takes_the_lengths_that_were_asked_for(hf_mps: Run, classifier: Path, tmp_path: Path) -> None:
    import coremltools

    ended = hf_mps("export", "coreml", classifier, tmp_path / "out", "--lengths", "48,16")
    assert ended.code == 0, ended.err
    description = (
        coremltools.models.MLModel(str(tmp_path / "out" / "model.mlpackage"), skip_model_load=True)
        .get_spec()
        .description
    )
    lengths = {
        one.name: sorted(shape.shape[1] for shape in one.type.multiArrayType.enumeratedShapes.shapes)
        for one in description.input
    }
    assert lengths == {"input_ids": [16, 48], "attention_mask": [16, 48], "token_type_ids": [16, 48]}
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    found = record(tmp_path / "out")["comparison"]
    assert found["difference"]["relative"] < found["difference"]["tolerance"]


@pytest.mark.slow
@pytest.mark.skipif(platform.system() == "Darwin", reason="Core ML predicts there, and its own logits are compared")
def test_off_a_mac_it_says_what_was_compared_and_what_was_not(hf_mps: Run, classifier: Path, tmp_path: Path) -> None:
    ended = hf_mps("export", "coreml", classifier, tmp_path / "out", "--lengths", "16,32", "--weights", "f32")
    assert "not compared: Core ML predicts on macOS alone, and this is Linux\n" in ended.out
    found = record(tmp_path / "out")["comparison"]
    assert found["opened_by"].endswith("the TorchScript that it converted was compared, and 41 weights in the package")
    assert found["not_compared"]
    assert found["difference"]["relative"] < 1e-5


@pytest.mark.slow
def test_a_weight_that_float16_would_round_to_nothing_is_no_other_model(
    hf_mps: Run, classifier: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(classifier, tmp_path / "small")
    weights = load_file(model / "model.safetensors")
    weights["bert.encoder.layer.1.output.LayerNorm.weight"][:3] = torch.tensor([-6e-33, 1.5e-9, 7e-5])
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    ended = hf_mps("export", "coreml", model, tmp_path / "out", "--lengths", "16,32", "--weights", "f16")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lengths", "16,900"], "--lengths 900: allowed: 2 to 64, the positions that this model has\n"),
        (["--lengths", "16"], "--lengths 16: allowed: two lengths or more, such as 64,128\n"),
        (["--lengths", "16;32"], "--lengths 16;32: allowed: numbers with commas between them, as 64,128,256\n"),
        (["--weights", "q4"], "--weights q4: export coreml does not write these; allowed: f16, f32"),
    ],
)
def test_what_a_package_cannot_be_is_said(
    words: list[str], said: str, hf_mps: Run, classifier: Path, tmp_path: Path
) -> None:
    ended = hf_mps("export", "coreml", classifier, tmp_path / "out", *words)
    assert ended.code == 2
    assert said in ended.err
    assert list(tmp_path.iterdir()) == []
