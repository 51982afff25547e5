"""Speech to text by generation: Whisper hears up to 30 seconds and writes them down, or their English translation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import labels
from hf_mps.finetune.data.load import SPLITS, Rows
from hf_mps.finetune.media import audio, ctc_vocabulary, synthetic_sound, transcripts, whisper
from hf_mps.finetune.models import language
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.models.seq2seq import ARGUMENTS, SETTLED
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.text import lengths, tokens
from hf_mps.metrics.selection import choose

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["ARGUMENTS", "SETTLED", "TRUTH", "Recipe", "answer", "prepare", "smoke_rows"]

AUTO_CLASS = "AutoModelForSpeechSeq2Seq"
TRUTH = ("text",)
# Rows that are read and answered at a time: their sound is decoded, at a megabyte for half a minute.
AT_A_TIME = 64
# What transformers' run_speech_recognition_seq2seq.py generates at most (its README's generation_max_length).
TARGET = 225


class Recipe(schema.Recipe):
    """Adds options for sound and text; those of run_speech_recognition_seq2seq.py have their names from it.

    `language` is that of the sound (`hindi` or `hi`), `speech_task` whether it is written down or translated into
    English. Rows longer than `max_duration_in_seconds`, or whose text has more than `max_target_length` tokens, take no
    part. `letter_case` is that of all texts. `normalizer` is what is done to texts before errors are counted: Whisper's
    `english` or `basic`, or `none`; by default what suits the texts.
    """

    task: Literal["speech-seq2seq"]
    data: transcripts.Data
    language: str | None = None
    speech_task: whisper.Task | None = None
    letter_case: ctc_vocabulary.Case = "keep"
    normalizer: whisper.Normalizer | None = None
    max_duration_in_seconds: float = Field(default=30.0, gt=0, le=30)
    max_target_length: int | None = Field(default=None, ge=8)
    freeze_encoder: bool = False
    config_overrides: dict[str, Any] = Field(default_factory=dict)


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make features, model, collator and metrics from the rows of both splits.

    Raises UserError for sound, text, a language, a configuration or a checkpoint that cannot be used.
    """
    from transformers import Seq2SeqTrainingArguments, WhisperProcessor

    from hf_mps.finetune.models.speech_trainer import SpeechTrainer, Transcriber

    for split in rows.values():
        tokens.refuse_other_than_text(split, ["text"])
    measured = metrics.load(choose(recipe.metrics, ["wer", "cer"], recipe.task).names)
    config = _config(recipe, checkpoint)
    said = whisper.spoken(checkpoint, recipe.language, recipe.speech_task)
    extractor, tokenizer = checkpoint.feature_extractor(), checkpoint.tokenizer(**said.settings())
    longest = _longest_target(recipe, config)
    heard = {split: _Heard(rows[split], tokenizer, recipe, extractor.sampling_rate, longest) for split in SPLITS}
    model, choices = _model(recipe, checkpoint, config, said, tokenizer)
    truths = [ctc_vocabulary.cleaned(text, recipe.letter_case, "") for text in heard["validation"].of("text")]
    clean, choices["normalizer"] = whisper.normaliser(recipe.normalizer, said, tokenizer, truths)
    if not any(map(clean, truths)):
        raise UserError(f"{rows['validation'].where}: no text has a word left to measure; next: normalizer=none")
    targets = {split: [len(row) for row in one.of("labels")] for split, one in heard.items()}
    shapes = _target_lengths(recipe, targets, longest)
    choices["lengths"] = width = _width(extractor)
    missing = {name: heard[split].missing for split, name in (("train", "training"), ("validation", "validation"))}
    choices |= {"target_lengths": shapes, **transcripts.left_out(missing)}
    valid = heard["validation"]
    transcriber = Transcriber(rows["validation"], valid.kept, valid.seconds, truths, tokenizer, clean)
    defaults, baseline = language.untrained(recipe)  # type: ignore[arg-type]
    sounds = {split: audio.Sounds(rows[split], one.labels, one.kept, extractor) for split, one in heard.items()}
    return Prepared(
        splits=sounds,
        model=model,
        processing_class=WhisperProcessor(extractor, tokenizer),
        collator=width.value.collator(audio.collator(extractor, 0), tokenizer, labels=shapes.value),
        metrics=measured,
        compute_metrics=lambda evaluated: transcriber.measure(evaluated, measured),
        baseline=baseline,
        auto_class=AUTO_CLASS,
        pipeline_tag="automatic-speech-recognition",
        choices=choices,
        trainer=SpeechTrainer,
        arguments=Seq2SeqTrainingArguments,
        arguments_defaults={"predict_with_generate": True, "generation_max_length": longest, **defaults},
        trainer_settings={"untrained": baseline},
        predict=lambda trainer: transcriber.lines(trainer, sounds["validation"]),
        figures=pictures.transcripts,
        snippet=transcripts.SNIPPET,
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved model writes down sound, in the language and for the task that it was trained for.

    A model that names no language hears which one it is. Raises UserError for a checkpoint that cannot be used.
    """
    from transformers import Seq2SeqTrainingArguments, WhisperProcessor

    from hf_mps.finetune.models.seq2seq import decoded
    from hf_mps.finetune.models.speech_trainer import SpeechTrainer

    config, extractor = _config(recipe, checkpoint), checkpoint.feature_extractor()
    stored = checkpoint.stored_generation()
    language_of_it = recipe.language or stored.get("language")
    said = None
    if language_of_it or not stored.get("is_multilingual", True):
        said = whisper.spoken(checkpoint, language_of_it, recipe.speech_task or stored.get("task"))
    tokenizer = checkpoint.tokenizer(**(said.settings() if said else {}))
    model, choices = _model(recipe, checkpoint, config, said, tokenizer)
    choices["lengths"] = width = _width(extractor)
    longest, rate = _longest_target(recipe, config), extractor.sampling_rate

    def answers(trainer: Any, rows: Rows) -> Iterator[dict[str, Any]]:
        every = range(len(rows.dataset))
        seconds = [audio.samples(rows, at, rate) / rate for at in every]
        for at in every:
            if seconds[at] > extractor.chunk_length:
                told = f"{rows.where}: row {rows.number(at)} has {seconds[at]:.1f} seconds"
                raise UserError(f"{told}; allowed: up to {extractor.chunk_length}; next: cut it into parts")
        sounds = audio.Sounds(rows, None, every, extractor)
        return transcripts.lines(rows, seconds, decoded(trainer.predict(sounds).predictions, tokenizer))

    return Answering(
        model=model,
        processing_class=WhisperProcessor(extractor, tokenizer),
        collator=width.value.collator(audio.collator(extractor, 0), tokenizer),
        answers=answers,
        choices=choices,
        trainer=SpeechTrainer,
        arguments=Seq2SeqTrainingArguments,
        arguments_defaults={"predict_with_generate": True, "generation_max_length": longest},
        at_a_time=AT_A_TIME,
    )


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Write words spelled in tones as wav files into `folder`, and return their rows."""
    named = recipe.data.columns
    return synthetic_sound.rows(folder, named.audio, named.text)


class _Heard:
    """One split: its labels (ids without the start token), the rows that take part, and why others do not."""

    def __init__(self, rows: Rows, tokenizer: Any, recipe: Recipe, rate: int, longest: int) -> None:
        self._rows = rows
        encoded = _encoded(rows, tokenizer, recipe.letter_case, rate)
        samples = encoded["samples"][:]
        self.labels: list[list[int]] = encoded["labels"][:]
        most = recipe.max_duration_in_seconds
        short = transcripts.short_enough(rows, samples, most, rate)
        self.kept = [row for row in short if len(self.labels[row]) <= longest]
        if not self.kept:
            raise UserError(f"{rows.where}: every text has more than max_target_length, {longest} tokens; next: more")
        self.seconds = [samples[row] / rate for row in self.kept]
        self.missing = {
            f"longer than {most:g} seconds": len(samples) - len(short),
            f"more than {longest} tokens of text": len(short) - len(self.kept),
        }

    def of(self, what: Literal["text", "labels"]) -> list[Any]:
        """The texts or the labels of the rows that take part."""
        every = self.labels if what == "labels" else self._rows.dataset["text"][:]
        return [every[row] for row in self.kept]


def _config(recipe: Recipe, checkpoint: Checkpoint) -> Any:
    config = checkpoint.config()
    if config.model_type != "whisper":
        raise UserError(
            f"model {checkpoint.name}: its architecture is {config.model_type}; allowed: whisper; next: for wav2vec2"
            " and its kind task=speech-recognition"
        )
    labels.override(config, recipe.config_overrides)
    return config


def _width(extractor: Any) -> Choice[audio.Spectrograms]:
    frames = extractor.nb_max_frames
    width = audio.Spectrograms(frames, "max_length", hop=extractor.hop_length, rate=extractor.sampling_rate)
    return Choice(width, f"the encoder takes {frames} frames, and silence fills up what is shorter")


def _target_lengths(recipe: Recipe, counts: Mapping[str, list[int]], longest: int) -> Choice[lengths.Lengths]:
    """Choose what labels are padded to; a batch groups none of like length."""
    train, others = counts["train"], counts["validation"]
    return lengths.decide(_as_padded(recipe), train, longest, others=others, grouped=False, name="target_lengths")


def _longest_target(recipe: Recipe, config: Any) -> int:
    positions = int(config.max_target_positions)
    asked = recipe.max_target_length
    if asked is not None and asked > positions:
        raise UserError(f"max_target_length is {asked}; allowed: at most {positions}, the positions of this model")
    return asked or min(TARGET, positions)


def _model(
    recipe: Recipe, checkpoint: Checkpoint, config: Any, said: whisper.Spoken | None, tokenizer: Any
) -> tuple[Any, dict[str, Choice[Any]]]:
    """Load the model, settled on its language and task; return the choices behind it too. None: it hears which."""
    import transformers

    lent = tokens.set_pad_token(tokenizer, config)
    model, weights = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    choices: dict[str, Choice[Any]] = {"model": weights, **lent}
    if said is None:
        choices["speech"] = Choice("any language", "the model hears which one it is; language=NAME says so")
        return model, choices
    whisper.settle(model, tokenizer, said)
    heard = said.language or "english"
    written = "translated into English" if said.task == "translate" else "written down"
    reason = "language and speech_task in the recipe" if said.language else "the model knows English alone"
    choices["speech"] = Choice(f"{heard}, {written}", f"{reason}; without timestamps")
    if recipe.freeze_encoder:
        model.freeze_encoder()
        choices["encoder"] = Choice("frozen", "freeze_encoder in the recipe")
    return model, choices


def _as_padded(recipe: Recipe) -> Any:
    """The recipe's settings as `lengths.decide` reads them; labels have no keys of their own."""
    return lengths.Padded.model_construct(padding=None, optimizations=recipe.optimizations, training=recipe.training)


def _encoded(rows: Rows, tokenizer: Any, case: ctc_vocabulary.Case, rate: int) -> Dataset:
    """Return `labels` and `samples` (at `rate`) of each row."""
    from datasets import Features, List, Value

    def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
        texts = [ctc_vocabulary.cleaned(text, case, "") for text in tokens.texts(rows, "text", batch, indices)]
        # The model puts the first token before the labels itself; in pretraining texts began with a space.
        made = tokenizer([f" {text}" for text in texts])["input_ids"]
        return {
            "labels": [ids[1:] for ids in made],
            "samples": [audio.samples(rows, index, rate) for index in indices],
        }

    return tokens.map_cached(
        rows,
        encode,
        content=tokens.digest(tokenizer),
        key=("speech-seq2seq", case, rate, tokenizer.prefix_tokens),
        features=Features({"labels": List(Value("int32")), "samples": Value("int64")}),
    )
