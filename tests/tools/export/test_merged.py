"""`hf-mps export merged`: base and adapter as one model, made shard by shard."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaForCausalLM

from hf_mps.tools.export import base, merged
from hf_mps.tools.saved.run import open_run
from tests.finetune.tiny import Ended
from tests.tools.export.conftest import record

Run = Callable[..., Ended]


def _merged_by_peft(adapted: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The oracle: peft's own merge of the whole model in float32."""
    from peft import AutoPeftModelForCausalLM

    model = AutoPeftModelForCausalLM.from_pretrained(adapted, dtype=torch.float32).merge_and_unload()
    return {name: weight.to(dtype) for name, weight in model.named_parameters()}


def test_an_adapter_is_merged_in_float32_and_rounded_once(hf_mps: Run, adapted: Path, tmp_path: Path) -> None:
    ended = hf_mps("export", "merged", adapted, tmp_path / "out")
    assert ended.code == 0, ended.err
    stored = load_file(tmp_path / "out" / "model.safetensors")
    expected = _merged_by_peft(adapted, torch.bfloat16)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in expected)
    found = record(tmp_path / "out")
    assert found["comparison"]["difference"]["relative"] < 0.01
    assert found["choices"]["adapter"]["value"] == "merged into 35 layers"
    assert "relative difference" in ended.out
    assert not list(tmp_path.glob(".*")), "the hidden folder is gone"


def test_the_merged_model_loads_without_peft_and_with_its_tokenizer(
    hf_mps: Run, adapted: Path, stories: Path, tmp_path: Path
) -> None:
    assert hf_mps("export", "merged", adapted, tmp_path / "out", "--weights", "f32").code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model) is LlamaForCausalLM
    assert model.config.tie_word_embeddings
    assert model.dtype == torch.float32
    text = "Lily saw a big red ball."
    ids = [AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for folder in (tmp_path / "out", stories)]
    assert ids[0] == ids[1]


def test_shards_hold_every_weight_once_and_are_made_one_by_one(adapted: Path, tmp_path: Path) -> None:
    saved = open_run(str(adapted))
    model = base.load(saved, "float32")
    merged.save(saved, model, tmp_path / "many", "f32", shard=200_000)
    files = sorted((tmp_path / "many").glob("model-*.safetensors"))
    assert len(files) > 3
    names = []
    for file in files:
        with safe_open(file, "pt") as opened:
            names += list(opened.keys())
    expected = _merged_by_peft(adapted, torch.float32)
    assert sorted(names) == sorted(expected)
    whole = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "many").named_parameters())
    assert all(torch.equal(whole[name], expected[name]) for name in expected)


def test_no_more_than_a_shard_is_held_beside_the_model(adapted: Path, tmp_path: Path) -> None:
    """Counted, not timed: the weights that are alive while one is made are those of its shard."""

    saved = open_run(str(adapted))
    model = base.load(saved, "float32")
    plain = base.plain(model)
    alive: list[int] = []
    sizes: list[int] = []
    made: list[weakref.ref[torch.Tensor]] = []

    def counted(weight: merged.Weight) -> merged.Weight:
        def make() -> torch.Tensor:
            held = [one for one in (each() for each in made) if one is not None]
            alive.append(sum(one.nbytes for one in held))
            double = weight.make().double()
            made.append(weakref.ref(double))
            return double

        sizes.append(weight.size(8))
        return merged.Weight(weight.shape, make, weight.floats)

    weights = {name: counted(one) for name, one in merged._weights(plain, merged._adapted(model, "it"))}
    limit = 400_000
    (tmp_path / "out").mkdir()
    merged._write_shards(plain, weights, tmp_path / "out", torch.float64, limit)
    assert sum(sizes) > 4 * limit
    assert max(alive) <= limit


def test_a_model_without_an_adapter_is_written_in_bfloat16(hf_mps: Run, classifier: Path, tmp_path: Path) -> None:
    ended = hf_mps("export", "merged", classifier, tmp_path / "out")
    assert ended.code == 0, ended.err
    assert "the model has none" in ended.out
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    assert record(tmp_path / "out")["architecture"] == "BertForSequenceClassification"


def test_another_adapter_than_lora_is_refused(stories: Path, hf_mps: Run, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", use_dora=True)
    get_peft_model(AutoModelForCausalLM.from_pretrained(stories), config).save_pretrained(tmp_path / "dora")
    ended = hf_mps("export", "merged", tmp_path / "dora", tmp_path / "out")
    assert ended.code == 2
    assert "a variant of LoRA in model.layers.0.self_attn.q_proj, and export merges plain LoRA" in ended.err
    assert not (tmp_path / "out").exists()


def test_a_layer_that_was_trained_whole_takes_its_place(classifier: Path, tmp_path: Path) -> None:
    """peft's `modules_to_save`: the classifier's head beside the adapters."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    model = get_peft_model(AutoModelForSequenceClassification.from_pretrained(classifier), config)
    head = model.get_base_model().classifier.modules_to_save["default"]
    torch.nn.init.normal_(head.weight)
    merged.save(open_run(str(classifier)), model, tmp_path / "out", "f32")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["classifier.weight"], head.weight)
    assert not [name for name in stored if "original" in name or "lora" in name or "modules_to_save" in name]


@pytest.mark.parametrize("end", ["kill", "full"])
def test_an_export_that_ends_early_leaves_nothing_under_its_name(
    end: str, hf_mps: Run, classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "exports" / "out"

    def stopped(*_: object) -> None:
        assert (next(out.parent.glob(".out.saving-*")) / "out" / "model.safetensors").is_file(), "half of it is there"
        raise KeyboardInterrupt if end == "kill" else OSError(28, "No space left on device", str(out))

    monkeypatch.setattr(base, "copy_companions", stopped)
    ended = hf_mps("export", "merged", classifier, out)
    assert ended.code == (130 if end == "kill" else 1)
    assert len(ended.err.splitlines()) == 1
    assert list(out.parent.iterdir()) == []


def _quantized_run(adapted: Path, stories: Path, folder: Path, kind: str) -> Path:
    """The folder that a run over a quantized base leaves: its recipe and its adapter."""
    shutil.copytree(adapted, folder)
    values = {
        "task": "causal-lm",
        "model": str(stories),
        "data": {"files": {"train": "train.txt", "validation": "dev.txt"}},
        "lora": {"r": 4, "use_rslora": True},
        "quantization": kind,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantized_base_is_dequantized_and_merged(
    kind: str, hf_mps: Run, adapted: Path, stories: Path, tmp_path: Path
) -> None:
    """Against bitsandbytes' own dequantization, and peft's merge of whole weights onto it."""
    pytest.importorskip("bitsandbytes")
    run = _quantized_run(adapted, stories, tmp_path / "run", kind)
    ended = hf_mps("export", "merged", run, tmp_path / "out", "--weights", "f32")
    assert ended.code == 0, ended.err
    stored = load_file(tmp_path / "out" / "model.safetensors")
    whole = load_file(stories / "model.safetensors")
    delta = {name: weight - whole[name] for name, weight in _merged_by_peft(adapted, torch.float32).items()}
    name = "model.layers.2.mlp.up_proj.weight"
    base = stored[name] - delta[name]
    assert (base - whole[name]).abs().max() > 1e-4, "the base was rounded"
    assert len(set(base[0].abs().mul(1e5).round().tolist())) <= (64 if kind == "int8" else 24), "to few values a row"
    assert torch.equal(stored["model.embed_tokens.weight"], whole["model.embed_tokens.weight"])
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text(encoding="utf-8")
    assert record(tmp_path / "out")["comparison"]["difference"]["relative"] < 1e-3
