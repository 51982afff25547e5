"""Speech to text by generation: Whisper hears up to 30 seconds and writes them down, or their English translation."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, brief, nearest
from hf_mps.finetune.data import labels
from hf_mps.finetune.data.load import SPLITS, Rows
from hf_mps.finetune.media import audio
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks import Prepared, _language, speech_recognition
from hf_mps.finetune.tasks.seq2seq import SETTLED, SOURCE, longest_target
from hf_mps.finetune.text import lengths, tokens

SpeechTask = Literal["transcribe", "translate"]
Normalizer = Literal["english", "basic", "none"]
GENERATION = "generation_config.json"
START, NO_TIMESTAMPS = "<|startoftranscript|>", "<|notimestamps|>"
# Where fewer words of the texts are spelled with vowel signs, Whisper's normaliser leaves nearly all of them whole.
MARKED = 0.05

# What transformers' run_speech_recognition_seq2seq.py generates at most (its README's generation_max_length).
TARGET = 225


class Recipe(labels.Overridden):
    """Adds options, some under the names of transformers' run_speech_recognition_seq2seq.py.

    `language` is a name or a code (`hindi`, `hi`). Rows with more than `max_target_length` tokens of text take no part.
    `normalizer` is Whisper's `english` or `basic`, or `none`; by default what suits the texts.
    """

    data: speech_recognition.Data
    language: str | None = None
    """The language of the sound, for a model that knows many."""
    speech_task: SpeechTask | None = None
    """Writes down what was said, or its English translation."""
    letter_case: speech_recognition.Case = "keep"
    """The case of all texts; keep leaves them as they are."""
    normalizer: Normalizer | None = None
    """How texts are made alike before their errors are counted."""
    max_duration_in_seconds: float = Field(default=30.0, gt=0, le=30)
    """Longer rows are left out."""
    max_target_length: int | None = Field(default=None, ge=8)
    """Rows with more tokens of text are left out."""
    freeze_encoder: bool = False
    """true keeps the encoder as it is."""


class SpeechSeq2Seq(speech_recognition.SpeechTask[Recipe]):
    """Learns to write down what is said, or its English translation."""

    auto_class = "AutoModelForSpeechSeq2Seq"
    at_a_time = 64  # half a minute of decoded sound is a megabyte
    architectures = ("WhisperForConditionalGeneration",)
    arguments_source = SOURCE
    settled = SETTLED
    family = ("whisper", "sound")

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe = self.recipe
        for split in rows.values():
            tokens.refuse_other_than_text(split, ["text"])
        measured = metrics.load(self.measures().names)
        config = self._config()
        said = spoken(self.checkpoint, recipe.language, recipe.speech_task)
        self._begin(config, said)
        tokenizer, longest = self.tokenizer, self.longest
        heard = {split: self._heard(rows[split]) for split in SPLITS}
        sounds: dict[str, Any] = {split: found for split, (found, _) in heard.items()}
        self._load(config, said)
        truths = self._truths(sounds["validation"])
        clean, self.choices["normalizer"] = normaliser(recipe.normalizer, said, tokenizer, truths)
        self.clean = clean
        if not any(map(clean, truths)):
            raise UserError(f"{rows['validation'].where}: no text has a word left to measure; next: normalizer=none")
        targets = {split: [len(one.labels[row]) for row in one.kept] for split, one in sounds.items()}
        # The recipe's settings as `lengths.decide` reads them: labels have no keys of their own.
        own = lengths.Padded.model_construct(padding=None, optimizations=recipe.optimizations, training=recipe.training)
        shapes = lengths.decide(own, targets, longest, grouped=False, name="target_lengths")
        missing = {"training": heard["train"][1], "validation": heard["validation"][1]}
        self.choices |= {"target_lengths": shapes, **speech_recognition.left_out(missing)}
        defaults, baseline = _language.untrained(recipe)

        def measure(evaluated: Any) -> dict[str, float]:
            """Return the metrics of generated ids, shape (rows, tokens), without rows whose truth has no word left."""
            texts = zip(_language.decoded(evaluated.predictions, tokenizer), truths, strict=True)
            pairs = [(clean(text), right) for text, truth in texts if (right := clean(truth))]
            return measured.compute(*map(list, zip(*pairs, strict=True)))

        return self.made(
            splits=sounds,
            collator=self.width.collator(audio.collator(self.extractor, 0), tokenizer, labels=shapes.value),
            metrics=measured,
            compute_metrics=measure,
            baseline=baseline,
            arguments_defaults=self.arguments_defaults | defaults,
            trainer_settings={"untrained": baseline},
            predicted=(rows["validation"], sounds["validation"]),
            figures=pictures.transcripts,
        )

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        """Open a saved model for the language and the task that it was trained for.

        A model that names no language hears which one it is.
        """
        recipe, config, stored = self.recipe, self._config(), self.checkpoint.stored(GENERATION)
        named, said = recipe.language or stored.get("language"), None
        if named or not stored.get("is_multilingual", True):
            said = spoken(self.checkpoint, named, recipe.speech_task or stored.get("task"))
        self._begin(config, said)
        self._load(config, said)
        return self.made(collator=self.width.collator(audio.collator(self.extractor, 0), self.tokenizer))

    def inputs(self, rows: Rows) -> audio.Sounds:
        sounds = super().inputs(rows)
        for at, seconds in enumerate(sounds.seconds):
            if seconds > self.extractor.chunk_length:
                told = f"{rows.where}: row {rows.number(at)} has {seconds:.1f} seconds"
                raise UserError(f"{told}; allowed: up to {self.extractor.chunk_length}; next: cut it into parts")
        return sounds

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        texts = _language.decoded(trainer.predict(inputs).predictions, self.tokenizer)
        if "text" not in rows.dataset.column_names:
            return speech_recognition.lines(inputs, texts)
        return speech_recognition.lines(inputs, texts, self._truths(inputs), self.clean)

    def _heard(self, rows: Rows) -> tuple[audio.Sounds, dict[str, int]]:
        """Return the rows of a split that take part, with labels (ids without the start token), and how many others do
        not, by the reason.
        """
        case, tokenizer, longest = self.recipe.letter_case, self.tokenizer, self.longest

        def ids(texts: Sequence[str], indices: Sequence[int]) -> list[list[int]]:
            # The model puts the first token before the labels itself; in pretraining texts began with a space.
            made = tokenizer([f" {speech_recognition.cleaned(text, case, '')}" for text in texts])["input_ids"]
            return [row[1:] for row in made]

        encoded = self.encoded(rows, ("speech-seq2seq", case, tokenizer.prefix_tokens), ids)
        samples, targets = encoded["samples"][:], encoded["labels"][:]
        short, missing = self.short_enough(rows, samples)
        kept = [row for row in short if len(targets[row]) <= longest]
        if not kept:
            raise UserError(f"{rows.where}: every text has more than max_target_length, {longest} tokens; next: more")
        missing[f"more than {longest} tokens of text"] = len(short) - len(kept)
        return audio.Sounds(rows, targets, kept, samples, self.extractor), missing

    def _truths(self, sounds: audio.Sounds) -> list[str]:
        texts = sounds.rows.dataset["text"][:]
        return [speech_recognition.cleaned(texts[row], self.recipe.letter_case, "") for row in sounds.kept]

    def _config(self) -> Any:
        config = self.checkpoint.config()
        if config.model_type != "whisper":
            told = f"model {self.checkpoint.name}: its architecture is {config.model_type}"
            raise UserError(f"{told}; allowed: whisper; next: for wav2vec2 and its kind task=speech-recognition")
        labels.override(config, self.recipe.config_overrides)
        return config

    def _begin(self, config: Any, said: Spoken | None) -> None:
        """Open feature extractor and tokenizer, and settle the lengths of sound and of texts."""
        from transformers import Seq2SeqTrainingArguments, WhisperProcessor

        from hf_mps.finetune.models.token_trainer import SpeechTrainer

        self.extractor = self.checkpoint.feature_extractor()
        # The tokenizer's folder keeps these settings.
        settings = {"language": said.language, "task": said.task, "predict_timestamps": False} if said else {}
        self.tokenizer = self.checkpoint.tokenizer(**settings)
        rate, frames = self.extractor.sampling_rate, self.extractor.nb_max_frames
        self.width = audio.Spectrograms(frames, "max_length", hop=self.extractor.hop_length, rate=rate)
        self.longest = longest_target(self.recipe.max_target_length, int(config.max_target_positions), TARGET)
        self.processing_class = WhisperProcessor(self.extractor, self.tokenizer)
        self.trainer, self.arguments = SpeechTrainer, Seq2SeqTrainingArguments
        self.arguments_defaults = {"predict_with_generate": True, "generation_max_length": self.longest}

    def _load(self, config: Any, said: Spoken | None) -> None:
        """Load the model for its language and task; without them it hears which."""
        lent = tokens.set_pad_token(self.tokenizer, config)
        self.load(config)
        self.model.generation_config.pad_token_id = self.tokenizer.pad_token_id
        self.choices |= lent
        if said is None:
            self.choices["speech"] = Choice("any language", "the model hears which one it is; language=NAME says so")
        else:
            settle(self.model, self.tokenizer, said)
            written = "translated into English" if said.task == "translate" else "written down"
            reason = "language and speech_task in the recipe" if said.language else "the model knows English alone"
            self.choices["speech"] = Choice(f"{said.language or 'english'}, {written}", f"{reason}; without timestamps")
            if self.recipe.freeze_encoder:
                self.model.freeze_encoder()
                self.choices["encoder"] = Choice("frozen", "freeze_encoder in the recipe")
        reason = f"the encoder takes {self.extractor.nb_max_frames} frames, and silence fills up what is shorter"
        self.choices["lengths"] = Choice(self.width, reason)


@dataclass(frozen=True)
class Spoken:
    """The language of the sound, and what is written of it; both None for models that know English alone."""

    language: str | None
    task: SpeechTask | None


def spoken(checkpoint: Checkpoint, language: str | None, task: SpeechTask | None) -> Spoken:
    """Return what the sound of a recipe is, from its keys `language` and `speech_task`.

    Raises UserError for a language that Whisper does not know, for none of a model that knows many, and for any but
    English of a model that knows no other.
    """
    from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

    names = {**TO_LANGUAGE_CODE, **{code: code for code in LANGUAGES}}
    if language is not None and language.lower() not in names:
        near = nearest(language.lower(), list(TO_LANGUAGE_CODE))
        raise UserError(f"language is '{brief(language)}', which Whisper does not know; allowed: hi or hindi{near}")
    code = names[language.lower()] if language else None
    # generation_config.json says whether a checkpoint knows more than English, else the ending of its name.
    if not checkpoint.stored(GENERATION).get("is_multilingual", not checkpoint.name.endswith(".en")):
        if code not in (None, "en") or task == "translate":
            asked = "speech_task is translate" if code in (None, "en") else f"language is '{language}'"
            raise UserError(f"{asked}, and model {checkpoint.name} knows English alone; next: one without .en")
        return Spoken(None, None)
    if code is None:
        raise UserError(f"model {checkpoint.name} knows many languages; next: language=NAME, that of the sound")
    known = checkpoint.stored(GENERATION).get("lang_to_id")
    if known and f"<|{code}|>" not in known:
        raise UserError(f"language is '{language}', which model {checkpoint.name} does not know; next: another model")
    return Spoken(LANGUAGES[code], task or "transcribe")


def settle(model: Any, tokenizer: Any, said: Spoken) -> None:
    """Let `model` generate text of that language and task, without timestamps."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    generation = model.generation_config
    # Original checkpoints have these, and transformers ignores them where a language or a task is given
    # (transformers#28687).
    generation.forced_decoder_ids = None
    generation.return_timestamps = False
    generation.no_timestamps_token_id = tokenizer.convert_tokens_to_ids(NO_TIMESTAMPS)
    generation.decoder_start_token_id = tokenizer.convert_tokens_to_ids(START)
    model.config.decoder_start_token_id = generation.decoder_start_token_id
    generation.is_multilingual = said.language is not None
    if said.language is None:
        return
    generation.language, generation.task = said.language, said.task
    # An older generation_config.json lacks the ids of languages and tasks.
    if not getattr(generation, "lang_to_id", None):
        vocabulary, tokens_of = tokenizer.get_vocab(), [f"<|{code}|>" for code in LANGUAGES]
        generation.lang_to_id = {token: vocabulary[token] for token in tokens_of if token in vocabulary}
    if not getattr(generation, "task_to_id", None):
        tasks = ("transcribe", "translate")
        generation.task_to_id = {task: tokenizer.convert_tokens_to_ids(f"<|{task}|>") for task in tasks}


