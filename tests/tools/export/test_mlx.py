"""`hf-mps export mlx`: mlx-lm writes and reads, whatever the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, BloomForCausalLM

from tests.finetune.tiny import Ended
from tests.tools.export.conftest import record

pytest.importorskip("mlx_lm")
Run = Callable[..., Ended]


def test_an_adapter_leaves_merged_and_writes_as_the_model_does(hf_mps: Run, adapted: Path, tmp_path: Path) -> None:
    """By the export's own comparison, and by what both write on with: the same tokens, one by one."""
    from mlx_lm import generate, load

    # A name like that of the folder with the merged model.
    ended = hf_mps("export", "mlx", adapted, tmp_path / "plain", "--weights", "f32")
    assert ended.code == 0, ended.err
    found = record(tmp_path / "plain")
    assert found["comparison"]["difference"]["relative"] < 1e-4
    assert found["choices"]["adapter"]["value"] == "merged into 35 layers"
    text = "Once upon a time"
    model, tokenizer = load(str(tmp_path / "plain"))
    theirs = generate(model, tokenizer, prompt=text, max_tokens=12)
    own = AutoTokenizer.from_pretrained(adapted)
    ids = own(text, return_tensors="pt")
    answer = AutoModelForCausalLM.from_pretrained(adapted).generate(**ids, max_new_tokens=12, do_sample=False)
    assert own.decode(answer[0, ids["input_ids"].shape[1] :], skip_special_tokens=True) == theirs


@pytest.mark.parametrize(("weights", "bits"), [("q8", 8), ("q4", 4)])
def test_quantized_weights_stay_within_their_bound(
    weights: str, bits: int, hf_mps: Run, stories: Path, tmp_path: Path
) -> None:
    assert hf_mps("export", "mlx", stories, tmp_path / "out", "--weights", weights).code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"]["bits"] == bits
    found = record(tmp_path / "out")["comparison"]["difference"]
    assert 0 < found["relative"] < found["tolerance"]
    # Of the weights alone: MLX's CPU backend adds up in bfloat16, and would be counted threefold.
    assert found["relative"] < {8: 0.02, 4: 0.2}[bits]


def test_an_architecture_that_mlx_lm_does_not_have_is_refused(hf_mps: Run, stories: Path, tmp_path: Path) -> None:
    BloomForCausalLM(BloomConfig(vocab_size=512, hidden_size=8, n_layer=1, n_head=1)).save_pretrained(
        tmp_path / "bloom"
    )
    AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path / "bloom")
    ended = hf_mps("export", "mlx", tmp_path / "bloom", tmp_path / "out")
    assert ended.code == 2
    assert f"has no model of the type bloom; next: hf-mps export merged {tmp_path / 'bloom'} OUT\n" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["bloom"]
