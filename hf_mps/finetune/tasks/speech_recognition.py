"""Speech recognition: sound to text, by connectionist temporal classification over an encoder such as wav2vec 2.0."""

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
from hf_mps.finetune.media import audio, ctc_vocabulary, transcripts
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks._base import GENERATES, Prepared, Task
from hf_mps.finetune.text import tokens

# Samples for each frame of wav2vec 2.0, where a configuration does not say.
HOP = 320


class Recipe(schema.Recipe):
    """Adds options for text and sound under the names of transformers' run_speech_recognition_ctc.py.

    `vocabulary`: the letters of the training texts (`data`) or those that the checkpoint knows; by default the
    checkpoint's if it was fine-tuned for recognition. `letter_case`: the case of all texts; by default what suits the
    vocabulary. Training rows longer than `max_duration_in_seconds` are dropped.
    """

    task: Literal["speech-recognition"]
    """What the model learns to do."""
    data: transcripts.Data
    vocabulary: Literal["data", "checkpoint"] | None = None
    """The letters: those of the training texts, or the checkpoint's."""
    letter_case: Literal["lower", "upper", "keep"] | None = None
    """The case of all texts; by default what suits the vocabulary."""
    chars_to_ignore: list[str] = Field(default_factory=list)
    """Characters that are taken out of the texts."""
    max_duration_in_seconds: float = Field(default=20.0, gt=0)
    """Longer training rows are left out."""
    freeze_feature_encoder: bool = True
    """true keeps the layers that read the waveform as they are."""
    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Keys of the model's configuration."""