def normaliser(
    asked: Normalizer | None, said: Spoken, tokenizer: Any, texts: Iterable[str]
) -> tuple[Callable[[str], str], Choice[str]]:
    """Return what is done to texts before their errors are counted, and the choice.

    Whisper's English normaliser spells out contractions, numbers and British words; its basic one, for all other
    languages, lowers letters and drops punctuation (arXiv:2212.04356, appendix C). That one puts a space in place of
    each mark, and so takes the vowels out of scripts that write them as signs (Hindi, Tamil, Thai, …): there the
    default is none.
    """
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

    kind, reason = asked, "normalizer in the recipe"
    if kind is None:
        # The share of words with a separate mark, as the vowel signs of Indic scripts are.
        words = [word for text in texts for word in unicodedata.normalize("NFKC", text).split()]
        with_marks = sum(any(unicodedata.category(sign)[0] == "M" for sign in word) for word in words)
        share = with_marks / max(1, len(words))
        english = said.language in (None, "english") or said.task == "translate"
        kind = "english" if english else "none" if share > MARKED else "basic"
        reason = {
            "english": "the texts are English: contractions, numbers and spelling are made alike",
            "basic": "letters are lowered and punctuation is dropped, as Whisper's figures have it",
            "none": f"{share:.0%} of the words have vowel signs, which Whisper's normaliser would take out",
        }[kind]
    clean: Callable[[str], str] = BasicTextNormalizer() if kind == "basic" else str
    if kind == "english":
        clean = EnglishTextNormalizer(getattr(tokenizer, "english_spelling_normalizer", None) or {})
    return lambda text: " ".join(clean(text).split()), Choice(kind, reason)
