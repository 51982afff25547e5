"""Speech to text by generation: Whisper hears up to 30 seconds and writes them down, or their English translation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import labels
from hf_mps.finetune.data.load import SPLITS, Rows
from hf_mps.finetune.media import audio, ctc_vocabulary, transcripts, whisper
from hf_mps.finetune.models import language
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks._base import GENERATES, Dataset, Prepared, Task
from hf_mps.finetune.tasks._seq2seq import SETTLED, SOURCE
from hf_mps.finetune.text import lengths, tokens

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
    """What the model learns to do."""
    data: transcripts.Data
    language: str | None = None
    """The language of the sound, for a model that knows many."""
    speech_task: whisper.Task | None = None
    """Writes down what was said, or its English translation."""
    letter_case: ctc_vocabulary.Case = "keep"
    """The case of all texts; by default what suits the vocabulary."""
    normalizer: whisper.Normalizer | None = None
    """How texts are made alike before their errors are counted."""
    max_duration_in_seconds: float = Field(default=30.0, gt=0, le=30)
    """Longer training rows are left out."""
    max_target_length: int | None = Field(default=None, ge=8)
    """The tokens that a target is cut to."""
    freeze_encoder: bool = False
    """true keeps the encoder as it is."""
    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Keys of the model's configuration."""


