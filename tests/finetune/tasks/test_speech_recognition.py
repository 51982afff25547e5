"""Speech recognition: sound read and padded, letters chosen, and a CTC model trained on mps with its two fallbacks."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from datasets import Dataset
from inline_snapshot import snapshot
from safetensors.numpy import load_file
from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2Model, pipeline

from hf_mps.core.errors import UserError
from hf_mps.core.releases import torch_release
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.media import audio
from hf_mps.finetune.tasks import speech_recognition
from hf_mps.metrics import texts
from tests.finetune import senses, tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command

soundfile = pytest.importorskip("soundfile")

RECIPE = """# Hear the tones.
task: speech-recognition
model: ear
data:
  files: {train: train.jsonl, validation: dev.jsonl}
fallback: [aten::_ctc_loss, aten::_ctc_loss_backward]
seed: 1
training:
  per_device_train_batch_size: 4
  gradient_accumulation_steps: 2
  learning_rate: 3e-3
  num_train_epochs: 2
"""


@pytest.fixture(scope="module")
def ear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer wav2vec2 with random weights and its feature extractor."""
    folder = tmp_path_factory.mktemp("ear") / "ear"
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(32,) * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        mask_time_length=2,
    )
    Wav2Vec2Model(config).save_pretrained(folder)
    Wav2Vec2FeatureExtractor().save_pretrained(folder)
    return folder


@pytest.fixture
def hearing(desk: Path, ear: Path) -> Path:
    return senses.listen(desk, ear, RECIPE)


