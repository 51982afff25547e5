"""Every recipe, whole, on the device mps, in seconds: `--smoke` trains a tiny model of the recipe's architecture."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from PIL import Image
from transformers import AutoConfig, AutoModel, AutoProcessor, AutoTokenizer

from hf_mps.cli.main import main
from hf_mps.finetune import smoke, tasks
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.recipe import catalogue
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.smoke import family_of, processors
from hf_mps.metal.fallback.accounting import ledger
from tests.conftest import CHECKOUT
from tests.finetune.run_files import results
from tests.finetune.tiny import Command

NAMES = [entry.name for entry in catalogue.entries()]
PAGE = CHECKOUT / "docs" / "recipes.md"


@pytest.fixture
def bare(libraries: None, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, with a cache that shows whether a run touches the user's."""
    place = tmp_path / "desk"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def test_every_recipe_that_there_should_be_is_there() -> None:
    root = catalogue.folder()
    assert len(NAMES) == len([path for path in root.rglob("*") if path.suffix in catalogue.SUFFIXES])
    # The page is checked in: a recipe that is lost is still on it.
    listed = re.findall(r"^\|.* <a id=\S+</a>(\S+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(NAMES)
    assert {load_recipe(name).recipe.task for name in NAMES} == set(tasks.names()), "a task without a recipe"


@pytest.mark.rotated
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("rendered")
def test_a_recipe_runs_from_end_to_end(
    name: str, bare: Path, own_cache: Path, finetune: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    resolved = load_recipe(name)
    ended = finetune(name, "--smoke", "output_dir=run")
    assert ended.code == 0, ended.err
    assert f"a tiny {family_of(resolved.recipe).name}" in ended.out
    run = Path("run")
    said: dict[str, Any] = results(run)
    assert said["device"]["value"] == "mps"
    assert said["expectation"] is None
    assert said["choices"]["smoke"]["reason"].endswith("no score counts")
    # No operator leaves the device but those that the recipe's header owns up to.
    fell_back = {entry["operator"] for entry in said["fallback"]}
    # Nothing else is said on stderr than, once, what those operators cost: a line, a table with its head, and a foot.
    table = ended.err.splitlines()[: 3 + len(fell_back)] if fell_back else []
    ledger.print_report()  # as at the end of the process
    assert ended.err.splitlines() + capfd.readouterr().err.splitlines() == table
    assert not table or table[0].startswith(f"hf-mps: {len(fell_back)} operators without a Metal kernel ran on the CPU")
    assert fell_back <= set(resolved.recipe.fallback)
    text = catalogue.find(name).path.read_text(encoding="utf-8")
    header = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    assert all(operator in header for operator in resolved.recipe.fallback)
    assert {"results.json", "training.png", "README.md"} <= {path.name for path in run.iterdir()}
    for promised in (said["predictions"], *said["pictures"]):
        assert promised is None or (run / promised).stat().st_size > 0
    assert "hf-mps predict" in ended.out
    # The card of an adapter names its base model for other machines: a tiny one is nowhere else.
    if not (run / "adapter_config.json").is_file():
        check_snippet(run)
    assert not own_cache.exists(), "a smoke run left rows in the user's cache"
    assert [path.name for path in Path().iterdir()] == ["run"]


def check_snippet(run: Path) -> None:
    """Run the lines of the model card that load the model, in a folder with the file that they may name."""
    card = (run / "README.md").read_text(encoding="utf-8")
    lines = card.partition("```python\n")[2].partition("\n```")[0]
    assert '"."' in lines
    Image.new("RGB", (40, 30)).save("photo.jpg")
    names: dict[str, Any] = {}
    exec(lines.replace('"."', repr(str(run))), names)
    Path("photo.jpg").unlink()
    # A pipeline holds its model; a SentenceTransformer and a model of transformers are torch modules themselves.
    loaded = [getattr(value, "model", value) for value in names.values()]
    models = [one for one in loaded if hasattr(one, "named_parameters") and not isinstance(one, type)]
    assert sum(parameter.numel() for one in models for parameter in one.parameters()) > 0


def test_a_smoke_run_leaves_nothing_where_no_folder_is_named(bare: Path, own_cache: Path, finetune: Command) -> None:
    ended = finetune("glue/cola", "--smoke").finished()
    assert "--smoke: gone after the run" in ended.out
    assert ended.out.splitlines()[-1] == snapshot(
        "smoke run ended well; its files are gone (output_dir=PATH keeps them)"
    )
    assert "results.json" not in ended.out  # nor is a file named that nobody can open
    assert list(Path().iterdir()) == []
    assert not own_cache.exists()


def test_the_verbs_that_a_kept_smoke_run_names_find_its_tiny_model_and_rows(
    bare: Path, finetune: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = finetune("sft/alpaca", "--smoke", "lora.export=adapter", "output_dir=run")
    assert (ended.code, ended.err) == (0, "")
    assert "hf-mps evaluate run\n" in ended.out
    Path("run").rename("moved")
    metrics = json.loads(Path("moved/results.json").read_text(encoding="utf-8"))["metrics"]
    capfd.readouterr()
    assert main(["evaluate", "moved", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["splits"]["validation"]["metrics"] == pytest.approx(metrics)
    Path("rows.jsonl").write_text('{"instruction": "Say it.", "input": ""}\n', encoding="utf-8")
    assert main(["predict", "moved", "rows.jsonl", "generate.max_new_tokens=4"]) == 0
    assert "prompt,generated\nuser: Say it.," in capfd.readouterr().out
    assert main(["export", "merged", "moved", "merged"]) == 0
    assert main(["push", "moved", "OWNER/NAME", "--dry-run"]) == 0
    assert "not sent: hidden" in capfd.readouterr().out


@pytest.mark.parametrize("family", ["d_fine", "rt_detr"])
def test_a_detector_with_parts_for_each_class_in_its_decoder_learns_other_classes(
    family: str, bare: Path, finetune: Command
) -> None:
    ended = finetune("object-detection", "--smoke", f"model_type={family}", "model=a/b", "training.max_steps=2")
    assert (ended.code, ended.err) == (0, "")
    assert f"a tiny {family}" in ended.out


def test_the_command_lines_own_training_is_kept(bare: Path, finetune: Command) -> None:
    assert finetune("glue/cola", "--smoke", "training.max_steps=2", "output_dir=run").code == 0
    said = json.loads(Path("run/results.json").read_text(encoding="utf-8"))
    assert said["choices"]["steps"] == {"value": 2, "reason": "max_steps in the recipe"}
    assert said["choices"]["batch"]["reason"] == snapshot("--smoke, which takes a few short steps")
    assert said["recipe"]["training"]["learning_rate"] == load_recipe("glue/cola").recipe.training["learning_rate"]


def test_a_smoke_run_takes_the_place_of_no_other_files(bare: Path, finetune: Command) -> None:
    Path("run").mkdir()
    Path("run/notes.txt").write_text("keep", encoding="utf-8")
    ended = finetune("glue/cola", "--smoke", "output_dir=run")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("hf-mps: output_dir run is in use already")
    assert [path.name for path in Path("run").iterdir()] == ["notes.txt"]


def test_a_recipe_of_the_project_names_a_model_whose_architecture_is_known() -> None:
    """By its files, the table of known models, or the recipe's own `model_type`: its smoke run tries that out."""
    assert {name: family_of(load_recipe(name).recipe).reason for name in NAMES} == dict.fromkeys(NAMES, "")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("glue/mrpc", "bert"),
        ("text-classification", "distilbert"),
        ("masked-lm/wikitext", "roberta"),
        ("sentence-embeddings/stsb", "bert"),
        ("sentence-embeddings/all-nli", "mpnet"),
        ("sft/chat", "qwen3"),
        ("distill/alpaca", "qwen2"),
        ("dpo/ultrafeedback", "qwen2"),
        ("orpo/ultrafeedback", "qwen2"),
        ("kto/kto-mix", "qwen2"),
        ("grpo/gsm8k", "qwen2"),
        ("causal-lm/wikitext", "gpt2"),
        ("summarization/xsum", "t5"),
        ("summarization/dialogsum", "bart"),
        ("translation/wmt16-en-ro", "marian"),
        ("speech-recognition/librispeech", "wav2vec2"),
        ("image-classification", "vit"),
        ("image-text/vqa", "idefics3"),
        ("image-generation/lora", "stable-diffusion"),
        ("image-segmentation", "segformer"),
        ("object-detection", "yolos"),
    ],
)
def test_a_smoke_run_has_the_architecture_of_the_recipes_model_or_one_that_is_usual(name: str, family: str) -> None:
    assert family_of(load_recipe(name).recipe).name == family
    unknown = family_of(load_recipe(name, ["model=somebody/something"]).recipe)
    assert f"(model_type=NAME does): {unknown.name} is usual for {load_recipe(name).recipe.task}" in unknown.reason
    assert family_of(load_recipe(name, ["model=somebody/something", f"model_type={family}"]).recipe).name == family


def test_the_configuration_in_the_hubs_cache_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "config.json").write_text('{"model_type": "electra", "embedding_size": 64}', encoding="utf-8")
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda model, name: str(tmp_path / name) if model == "a/b" else None
    )
    family = family_of(load_recipe("glue/cola", ["model=a/b"]).recipe)
    assert (family.name, family.config["embedding_size"], family.reason) == ("electra", 64, "")


def test_a_model_that_nothing_tells_is_tried_out_as_the_usual_one_and_says_so(bare: Path, finetune: Command) -> None:
    finetune("glue/cola", "--smoke", "model=somebody/something", "output_dir=run").finished()
    said = json.loads(Path("run/results.json").read_text(encoding="utf-8"))
    assert said["choices"]["smoke"] == snapshot(
        {
            "value": "a tiny bert",
            "reason": "nothing here tells the architecture of somebody/something (model_type=NAME does): bert is usual"
            " for text-classification; --smoke shows that everything runs, on made-up rows: no score counts",
        }
    )
    assert finetune("glue/cola", "--smoke", "model=somebody/something", "model_type=distilbert").code == 0
    assert finetune("glue/cola", "--smoke", "model_type=brt").refused() == snapshot(
        "--smoke: the installed transformers has no architecture 'brt'"
    )


def test_a_folder_tells_its_architecture_itself(desk: Path, finetune: Command) -> None:
    ended = finetune("my.yaml", "--smoke", "output_dir=run").finished()
    assert "a tiny bert" in ended.out


# Those whose sizes fit each other in ways of their own.
OTHERS = ("convnext", "convnextv2", "segformer", "pvt", "mamba2", "xlnet", "mixtral", "rwkv")
SOUND = ("wav2vec2", "hubert", "wavlm")
PICTURES = ("vit", "deit", "swin", "dinov2", "convnext", "convnextv2", "segformer", "pvt")


@pytest.mark.rotated
@pytest.mark.parametrize("name", sorted({*OTHERS, *PICTURES, *SOUND, *processors.WORDS}))
def test_a_tiny_model_of_every_architecture_loads(name: str, tmp_path: Path) -> None:
    reads: processors.Input = "sound" if name in SOUND else "image" if name in PICTURES else "text"
    family = processors.Family(name, reads, processors.WORDS.get(name, "bytes"), {})
    smoke.write(family, tmp_path / "tiny", ["The cat sat on the mat.", "Where does Ada live?"], seed=1)
    loaded = AutoModel.from_pretrained(tmp_path / "tiny")
    assert loaded.config.model_type == name
    assert loaded.num_parameters() < (200_000 if name not in OTHERS else 60_000_000)
    if reads == "text":
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
        ids = tokenizer("The cat", "Where?")["input_ids"]
        assert len(tokenizer) <= loaded.config.vocab_size
        assert "The cat" in tokenizer.decode(ids, skip_special_tokens=True)
        assert max(ids) < len(tokenizer)
    elif reads == "sound":
        assert AutoProcessor.from_pretrained(tmp_path / "tiny").tokenizer("THE CAT")["input_ids"]


def test_a_wrong_text_is_about_another_thing() -> None:
    for number, (text, _) in enumerate(synthetic.about_things()):
        *doing, thing = text.split()
        *same, other = synthetic.about_another(number).split()
        assert same == doing
        assert other != thing


@pytest.mark.parametrize(
    ("name", "kind"), [("time_series_transformer", "TimeSeriesTransformerModel"), ("t5", "T5ForConditionalGeneration")]
)
def test_a_model_of_two_halves_is_one_for_texts_only_where_there_is_such_a_class(name: str, kind: str) -> None:
    with torch.device("meta"):
        made = smoke._of_config(AutoConfig.for_model(name, prediction_length=4))
    assert type(made).__name__ == kind
