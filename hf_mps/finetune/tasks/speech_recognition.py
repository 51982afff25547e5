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
from hf_mps.finetune.media import audio, ctc_vocabulary, synthetic_sound, transcripts
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.text import tokens
from hf_mps.metrics.selection import choose

AUTO_CLASS = "AutoModelForCTC"
TRUTH = ("text",)
# Decoded sound is large, and a batch alone is held; so many rows are read at a time.
AT_A_TIME = 128
# Samples for each frame of wav2vec 2.0, where a configuration does not say.
HOP = 320


class Recipe(schema.Recipe):
    """Adds options for text and sound under the names of transformers' run_speech_recognition_ctc.py.

    `vocabulary`: the letters of the training texts (`data`) or those that the checkpoint knows; by default the
    checkpoint's if it was fine-tuned for recognition. `letter_case`: the case of all texts; by default what suits the
    vocabulary. Training rows longer than `max_duration_in_seconds` are dropped.
    """

    task: Literal["speech-recognition"]
    data: transcripts.Data
    vocabulary: Literal["data", "checkpoint"] | None = None
    letter_case: Literal["lower", "upper", "keep"] | None = None
    chars_to_ignore: list[str] = Field(default_factory=list)
    max_duration_in_seconds: float = Field(default=20.0, gt=0)
    freeze_feature_encoder: bool = True
    config_overrides: dict[str, Any] = Field(default_factory=dict)


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make features, model, collator and metrics from the rows of both splits.

    Raises UserError for sound, text, a configuration or a checkpoint that cannot be used.
    """
    for split in rows.values():
        tokens.refuse_other_than_text(split, ["text"])
    measured = metrics.load(choose(recipe.metrics, ["wer", "cer"], recipe.task).names)
    config, extractor = checkpoint.config(), _extractor(checkpoint)
    spelling = ctc_vocabulary.decide(recipe, rows, checkpoint, config)
    choices = dict(spelling.choices)
    tokenizer = spelling.tokenizer
    choices["ctc"] = _configure(config, recipe, tokenizer)
    encoded = {split: _encoded(rows[split], spelling, extractor.sampling_rate) for split in ("train", "validation")}
    counts = {split: encoded[split]["samples"][:] for split in encoded}
    most = recipe.max_duration_in_seconds
    short_enough = {"train": transcripts.short_enough(rows["train"], counts["train"], most, extractor.sampling_rate)}
    missing = len(counts["train"]) - len(short_enough["train"])
    choices |= transcripts.left_out({"training": {f"longer than {most:g} seconds": missing}})
    short_enough["validation"] = list(range(len(counts["validation"])))
    hop = getattr(config, "inputs_to_logits_ratio", HOP)
    frames = {split: [-(-counts[split][row] // hop) for row in short_enough[split]] for split in encoded}
    length = audio.durations(recipe, frames["train"], frames["validation"], hop, extractor.sampling_rate)
    choices["lengths"] = length
    model = _model(recipe, checkpoint, config, choices)
    sounds = {
        split: audio.Sounds(rows[split], encoded[split]["labels"][:], short_enough[split], extractor)
        for split in SPLITS
    }
    truths = [spelling.clean(text) for text in rows["validation"].dataset["text"]]
    evaluator = ASREvaluator(
        rows["validation"], counts["validation"], tokenizer, model, extractor.sampling_rate, truths
    )
    widest = max(map(len, encoded["train"]["labels"][:]))
    return Prepared(
        splits=sounds,
        model=model,
        processing_class=_processor(extractor, tokenizer),
        collator=length.value.collator(audio.collator(extractor, widest)),
        metrics=measured,
        compute_metrics=lambda evaluated: measured.compute(evaluator.texts(evaluated.predictions), evaluator.truths),
        baseline=metrics.Baseline("answers nothing", measured.compute([""] * len(evaluator.truths), evaluator.truths)),
        auto_class=AUTO_CLASS,
        pipeline_tag="automatic-speech-recognition",
        choices=choices,
        trainer_settings={"preprocess_logits_for_metrics": _best_letters},
        token_counts=frames["train"],
        predict=lambda trainer: evaluator.rows(evaluator.texts(trainer.predict(trainer.eval_dataset).predictions)),
        figures=pictures.transcripts,
        snippet=transcripts.SNIPPET,
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved model writes down sound. Raises UserError for a checkpoint that cannot be used."""
    config, extractor, tokenizer = checkpoint.config(), _extractor(checkpoint), checkpoint.tokenizer()
    choices: dict[str, Choice[Any]] = {}
    rate = extractor.sampling_rate
    model = _model(recipe, checkpoint, config, choices)
    choices["lengths"] = length = audio.kept(chosen, getattr(config, "inputs_to_logits_ratio", HOP), rate)

    def answers(trainer: Any, rows: Rows) -> Iterator[dict[str, Any]]:
        every = range(len(rows.dataset))
        evaluator = ASREvaluator(rows, [audio.samples(rows, at, rate) for at in every], tokenizer, model, rate)
        return evaluator.rows(evaluator.texts(trainer.predict(audio.Sounds(rows, None, every, extractor)).predictions))

    return Answering(
        model=model,
        processing_class=_processor(extractor, tokenizer),
        collator=length.value.collator(audio.collator(extractor, 0)),
        answers=answers,
        choices=choices,
        trainer_settings={"preprocess_logits_for_metrics": _best_letters},
        at_a_time=AT_A_TIME,
    )


