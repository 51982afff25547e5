"""Summaries and translations: generated, decoded and measured as the public scripts measure them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot
from transformers import M2M100Config, M2M100ForConditionalGeneration, NllbTokenizer, set_seed

from hf_mps import metrics
from hf_mps.core.errors import UserError
from hf_mps.metrics import table, texts
from tests.finetune import builders, tiny
from tests.refusals import refusal

pytestmark = pytest.mark.usefixtures("own_cache")

ROWS = [{"translation": {"en": text, "xx": " ".join(reversed(text.split()))}} for text in builders.TEXTS * 2]


def translations(folder: Path) -> dict[str, Any]:
    files = {split: str(tiny.write_jsonl(folder / f"{split}.jsonl", ROWS)) for split in ("train", "validation")}
    return {"files": files, "columns": {"source": "translation.en", "target": "translation.xx"}}


@pytest.mark.rotated
@pytest.mark.parametrize("architecture", ["t5", "bart", "marian"])
def test_a_translation_run_generates_and_is_measured(models: Path, tmp_path: Path, architecture: str) -> None:
    place = str(builders.model(models, architecture))
    prepared = builders.prepare(
        task="translation", model=place, data=translations(tmp_path), max_length=64, max_target_length=12
    )
    trainer = builders.trainer(prepared, tmp_path / "run", learning_rate=1e-2)
    assert trainer.model.device.type == "mps"
    trainer.train()
    found = trainer.evaluate()
    rows = list(prepared.predict(trainer))
    assert [row["prompt"] for row in rows] == [row["translation"]["en"] for row in ROWS]
    # What is measured are the texts in predictions.csv, against targets cut to their longest length.
    labels = list(prepared.validation["labels"])
    truths = [text.strip() for text in prepared.processing_class.batch_decode(labels, skip_special_tokens=True)]
    again = metrics.load(["sacrebleu", "chrf", "bleu"]).compute([row["generated"] for row in rows], truths)
    assert {name: found[f"eval_{name}"] for name in again} == pytest.approx(again)
    assert all(len(row) <= 12 for row in labels)
    assert max(map(len, labels)) == 12, "a target must be cut"
    # So is the baseline beside it, which answers with the source itself.
    sources = [row["prompt"] for row in rows]
    assert prepared.baseline.metrics == pytest.approx(metrics.load(list(again)).compute(sources, truths))


def test_the_source_stands_behind_its_prefix(models: Path, tmp_path: Path) -> None:
    place = str(builders.model(models, "t5"))
    plain, prefixed = (
        builders.prepare(
            task="translation", model=place, data=translations(tmp_path), max_length=64, source_prefix=prefix
        )
        for prefix in (None, "The dog: ")
    )
    tokenizer = prefixed.processing_class
    assert tokenizer.decode(prefixed.train[0]["input_ids"], skip_special_tokens=True).startswith("The dog: Lily saw")
    assert plain.choices["source_prefix"].value == "none"
    assert prefixed.choices["source_prefix"].value == "'The dog: '"
    assert plain.train[0]["labels"] == prefixed.train[0]["labels"]


def test_a_checkpoints_own_prefix_is_taken(models: Path, tmp_path: Path) -> None:
    place = tmp_path / "t5"
    shutil.copytree(builders.model(models, "t5"), place)
    config = json.loads((place / "config.json").read_text(encoding="utf-8"))
    config["task_specific_params"] = {"translation_en_to_xx": {"prefix": "The dog: "}}
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    prepared = builders.prepare(task="translation", model=str(place), data=translations(tmp_path), max_length=64)
    assert prepared.choices["source_prefix"].reason == snapshot("the checkpoint's own for translation_en_to_xx")
    assert prepared.processing_class.decode(prepared.train[0]["input_ids"]).startswith("The dog: Lily")


def test_a_model_of_many_languages_writes_the_one_that_is_asked_for(tmp_path: Path) -> None:
    place = tmp_path / "nllb"
    tokenizer = NllbTokenizer()
    tokenizer.save_pretrained(place)
    set_seed(1)
    sizes = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 16)
    layers = dict.fromkeys(
        ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 1
    )
    config = M2M100Config(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes, **layers)
    M2M100ForConditionalGeneration(config).save_pretrained(place)
    said: dict[str, Any] = {
        "task": "translation",
        "model": str(place),
        "data": translations(tmp_path),
        "max_length": 32,
    }
    with pytest.raises(UserError, match="knows many languages; give src_lang and tgt_lang"):
        builders.prepare(**said)
    with pytest.raises(UserError, match=r"tgt_lang is 'ron', which the tokenizer does not know"):
        builders.prepare(**said, src_lang="eng_Latn", tgt_lang="ron")
    prepared = builders.prepare(**said, src_lang="eng_Latn", tgt_lang="ron_Latn", max_target_length=8)
    ours, theirs = tokenizer.convert_tokens_to_ids(["eng_Latn", "ron_Latn"])
    assert {row["input_ids"][0] for row in prepared.train} == {ours}
    assert {row["labels"][0] for row in prepared.train} == {theirs}
    written = builders.trainer(prepared, tmp_path / "run").predict(prepared.validation).predictions
    assert {row[1] for row in written.tolist()} == {theirs}


def test_labels_are_padded_with_what_no_loss_counts(models: Path, tmp_path: Path) -> None:
    place = str(builders.model(models, "bart"))
    prepared = builders.prepare(task="translation", model=place, data=translations(tmp_path), max_length=64)
    batch = prepared.collator([prepared.train[0], prepared.train[4]])
    lengths = [len(prepared.train[row]["labels"]) for row in (0, 4)]
    assert [(row != -100).sum().item() for row in batch["labels"]] == lengths
    assert batch["decoder_input_ids"].shape == batch["labels"].shape


def test_the_baseline_of_a_summary_is_the_beginning_of_its_document(models: Path, tmp_path: Path) -> None:
    rows = [{"document": "One is. Two is! Three is? Four is.\nFive is.", "summary": "Two is."}] * 4
    file = str(tiny.write_jsonl(tmp_path / "rows.jsonl", rows))
    data = {"files": {"train": file, "validation": file}}
    prepared = builders.prepare(task="summarization", model=str(builders.model(models, "t5")), data=data, max_length=32)
    assert prepared.baseline.what == snapshot("answers with the first 3 sentences of the document")
    assert prepared.baseline.metrics["rouge1"] == pytest.approx(2 * (2 / 6) * 1 / (2 / 6 + 1))
    assert prepared.metrics.main == "rougeL"


def test_rouge_lsum_is_taken_by_sentences() -> None:
    # In another order the longest common subsequence is one sentence, and sentence by sentence both are there.
    found = texts.mean_rouge(["The cat sat down. A dog ran off."], ["A dog ran off. The cat sat down."])
    assert found["rougeL"] == pytest.approx(0.5)
    assert found["rougeLsum"] == pytest.approx(1.0)


def test_references_of_which_rouge_reads_nothing_are_told_of_and_chrf_measures_them(
    models: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    said = ["小明住北京", "สมชายอยู่เชียงใหม่", "Rome"]
    assert texts.mean_rouge(said, said)["rougeL"] == pytest.approx(1 / 3)
    assert [str(one.message) for one in recwarn.list] == snapshot(
        [
            "hf_mps: 2 of 3 references score 0: ROUGE reads the letters a to z and digits alone; next: metrics=chrf",
        ]
    )
    rows = [{"document": one, "summary": one} for one in said]
    data = {"files": dict.fromkeys(("train", "validation"), str(tiny.write_jsonl(tmp_path / "rows.jsonl", rows)))}
    prepared = builders.prepare(
        task="summarization", model=str(builders.model(models, "bart")), data=data, max_length=32, metrics=["chrf"]
    )
    assert prepared.metrics.main == "chrf"
    assert prepared.baseline.metrics["chrf"] == pytest.approx(100)


def test_a_package_that_is_absent_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    assert refusal(metrics.load, ["chrf"]) == snapshot(
        "metrics has chrf, and sacrebleu is not installed; next: pip install 'rouge-score>=0.1.2' 'sacrebleu>=2.4'"
        " 'sentencepiece>=0.2'"
    )


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"src_lang": "en_XX"}, "has one of src_lang and tgt_lang; give both, or neither"),
        ({"src_lang": "en", "tgt_lang": "ro"}, "has no languages to choose from; leave src_lang and tgt_lang out"),
        (
            {"metrics": "rouge"},
            "metrics has 'rouge', which translation does not compute; allowed: sacrebleu, chrf, bleu",
        ),
        ({"max_target_length": 2000}, "max_target_length is 2000; allowed: at most 1024, the positions of this model"),
        ({"training": {"generation_max_length": 9}}, "is not set here: it is the recipe's max_target_length"),
    ],
)
def test_what_cannot_be_is_refused(models: Path, tmp_path: Path, values: dict[str, Any], problem: str) -> None:
    place = str(builders.model(models, "bart"))
    assert problem in refusal(
        builders.prepare, task="translation", model=place, data=translations(tmp_path), max_length=64, **values
    )
