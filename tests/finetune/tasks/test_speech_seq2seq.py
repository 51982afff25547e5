"""Whisper: language and task before each text, 30 seconds a row, errors counted after its own normaliser."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import scipy.signal
from inline_snapshot import snapshot
from transformers import AutoTokenizer, pipeline

from hf_mps.cli.main import main
from hf_mps.core.text import counted
from hf_mps.finetune.data import load
from hf_mps.finetune.media import audio
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks import speech_seq2seq
from hf_mps.finetune.tasks.speech_seq2seq import SpeechSeq2Seq
from hf_mps.metrics import texts
from tests.finetune import senses
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command

pytest.importorskip("soundfile")

RECIPE = """# Write the tones down.
task: speech-seq2seq
model: ear
data:
  files: {train: train.jsonl, validation: dev.jsonl}
language: hindi
normalizer: basic
max_target_length: 16
seed: 1
training:
  per_device_train_batch_size: 8
  per_device_eval_batch_size: 8
  learning_rate: 3e-3
  max_steps: 1
  eval_strategy: 'no'
  save_strategy: 'no'
"""


@pytest.fixture(scope="module")
def _ear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return senses.ear(tmp_path_factory.mktemp("ear") / "ear")


@pytest.fixture
def hearing(desk: Path, _ear: Path) -> Path:
    return senses.listen(desk, _ear, RECIPE)


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_a_run_learns_to_write_the_tones_down_and_the_folder_is_whole(hearing: Path, finetune: Command) -> None:
    """Rows that it trains on: what a tiny model can hear of new ones is the CTC task's test."""
    shutil.copy(hearing / "train.jsonl", hearing / "dev.jsonl")
    finetune("my.yaml", "training.max_steps=90", "training.learning_rate=1e-2").finished()
    said = results(hearing / "runs/my")
    assert said["device"]["value"] == "mps"
    assert said["fallback"] == []
    assert said["main_metric"] == "wer"
    assert said["greater_is_better"] is False
    assert set(said["metrics"]) == {"wer", "cer", "loss"}
    assert said["baseline"]["what"] == "is the model before its first step"
    assert said["baseline"]["metrics"]["cer"] > 0.9
    assert said["metrics"]["cer"] < 0.6
    assert said["choices"]["speech"] == {
        "value": snapshot("hindi, written down"),
        "reason": snapshot("language and speech_task in the recipe; without timestamps"),
    }
    lines = predictions(hearing / "runs/my")
    assert [float(line["cer"]) for line in lines] == [
        round(texts.cer([line["prediction"].lower()], [line["truth"]]), 4) for line in lines
    ]
    assert (hearing / "runs/my/transcripts.png").read_bytes().startswith(b"\x89PNG")
    # What is saved knows its language and task without being told, through transformers' own front door.
    generation = json.loads((hearing / "runs/my/generation_config.json").read_text(encoding="utf-8"))
    assert (generation["language"], generation["task"]) == ("hindi", "transcribe")
    assert generation.get("forced_decoder_ids") is None
    tokenizer = AutoTokenizer.from_pretrained(hearing / "runs/my")
    assert tokenizer.convert_ids_to_tokens(tokenizer("a")["input_ids"])[:4] == [
        "<|startoftranscript|>",
        "<|hi|>",
        "<|transcribe|>",
        "<|notimestamps|>",
    ]
    recognise = pipeline("automatic-speech-recognition", model=str(hearing / "runs/my"), device="cpu")
    tone = audio.Wav((hearing / "sounds/0.wav").read_bytes()).read("float32", True)[:, 0]
    said_of_it = recognise(scipy.signal.resample_poly(tone, 2, 1).astype("float32"))["text"]
    assert said_of_it.strip() == lines[0]["prediction"]


def test_the_model_learns_language_task_and_text_and_begins_with_its_start_token(hearing: Path) -> None:
    made = load_recipe("my.yaml", ["speech_task=translate", "letter_case=upper"])
    rows = load.load(made.recipe.data, 1)
    prepared = SpeechSeq2Seq(made.recipe, checkpoint.resolve("ear"), "mps").prepare(rows)
    tokenizer = prepared.processing_class.tokenizer
    row = prepared.train[0]
    assert row["input_features"].shape == (80, 200)
    assert tokenizer.decode(row["labels"]) == "<|hi|><|translate|><|notimestamps|> ABBA ABBA<|endoftext|>"
    assert prepared.model.config.decoder_start_token_id == tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    batch = prepared.collator([prepared.train[0], prepared.train[1]])  # type: ignore[misc]
    assert batch["input_features"].shape == (2, 80, 200)
    assert batch["labels"].shape[0] == 2
    assert prepared.choices["normalizer"].value == "basic"