@pytest.mark.usefixtures("rendered")
def test_a_run_falls_back_with_exactly_the_operators_that_its_recipe_names(hearing: Path, finetune: Command) -> None:
    assert finetune("my.yaml").code == 0
    said = results(hearing / "runs/my")
    assert said["device"]["value"] == "mps"
    missing = {"aten::_ctc_loss", "aten::_ctc_loss_backward"} if torch_release() < (2, 15) else set()
    assert {entry["operator"] for entry in said["fallback"]} == missing
    assert said["choices"].get("on_the_cpu", {"value": ""})["value"] == ", ".join(sorted(missing))
    assert said["main_metric"] == "wer"
    assert said["greater_is_better"] is False
    assert set(said["metrics"]) == {"wer", "cer", "loss"}
    assert said["baseline"] == {"what": "answers nothing", "metrics": {"wer": 1.0, "cer": 1.0}}
    assert said["choices"]["vocabulary"]["value"] == "abcd"
    assert said["choices"]["feature_encoder"]["value"] == "frozen"
    # Rows lie beside the csv or jsonl that names them, and each has a line.
    lines = predictions(hearing / "runs/my")
    given = [json.loads(line)["text"] for line in (hearing / "dev.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["truth"] for line in lines] == given
    assert [float(line["seconds"]) for line in lines] == [round(len(text) * 0.1, 2) for text in given]
    assert [float(line["cer"]) for line in lines] == [
        round(texts.cer([line["prediction"]], [line["truth"]]), 4) for line in lines
    ]
    assert (hearing / "runs/my/transcripts.png").read_bytes().startswith(b"\x89PNG")
    # What is saved recognises with transformers' own pipeline.
    recognise = pipeline("automatic-speech-recognition", model=str(hearing / "runs/my"), device="cpu")
    assert isinstance(recognise(numpy.zeros(16000, dtype="float32"))["text"], str)
    assert set(recognise.tokenizer.get_vocab()) == {"|", "a", "b", "c", "d", "[UNK]", "[PAD]"}


@pytest.mark.slow
def test_a_model_learns_to_hear_what_it_never_heard(hearing: Path, finetune: Command) -> None:
    assert (
        finetune(
            "my.yaml",
            "freeze_feature_encoder=false",
            "config_overrides={mask_time_prob: 0.0}",
            "training.per_device_train_batch_size=8",
            "training.gradient_accumulation_steps=1",
            "training.num_train_epochs=60",
            "training.lr_scheduler_type=constant",
            "training.eval_strategy=no",
            "training.save_strategy=no",
        ).code
        == 0
    )
    assert results(hearing / "runs/my")["metrics"]["cer"] < 0.3


def test_the_feature_encoder_stays_as_it_was_unless_the_recipe_frees_it(
    hearing: Path, ear: Path, finetune: Command
) -> None:
    name = "feature_extractor.conv_layers.0.conv.weight"
    before = load_file(ear / "model.safetensors")[name]
    for free in (False, True):
        folder = f"out-{free}"
        words = (f"freeze_feature_encoder={str(not free).lower()}", f"output_dir={folder}", "training.max_steps=2")
        assert finetune("my.yaml", *words).code == 0
        after = load_file(hearing / folder / "model.safetensors")[f"wav2vec2.{name}"]
        assert numpy.array_equal(before, after) is not free


def test_accumulating_gradients_does_not_multiply_the_loss(hearing: Path, finetune: Command) -> None:
    losses = []
    for batch, steps in ((8, 1), (4, 2)):
        sizes = f"per_device_train_batch_size={batch}", f"gradient_accumulation_steps={steps}"
        words = (*sizes, "max_steps=1", "logging_steps=1")
        assert finetune("my.yaml", *(f"training.{word}" for word in words), f"output_dir=by-{steps}").code == 0
        losses.append(results(hearing / f"by-{steps}")["log_history"][0]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.3)


def test_texts_with_more_letters_than_frames_are_counted_and_refused_where_all_are(
    hearing: Path, finetune: Command
) -> None:
    path = hearing / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows[:3]:
        row["text"] *= 9
    tiny.write_jsonl(path, rows)
    assert finetune("my.yaml", "training.max_steps=1").code == 0
    left = results(hearing / "runs/my")["choices"]["left_out"]
    assert left == {"value": "3 training rows", "reason": "more letters than frames"}
    tiny.write_jsonl(path, rows[:3])
    assert finetune("my.yaml").refused() == snapshot(
        "train.jsonl: each text has more letters than its sound has frames; allowed: sounds that spell their texts"
    )


def test_rows_that_are_too_long_are_left_out_and_told_of(hearing: Path, finetune: Command) -> None:
    assert finetune("my.yaml", "max_duration_in_seconds=0.75", "training.max_steps=1").code == 0
    left = results(hearing / "runs/my")["choices"]["left_out"]
    texts = [json.loads(line)["text"] for line in (hearing / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert left["value"] == f"{sum(len(text) > 7 for text in texts)} training rows"
    assert left["reason"] == snapshot("longer than 0.75 seconds")
    one = speech_recognition.left_out({"training": {"too long": 1}, "validation": {"too long": 0}})
    assert one["left_out"].value == "1 training row"
    assert finetune("my.yaml", "max_duration_in_seconds=0.1").refused() == snapshot(
        "train.jsonl: each row is longer than max_duration_in_seconds, 0.1; allowed: 0.7 or more"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": " "}, "train.jsonl: row 1 has no letters in its text; allowed: some in every row"),
        ({"audio": "none.wav"}, "train.jsonl: row 1: audio: none.wav: there is no such file"),
        (
            {"audio": "my.yaml"},
            "train.jsonl: row 1: audio my.yaml is no sound that can be read: Format not recognised; allowed: wav, flac,"
            " ogg, mp3",
        ),
    ],
)
def test_a_row_that_cannot_be_heard_is_named(
    hearing: Path, finetune: Command, change: dict[str, Any], message: str
) -> None:
    lines = [json.loads(line) for line in (hearing / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    lines[0] |= change
    tiny.write_jsonl(hearing / "train.jsonl", lines)
    assert finetune("my.yaml").refused() == message


def test_without_soundfile_the_command_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(
        UserError, match=r"^reading sound needs soundfile; next: pip install 'jiwer>=3' 'soundfile>=0.13'$"
    ):
        audio.library()


def rows_of(*contents: bytes) -> Rows:
    return Rows(Dataset.from_list([{"audio": {"bytes": content, "path": None}} for content in contents]), "here")


def encoded(wave: Any, rate: int, kind: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format=kind)
    return file.getvalue()


def test_a_sound_that_is_replaced_is_measured_anew(hearing: Path, finetune: Command) -> None:
    assert "longer than 20 seconds" not in finetune("my.yaml", "--plan").finished().out
    first = json.loads((hearing / "train.jsonl").read_text(encoding="utf-8").partition("\n")[0])
    (hearing / first["audio"]).write_bytes(encoded(numpy.zeros(21 * 16000), 16000))
    assert "longer than 20 seconds" in finetune("my.yaml", "--plan").finished().out


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_sound_of_any_kind_and_rate_is_one_channel_at_the_models_rate(kind: str, rate: int) -> None:
    time = numpy.arange(rate) / rate
    tone = 0.5 * numpy.sin(2 * numpy.pi * 440 * time)
    rows = rows_of(encoded(numpy.stack([tone, tone], axis=1), rate, kind))
    wave = audio.read(rows, 0, 16000)
    assert wave.dtype == numpy.float32
    assert wave.ndim == 1
    assert audio.samples(rows, 0, 16000) == len(wave) == pytest.approx(16000, rel=0.1)
    # The tone is still the tone: 440 Hz is the strongest frequency, at half the full height.
    spectrum = numpy.abs(numpy.fft.rfft(wave[:16000] * numpy.hanning(len(wave[:16000]))))
    assert spectrum.argmax() * 16000 / len(wave[:16000]) == pytest.approx(440, abs=2)
    assert numpy.abs(wave[2000:14000]).max() == pytest.approx(0.5, abs=0.05)


def test_batches_of_sound_are_padded_with_silence_to_a_length_of_the_list() -> None:
    recipe = SimpleNamespace(optimizations=True, training={"per_device_train_batch_size": 2})
    counts = [50] * 40 + [100] * 40
    choice = audio.durations(recipe, counts, [100], hop=320, rate=16000)  # type: ignore[arg-type]
    assert choice.value.shapes == (50, 100)
    assert str(choice.value) == "1.0, 2.0 seconds"
    collator = choice.value.collator(audio.collator(Wav2Vec2FeatureExtractor(return_attention_mask=True), 6))
    made = collator([{"input_values": numpy.ones(15000, "float32"), "labels": [1, 2]} for _ in range(2)])
    assert made["input_values"].shape == made["attention_mask"].shape == (2, 16000)
    assert made["input_values"][:, 15000:].abs().sum() == 0
    assert made["attention_mask"].sum(-1).tolist() == [15000, 15000]
    assert made["labels"].tolist() == [[1, 2, -100, -100, -100, -100]] * 2
    longer = collator([{"input_values": numpy.ones(16001, "float32"), "labels": [1] * 8}])
    assert longer["input_values"].shape == (1, 32000)
    assert longer["labels"].shape == (1, 8)
    off = audio.durations(SimpleNamespace(optimizations=False, training={}), counts, [100], 320, 16000)  # type: ignore[arg-type]
    assert off.value.collator(lambda batch: batch)({"input_values": made["input_values"]})["input_values"].shape == (
        2,
        16000,
    )


@pytest.mark.parametrize(
    ("text", "case", "ignored", "expected"),
    [
        ("Hello,  World!", "lower", ",!", "hello world"),
        ("Grüße", "upper", "", "GRÜSSE"),
        (" As it is. ", "keep", "", "As it is."),
        ("-", "lower", "-", ""),
    ],
)
def test_texts_are_brought_to_what_the_model_spells(
    text: str, case: speech_recognition.Case, ignored: str, expected: str
) -> None:
    assert speech_recognition.cleaned(text, case, ignored) == expected


def test_a_recogniser_keeps_its_own_letters_and_unknown_ones_are_told(hearing: Path, finetune: Command) -> None:
    assert finetune("my.yaml", "letter_case=upper", "training.max_steps=1", "output_dir=first").code == 0
    lines = (hearing / "dev.jsonl").read_text(encoding="utf-8").replace("abba", "abbé")
    (hearing / "dev.jsonl").write_text(lines, encoding="utf-8")
    assert finetune("my.yaml", "model=first", "training.max_steps=1").code == 0
    choices = results(hearing / "runs/my")["choices"]
    assert choices["vocabulary"] == {
        "value": "ABCD",
        "reason": snapshot("the checkpoint's: the checkpoint was fine-tuned for recognition"),
    }
    assert choices["letter_case"] == {"value": "upper", "reason": snapshot("the case of the vocabulary")}
    assert choices["unknown_letters"]["value"] == "É"
    assert "new, to be trained from scratch" not in choices["model"]["reason"]


def test_error_rates_count_over_all_rows_and_may_pass_one() -> None:
    assert texts.wer(["a b", "x"], ["a c d", "x"]) == 2 / 4
    assert texts.wer(["a a a"], ["b"]) == 3.0
    assert texts.cer(["a  b "], ["a b"]) == 0.0
    with pytest.raises(ValueError, match=r"^the references hold no word"):
        texts.wer(["a"], [" "])