class SpeechRecognition(Task):
    """Learns to write down sound, letter by letter."""

    name = "speech-recognition"
    recipe_class = Recipe
    pipeline_tag = "automatic-speech-recognition"
    metrics = ("wer", "cer")
    truth = ("text",)
    at_a_time = 128  # decoded sound is large
    architectures = ("ForCTC",)
    shape = "sound"
    unsharded = GENERATES
    family = ("wav2vec2", "sound")
    shows = "texts"
    recipe: Recipe

    @staticmethod
    def keep(logits: Any, labels: Any) -> Any:
        """Keep each frame's likeliest letter; on the device, because logits are larger by the vocabulary's size."""
        return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe = self.recipe
        for split in rows.values():
            tokens.refuse_other_than_text(split, ["text"])
        measured = metrics.load(self.measures().names)
        config, extractor = self._begin()
        spelling = ctc_vocabulary.decide(recipe, rows, self.checkpoint, config)
        self.tokenizer = spelling.tokenizer
        self.choices |= spelling.choices
        config.vocab_size, config.pad_token_id = len(self.tokenizer), self.tokenizer.pad_token_id
        config.ctc_loss_reduction = "mean"
        # A text with more letters than the sound has frames has no alignment; its infinite loss is left out.
        config.ctc_zero_infinity = True
        config.layerdrop = 0.0
        labels.override(config, recipe.config_overrides)
        reason = "mean over the batch, rows with more letters than frames left out, no layer dropped"
        self.choices["ctc"] = Choice(f"{config.vocab_size} letters and signs", reason)
        rate = extractor.sampling_rate
        encoded = {split: _encoded(rows[split], spelling, rate) for split in SPLITS}
        counts = {split: encoded[split]["samples"][:] for split in SPLITS}
        most = recipe.max_duration_in_seconds
        kept = {split: list(range(len(counts[split]))) for split in SPLITS}
        kept["train"] = transcripts.short_enough(rows["train"], counts["train"], most, rate)
        missing = len(counts["train"]) - len(kept["train"])
        self.choices |= transcripts.left_out({"training": {f"longer than {most:g} seconds": missing}})
        hop = getattr(config, "inputs_to_logits_ratio", HOP)
        frames = {split: [-(-counts[split][row] // hop) for row in kept[split]] for split in SPLITS}
        length = audio.durations(recipe, frames["train"], frames["validation"], hop, rate)
        self.choices["lengths"] = length
        self._load(config)
        truths = [spelling.clean(text) for text in rows["validation"].dataset["text"]]
        evaluator = ASREvaluator(rows["validation"], counts["validation"], self.tokenizer, self.model, rate, truths)
        labels_of = {split: encoded[split]["labels"][:] for split in SPLITS}
        sounds = {split: audio.Sounds(rows[split], labels_of[split], kept[split], extractor) for split in SPLITS}
        return self.made(
            splits=sounds,
            collator=length.value.collator(audio.collator(extractor, max(map(len, labels_of["train"])))),
            metrics=measured,
            compute_metrics=lambda evaluated: measured.compute(evaluator.texts(evaluated.predictions), truths),
            baseline=metrics.Baseline("answers nothing", measured.compute([""] * len(truths), truths)),
            token_counts=frames["train"],
            predicted=(rows["validation"], (sounds["validation"], evaluator)),
            figures=pictures.transcripts,
            snippet=transcripts.SNIPPET,
        )

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        config, extractor = self._begin()
        self.tokenizer = self.checkpoint.tokenizer()
        self._load(config)
        length = audio.kept(chosen, getattr(config, "inputs_to_logits_ratio", HOP), extractor.sampling_rate)
        return self.made(collator=length.value.collator(audio.collator(extractor, 0)))

    def inputs(self, rows: Rows) -> tuple[audio.Sounds, ASREvaluator]:
        every, rate = range(len(rows.dataset)), self.extractor.sampling_rate
        counts = [audio.samples(rows, at, rate) for at in every]
        evaluator = ASREvaluator(rows, counts, self.tokenizer, self.model, rate)
        return audio.Sounds(rows, None, every, self.extractor), evaluator

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        sounds, evaluator = inputs
        yield from evaluator.rows(evaluator.texts(trainer.predict(sounds).predictions))

    def _begin(self) -> tuple[Any, Any]:
        """Open configuration and feature extractor. Raises UserError for a model that does not take the wave."""
        self.extractor = extractor = self.checkpoint.feature_extractor()
        if extractor.model_input_names[0] != "input_values":
            raise UserError(
                f"model {self.checkpoint.name}: it takes {extractor.model_input_names[0]}; allowed: models that take"
                " the wave itself, such as wav2vec2, hubert, wavlm, sew; next: for Whisper task=speech-seq2seq"
            )
        return self.checkpoint.config(), extractor

    def _load(self, config: Any) -> None:
        """Load the model, with its feature encoder frozen where the recipe says so."""
        from transformers import Wav2Vec2Processor

        self.load(config)
        # transformers' CTC loss takes num_items_in_batch and does not divide by it. Trainer assumes that it does, and
        # loss and gradients would be gradient_accumulation_steps times as large (loss/loss_ctc.py, trainer.py).
        self.model.accepts_loss_kwargs = False
        # Those that read spectrograms have no such encoder.
        if self.recipe.freeze_feature_encoder and hasattr(self.model, "freeze_feature_encoder"):
            self.model.freeze_feature_encoder()
            reason = "its filters are learned in pretraining; freeze_feature_encoder"
            self.choices["feature_encoder"] = Choice("frozen", reason)
        self.processing_class = Wav2Vec2Processor(feature_extractor=self.extractor, tokenizer=self.tokenizer)

    @staticmethod
    def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Write words spelled in tones, a tone for a letter, as wav files into `folder`, and return their rows."""
        named = recipe.data.columns
        return transcripts.smoke_rows(folder, named.audio, named.text)


def _encoded(rows: Rows, spelling: ctc_vocabulary.Spelling, rate: int) -> Any:
    """Return `labels` (the letters' ids) and `samples` (at `rate`) of each row."""

    def ids(texts: Sequence[str], indices: Sequence[int]) -> list[list[int]]:
        clean = [spelling.clean(text) for text in texts]
        if "" in clean:
            place = rows.place(indices[clean.index("")])
            raise UserError(f"{place} has no letters in its text; allowed: some in every row")
        made: list[list[int]] = spelling.tokenizer(clean)["input_ids"]
        return made

    key = ("speech-recognition", spelling.case, spelling.ignored, rate)
    return transcripts.encoded(rows, spelling.tokenizer, key, ids, rate)


class ASREvaluator:
    """Spells rows from their frames' letters, and measures the texts where the `truths` are known."""

    def __init__(
        self,
        rows: Rows,
        counts: Sequence[int],
        tokenizer: Any,
        model: Any,
        rate: int,
        truths: Sequence[str] | None = None,
    ) -> None:
        self._rows = rows
        self._seconds = [count / rate for count in counts]
        self._frames = [int(model._get_feat_extract_output_lengths(count)) for count in counts]
        self._tokenizer = tokenizer
        self.truths = truths or ()

    def texts(self, letter_ids: Any) -> list[str]:
        """Return the text of each row; `letter_ids` has shape (rows, frames), and padding frames spell nothing."""
        own = [ids[:count] for ids, count in zip(letter_ids, self._frames, strict=True)]
        return [str(text) for text in self._tokenizer.batch_decode(own)]

    def rows(self, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield the rows of predictions.csv."""
        return transcripts.lines(self._rows, self._seconds, texts, self.truths)