class SpeechSeq2Seq(Task):
    """Learns to write down what is said, or its English translation."""

    name = "speech-seq2seq"
    recipe_class = Recipe
    auto_class = "AutoModelForSpeechSeq2Seq"
    pipeline_tag = "automatic-speech-recognition"
    metrics = ("wer", "cer")
    truth = ("text",)
    at_a_time = 64  # half a minute of decoded sound is a megabyte
    architectures = ("WhisperForConditionalGeneration",)
    arguments_source = SOURCE
    settled = SETTLED
    unsharded = GENERATES
    family = ("whisper", "sound")
    recipe: Recipe

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        from hf_mps.finetune.models.speech_trainer import Transcriber

        recipe = self.recipe
        for split in rows.values():
            tokens.refuse_other_than_text(split, ["text"])
        measured = metrics.load(self.measures().names)
        config = self._config()
        said = whisper.spoken(self.checkpoint, recipe.language, recipe.speech_task)
        self._begin(config, said)
        tokenizer, longest = self.tokenizer, self.longest
        heard = {split: _Heard(rows[split], tokenizer, recipe, self.rate, longest) for split in SPLITS}
        self._load(config, said)
        truths = [ctc_vocabulary.cleaned(text, recipe.letter_case, "") for text in heard["validation"].of("text")]
        clean, self.choices["normalizer"] = whisper.normaliser(recipe.normalizer, said, tokenizer, truths)
        if not any(map(clean, truths)):
            raise UserError(f"{rows['validation'].where}: no text has a word left to measure; next: normalizer=none")
        targets = {split: [len(row) for row in one.of("labels")] for split, one in heard.items()}
        # The recipe's settings as `lengths.decide` reads them: labels have no keys of their own.
        padded = lengths.Padded.model_construct(
            padding=None, optimizations=recipe.optimizations, training=recipe.training
        )
        shapes = lengths.decide(
            padded, targets["train"], longest, others=targets["validation"], grouped=False, name="target_lengths"
        )
        missing = {name: heard[split].missing for split, name in (("train", "training"), ("validation", "validation"))}
        self.choices |= {"target_lengths": shapes, **transcripts.left_out(missing)}
        valid = heard["validation"]
        transcriber = Transcriber(rows["validation"], valid.kept, valid.seconds, truths, tokenizer, clean)
        defaults, baseline = language.untrained(recipe)  # type: ignore[arg-type]
        sounds = {
            split: audio.Sounds(rows[split], one.labels, one.kept, self.extractor) for split, one in heard.items()
        }
        return self.made(
            splits=sounds,
            collator=self.width.collator(audio.collator(self.extractor, 0), tokenizer, labels=shapes.value),
            metrics=measured,
            compute_metrics=lambda evaluated: transcriber.measure(evaluated, measured),
            baseline=baseline,
            arguments_defaults=self.arguments_defaults | defaults,
            trainer_settings={"untrained": baseline},
            predict=lambda trainer: transcriber.lines(trainer, sounds["validation"]),
            figures=pictures.transcripts,
            snippet=transcripts.SNIPPET,
        )

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        """Open a saved model for the language and the task that it was trained for.

        A model that names no language hears which one it is.
        """
        recipe, config, stored = self.recipe, self._config(), self.checkpoint.stored_generation()
        named, said = recipe.language or stored.get("language"), None
        if named or not stored.get("is_multilingual", True):
            said = whisper.spoken(self.checkpoint, named, recipe.speech_task or stored.get("task"))
        self._begin(config, said)
        self._load(config, said)
        return self.made(collator=self.width.collator(audio.collator(self.extractor, 0), self.tokenizer))

    def inputs(self, rows: Rows) -> tuple[audio.Sounds, list[float]]:
        every = range(len(rows.dataset))
        seconds = [audio.samples(rows, at, self.rate) / self.rate for at in every]
        for at in every:
            if seconds[at] > self.extractor.chunk_length:
                told = f"{rows.where}: row {rows.number(at)} has {seconds[at]:.1f} seconds"
                raise UserError(f"{told}; allowed: up to {self.extractor.chunk_length}; next: cut it into parts")
        return audio.Sounds(rows, None, every, self.extractor), seconds

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        sounds, seconds = inputs
        return transcripts.lines(rows, seconds, language.decoded(trainer.predict(sounds).predictions, self.tokenizer))

    def _config(self) -> Any:
        config = self.checkpoint.config()
        if config.model_type != "whisper":
            raise UserError(
                f"model {self.checkpoint.name}: its architecture is {config.model_type}; allowed: whisper; next: for"
                " wav2vec2 and its kind task=speech-recognition"
            )
        labels.override(config, self.recipe.config_overrides)
        return config

    def _begin(self, config: Any, said: whisper.Spoken | None) -> None:
        """Open feature extractor and tokenizer, and settle the lengths of sound and of texts."""
        from transformers import Seq2SeqTrainingArguments, WhisperProcessor

        from hf_mps.finetune.models.speech_trainer import SpeechTrainer

        self.extractor = self.checkpoint.feature_extractor()
        self.tokenizer = self.checkpoint.tokenizer(**(said.settings() if said else {}))
        self.rate, frames = self.extractor.sampling_rate, self.extractor.nb_max_frames
        self.width = audio.Spectrograms(frames, "max_length", hop=self.extractor.hop_length, rate=self.rate)
        asked, positions = self.recipe.max_target_length, int(config.max_target_positions)
        if asked is not None and asked > positions:
            raise UserError(f"max_target_length is {asked}; allowed: at most {positions}, the positions of this model")
        self.longest = asked or min(TARGET, positions)
        self.processing_class = WhisperProcessor(self.extractor, self.tokenizer)
        self.trainer, self.arguments = SpeechTrainer, Seq2SeqTrainingArguments
        self.arguments_defaults = {"predict_with_generate": True, "generation_max_length": self.longest}

    def _load(self, config: Any, said: whisper.Spoken | None) -> None:
        """Load the model for its language and task; without them it hears which."""
        lent = tokens.set_pad_token(self.tokenizer, config)
        self.load(config)
        self.model.generation_config.pad_token_id = self.tokenizer.pad_token_id
        self.choices |= lent
        if said is None:
            self.choices["speech"] = Choice("any language", "the model hears which one it is; language=NAME says so")
        else:
            whisper.settle(self.model, self.tokenizer, said)
            written = "translated into English" if said.task == "translate" else "written down"
            reason = "language and speech_task in the recipe" if said.language else "the model knows English alone"
            self.choices["speech"] = Choice(f"{said.language or 'english'}, {written}", f"{reason}; without timestamps")
            if self.recipe.freeze_encoder:
                self.model.freeze_encoder()
                self.choices["encoder"] = Choice("frozen", "freeze_encoder in the recipe")
        reason = f"the encoder takes {self.extractor.nb_max_frames} frames, and silence fills up what is shorter"
        self.choices["lengths"] = Choice(self.width, reason)

    @staticmethod
    def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Write words spelled in tones as wav files into `folder`, and return their rows."""
        named = recipe.data.columns
        return transcripts.smoke_rows(folder, named.audio, named.text)


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
