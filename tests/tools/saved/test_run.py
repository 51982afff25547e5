"""What a saved model is opened as: a run's folder, a checkpoint, any folder of save_pretrained, a hub name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.core.errors import UserError
from hf_mps.finetune.models.checkpoint import resolve
from hf_mps.tools.saved.run import Adapter, infer_task, open_run, weights_of
from tests.refusals import refusal
from tests.snapshots import masked
from tests.tools.saved.conftest import Made


def test_a_run_names_its_recipe_its_choices_and_what_it_was_trained_from(kept: Made) -> None:
    run = kept("text-classification")
    opened = open_run(str(run.folder))
    assert str(opened.task) == "text-classification (its recipe.yaml)"
    assert opened.recipe.task == "text-classification"
    assert opened.recipe.data.columns.roles()["text_pair"] == "sentence2"
    assert opened.chosen["device"] == "mps"
    assert opened.checkpoint.source == str(run.folder)
    assert opened.base.source == str(run.rows.parent / "model")


def test_a_checkpoint_of_a_run_is_opened_by_the_recipe_of_the_run(kept: Made) -> None:
    run = kept("text-classification")
    (checkpoint,) = run.folder.glob("checkpoint-*")
    opened = open_run(str(checkpoint))
    assert opened.recipe == open_run(str(run.folder)).recipe
    assert opened.checkpoint.source == str(checkpoint)


def test_an_adapter_is_opened_with_its_base_model(kept: Made) -> None:
    run = kept("dpo")
    opened = open_run(str(run.folder))
    assert isinstance(opened.checkpoint, Adapter)
    assert opened.checkpoint.base.source == str(run.rows.parent / "model")
    assert opened.recipe.lora is not None
    assert opened.to_use.lora is None


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("token-classification", "its configuration names BertForTokenClassification"),
        ("question-answering", snapshot("its configuration names BertForQuestionAnswering")),
        ("sentence-embeddings", "its config_sentence_transformers.json names SentenceTransformer"),
        ("sft", "its configuration names Qwen2ForCausalLM, and its tokenizer has a chat template"),
        ("image-classification", "its configuration names ViTForImageClassification"),
        ("speech-recognition", "its configuration names Wav2Vec2ForCTC"),
    ],
)
def test_a_folder_without_a_run_tells_its_task_by_its_configuration(
    task: str, reason: str, kept: Made, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    left = shutil.ignore_patterns("results.json", "recipe.yaml", "checkpoint-*")
    shutil.copytree(kept(task).folder, model, ignore=left)
    opened = open_run(str(model))
    assert (opened.task.value, opened.task.reason) == (task, reason)
    assert opened.chosen == {}
    assert opened.results is None


RERANKER = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


@pytest.mark.parametrize(
    ("files", "task"),
    [
        ({"modules.json": [], "config_sentence_transformers.json": {"model_type": "CrossEncoder"}}, "rerank"),
        (
            {"modules.json": [], "config_sentence_transformers.json": {"model_type": "SparseEncoder"}},
            "sparse-embeddings",
        ),
        ({"modules.json": [], "config_sentence_transformers.json": {}}, "sentence-embeddings"),
        ({"config.json": RERANKER | {"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}}}, "rerank"),
        ({"config.json": RERANKER | {"sbert_ce_default_activation_function": "torch.nn.Identity"}}, "rerank"),
        # A cross-encoder of three classes (entailment) and a model of one number that nobody calls a reranker.
        (
            {"config.json": RERANKER | {"sentence_transformers": {}, "id2label": {"0": "a", "1": "b", "2": "c"}}},
            "text-classification",
        ),
        ({"config.json": RERANKER}, "text-classification"),
    ],
)
def test_a_model_of_sentence_transformers_tells_its_kind_by_its_files(
    files: dict[str, object], task: str, tmp_path: Path
) -> None:
    for name, content in {"model.safetensors": "", "config.json": RERANKER, **files}.items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    assert open_run(str(tmp_path)).task.value == task


def test_halves_are_taken_as_a_file_has_them_where_the_device_computes_them(kept: Made, tmp_path: Path) -> None:
    model = tmp_path / "model"
    left = shutil.ignore_patterns("results.json", "recipe.yaml", "checkpoint-*")
    shutil.copytree(kept("text-classification").folder, model, ignore=left)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"dtype": "float16"}), encoding="utf-8")
    opened = open_run(str(model))
    assert weights_of(opened, "mps").value == "float16"
    assert str(weights_of(opened, "cpu")) == snapshot("float32 (its files have float16; the CPU's own precision)")
    assert weights_of(open_run(str(kept("text-classification").folder)), "mps").value == "float32"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {},
            snapshot("<place>: the folder holds no model; allowed: a run's folder, or one that save_pretrained wrote"),
        ),
        (
            {"recipe.yaml": "task: sft\n"},
            snapshot(
                "<place> holds a run that has not ended and no model yet; next: hf-mps finetune <place>/recipe.yaml"
                " output_dir=<place>"
            ),
        ),
        (
            {"config.json": '{"architectures": ["SomethingElse"]}'},
            snapshot("<place>: its configuration names SomethingElse, which fits no task; next: --task TASK"),
        ),
        (
            {"config.json": json.dumps(RERANKER | {"id2label": {"0": "a", "2": "b"}})},
            snapshot("<place>: id2label in its config.json has 0, 2; allowed: 0 to 1"),
        ),
        (
            {
                "model.safetensors": "",
                "modules.json": "[]",
                "config_sentence_transformers.json": '{"model_type": "MultiVectorEncoder"}',
            },
            snapshot(
                "<place>: its config_sentence_transformers.json names MultiVectorEncoder, which fits no task; next:"
                " --task TASK"
            ),
        ),
        (
            "a file",
            snapshot(
                "<place>: is a file; allowed: a run's folder, one that save_pretrained wrote, a model's name on the hub"
            ),
        ),
        (
            None,
            snapshot(
                "<place>: there is no such folder; allowed: a run's folder, one that save_pretrained wrote, a model's"
                " name on the hub"
            ),
        ),
    ],
)
def test_what_is_no_saved_model_is_refused_in_one_line(
    files: dict[str, str] | str | None, said: str, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    if isinstance(files, str):
        place.write_text(files, encoding="utf-8")
    elif files is not None:
        place.mkdir()
        for name, content in files.items():
            (place / name).write_text(content, encoding="utf-8")
    assert masked(refusal(open_run, str(place)), place=str(place)) == said


def test_a_task_that_there_is_not_and_one_that_a_run_is_not_are_refused(kept: Made) -> None:
    run = str(kept("text-classification").folder)
    with pytest.raises(UserError, match="is a run of text-classification; leave --task out"):
        open_run(run, "sft")
    with pytest.raises(UserError, match=r"--task stf is not a task; .*did you mean 'sft'"):
        infer_task(resolve("somebody/something"), "stf")


def test_a_pickle_that_holds_more_than_tensors_is_not_run(kept: Made, tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(kept("text-classification").folder, place, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save({"weights": Path}, place / "pytorch_model.bin")
    assert masked(
        refusal(open_run(str(place)).checkpoint.model, "AutoModelForSequenceClassification"), place=str(place)
    ) == snapshot(
        "model <place>: its weights are a pickle that holds more than tensors, and is not run; next: save the model"
        " again, as safetensors"
    )


def test_a_misspelt_folder_is_told_from_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "sorter").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^runs/sortr: there is no such folder; did you mean 'sorter'\?$"):
        open_run("runs/sortr")