def test_rows_that_are_too_long_take_no_part_and_are_told_of(hearing: Path, finetune: Command) -> None:
    assert finetune("my.yaml", "max_duration_in_seconds=0.75").code == 0
    left = results(hearing / "runs/my")["choices"]["left_out"]
    counts = []
    for name in ("train", "dev"):
        lines = (hearing / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        counts.append(sum(len(json.loads(line)["text"]) > 7 for line in lines))
    told = (counted(count, f"{split} row") for count, split in zip(counts, ("training", "validation"), strict=True))
    assert left["value"] == ", ".join(told)
    assert left["reason"] == snapshot("longer than 0.75 seconds")
    assert len(predictions(hearing / "runs/my")) == 8 - counts[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("language=klingon",), "language is 'klingon', which Whisper does not know; allowed: hi or hindi"),
        (("language=null",), "model ear knows many languages; next: language=NAME, that of the sound"),
        (("max_target_length=64",), "max_target_length is 64; allowed: at most 32, the positions of this model"),
        (("model=model",), "model model: its architecture is bert; allowed: whisper; next: for wav2vec2 and its kind"),
        (("max_duration_in_seconds=40",), "max_duration_in_seconds is 40; allowed: 30 or less"),
        (("metrics=bleu",), "metrics has 'bleu', which speech-seq2seq does not compute; allowed: wer, cer"),
    ],
)
def test_what_does_not_fit_is_refused(hearing: Path, finetune: Command, words: tuple[str, ...], message: str) -> None:
    assert message in finetune("my.yaml", *words).refused()


def test_a_model_that_knows_english_alone_takes_no_other(hearing: Path, finetune: Command) -> None:
    (hearing / "ear/generation_config.json").write_text('{"is_multilingual": false}', encoding="utf-8")
    assert (
        finetune("my.yaml").refused() == "language is 'hindi', and model ear knows English alone; next: one without .en"
    )
    assert finetune("my.yaml", "language=english").code == 0
    assert results(hearing / "runs/my")["choices"]["speech"]["reason"] == snapshot(
        "the model knows English alone; without timestamps"
    )


@pytest.mark.parametrize(
    ("said", "text", "kind", "cleaned"),
    [
        (speech_seq2seq.Spoken(None, None), "I won't pay Twenty-one, colour!", "english", "i will not pay 21 colour"),
        (speech_seq2seq.Spoken("french", "translate"), "It's five, Dr. No.", "english", "it is 5 doctor no"),
        (speech_seq2seq.Spoken("german", "transcribe"), "Grüße, Welt!", "basic", "grüße welt"),
        (speech_seq2seq.Spoken("hindi", "transcribe"), "हमने उस उम्मीदवार को चुना।", "none", "हमने उस उम्मीदवार को चुना।"),
    ],
)
def test_errors_are_counted_after_whispers_own_normaliser_where_that_leaves_words_whole(
    said: speech_seq2seq.Spoken, text: str, kind: str, cleaned: str
) -> None:
    clean, choice = speech_seq2seq.normaliser(None, said, None, [text])
    assert choice.value == kind
    assert clean(text) == cleaned


def test_a_saved_model_writes_down_sound_that_nobody_transcribed(
    hearing: Path, finetune: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    assert finetune("my.yaml").code == 0
    capfd.readouterr()
    assert main(["predict", "runs/my", "sounds/0.wav", "--out", "said.jsonl"]) == 0
    (line,) = [json.loads(one) for one in Path("said.jsonl").read_text(encoding="utf-8").splitlines()]
    assert set(line) >= {"seconds", "prediction"}
    assert line["seconds"] == 0.9


def test_a_row_without_a_rate_is_left_out_of_the_picture() -> None:
    rated = {"row": 1, "seconds": 1.5, "prediction": "a", "truth": "a", "wer": 0.0, "cer": 0.0}
    silent = {"row": 2, "seconds": 2.5, "prediction": "a", "truth": "…"}
    assert pictures.transcripts([rated, silent]).keys() == {"transcripts.png"}