def _model(recipe: Recipe, checkpoint: Checkpoint, config: Any, choices: dict[str, Choice[Any]]) -> Any:
    """Load the model, with its feature encoder frozen where the recipe says so; adds both to `choices`."""
    import transformers

    model, choices["model"] = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)
    # transformers' CTC loss takes num_items_in_batch and does not divide by it. Trainer assumes that it does, and loss
    # and gradients would be gradient_accumulation_steps times as large (loss/loss_ctc.py, trainer.py).
    model.accepts_loss_kwargs = False
    if recipe.freeze_feature_encoder and hasattr(model, "freeze_feature_encoder"):  # not those that read spectrograms
        model.freeze_feature_encoder()
        choices["feature_encoder"] = Choice("frozen", "its filters are learned in pretraining; freeze_feature_encoder")
    return model


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Write words spelled in tones, a tone for a letter, as wav files into `folder`, and return their rows."""
    named = recipe.data.columns
    return synthetic_sound.rows(folder, named.audio, named.text)


def _extractor(checkpoint: Checkpoint) -> Any:
    extractor = checkpoint.feature_extractor()
    if extractor.model_input_names[0] != "input_values":
        raise UserError(
            f"model {checkpoint.name}: it takes {extractor.model_input_names[0]}; allowed: models that take the wave"
            " itself, such as wav2vec2, hubert, wavlm, sew; next: for Whisper task=speech-seq2seq"
        )
    return extractor


def _processor(extractor: Any, tokenizer: Any) -> Any:
    from transformers import Wav2Vec2Processor

    return Wav2Vec2Processor(feature_extractor=extractor, tokenizer=tokenizer)


def _configure(config: Any, recipe: Recipe, tokenizer: Any) -> Choice[str]:
    """Set what CTC needs; the recipe's `config_overrides` win."""
    config.vocab_size = len(tokenizer)
    config.pad_token_id = tokenizer.pad_token_id
    config.ctc_loss_reduction = "mean"
    # A text with more letters than the sound has frames has no alignment; its infinite loss is left out.
    config.ctc_zero_infinity = True
    config.layerdrop = 0.0
    labels.override(config, recipe.config_overrides)
    reason = "mean over the batch, rows with more letters than frames left out, no layer dropped"
    return Choice(f"{config.vocab_size} letters and signs", reason)


def _encoded(rows: Rows, spelling: ctc_vocabulary.Spelling, rate: int) -> Any:
    """Return `labels` (the letters' ids) and `samples` (at `rate`) of each row."""
    from datasets import Features, List, Value

    def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
        texts = [spelling.clean(text) for text in tokens.texts(rows, "text", batch, indices)]
        if "" in texts:
            number = rows.number(indices[texts.index("")])
            raise UserError(f"{rows.where}: row {number} has no letters in its text; allowed: some in every row")
        return {
            "labels": spelling.tokenizer(texts)["input_ids"],
            "samples": [audio.samples(rows, index, rate) for index in indices],
        }

    return tokens.map_cached(
        rows,
        encode,
        content=tokens.digest(spelling.tokenizer),
        key=("speech-recognition", spelling.case, spelling.ignored, rate),
        features=Features({"labels": List(Value("int32")), "samples": Value("int64")}),
    )


def _best_letters(logits: Any, labels: Any) -> Any:
    """Return each frame's likeliest letter; on the device, because logits are larger by the vocabulary's size."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


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
