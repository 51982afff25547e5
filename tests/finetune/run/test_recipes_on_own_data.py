"""Recipes of language models on files in place of the hub's, by overrides alone: real data, tiny models, one step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.finetune import builders
from tests.finetune.run_files import results
from tests.finetune.tiny import Command

ALPACA = "data.columns={messages: null, instruction: instruction, input: input, output: output}"
PAIRS = "data.columns={prompt: conversations, completion: null, label: null, chosen: chosen, rejected: rejected}"
RUNS = {
    "causal-lm/wikitext": ("", "wikitext2/wiki.valid.tokens", ["max_length=64"], "perplexity"),
    "masked-lm/wikitext": ("bert", "wikitext2/wiki.valid.tokens", ["max_length=64"], "perplexity"),
    "sft/chat": ("", "sft/alpaca_en_demo.json", [ALPACA, "max_length=256", "generate.rows=2"], "perplexity"),
    "sft/alpaca": (
        "",
        "sft/alpaca_en_demo.json",
        ["max_length=256", "lora.export=adapter", "generate.rows=2"],
        "perplexity",
    ),
    "distill/alpaca": (
        "",
        "sft/alpaca_en_demo.json",
        ["max_length=256", "generate.rows=2", "distillation.max_new_tokens=8"],
        "perplexity",
    ),
    "dpo/ultrafeedback": (
        "",
        "sft/dpo_en_demo.json",
        ["data.prompt=conversations", "max_length=256"],
        "rewards/accuracies",
    ),
    "orpo/ultrafeedback": (
        "",
        "sft/dpo_en_demo.json",
        ["data.prompt=conversations", "max_length=256"],
        "rewards/accuracies",
    ),
    "kto/kto-mix": ("", "sft/dpo_en_demo.json", [PAIRS, "max_length=256"], "rewards/margins"),
    "sft/qlora": ("", "sft/alpaca_en_demo.json", ["max_length=256", "generate.rows=2"], "perplexity"),
    "dpo/qlora": ("", "sft/dpo_en_demo.json", ["data.prompt=conversations", "max_length=256"], "rewards/accuracies"),
    "summarization/dialogsum": ("bart", "dialogsum/dialogsum.dev.jsonl", ["max_length=128"], "rouge1"),
    "summarization/xsum": ("t5", "samples/xsum/sample.json", ["max_length=128", "data.hold_out=0.3"], "rouge1"),
    "translation/wmt16-en-ro": (
        "marian",
        "samples/wmt_en_ro/train.json",
        ["max_length=64", "data.hold_out=0.3"],
        "sacrebleu",
    ),
    "translation/opus-books": ("t5", "samples/wmt_en_ro/train.json", ["data.target=translation.ro"], "sacrebleu"),
}


@pytest.mark.rotated
@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("recipe", RUNS)
def test_a_recipe_runs_on_ones_own_files(
    recipe: str,
    shared_data: Path,
    tmp_path: Path,
    finetune: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.chdir(tmp_path)
    architecture, data, words, metric = RUNS[recipe]
    models = tmp_path_factory.getbasetemp() / "models"
    models.mkdir(exist_ok=True)
    model = builders.model(models, architecture) if architecture else shared_data / "models" / "stories260K"
    words = [*words, *([f"teacher={model}"] if recipe.startswith("distill/") else [])]
    rows = [] if "samples" in data else ["data.rows.train=24", "data.rows.validation=8"]
    steps = ["training.max_steps=1", "training.gradient_accumulation_steps=2", "training.per_device_train_batch_size=2"]
    finetune(
        recipe, f"model={model}", f"data.train={shared_data / data}", *rows, *words, *steps, "output_dir=run"
    ).finished()
    said = results(tmp_path / "run")
    assert metric in said["metrics"]
    assert said["device"]["value"] == "mps"
    assert said["fallback"] == []
    assert said["baseline"]["metrics"]
    assert (tmp_path / "run" / "predictions.csv").stat().st_size > 50
