"""Whisper's habits: the tokens before a text (language, task, no timestamps), and the normaliser of its error rates."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, brief, nearest
from hf_mps.finetune.models.checkpoint import Checkpoint

Task = Literal["transcribe", "translate"]
Normalizer = Literal["english", "basic", "none"]
START, NO_TIMESTAMPS = "<|startoftranscript|>", "<|notimestamps|>"
# Where fewer words of the texts are spelled with vowel signs, Whisper's normaliser leaves nearly all of them whole.
MARKED = 0.05


@dataclass(frozen=True)
class Spoken:
    """The language of the sound, and what is written of it; both None for models that know English alone."""

    language: str | None
    task: Task | None

    @property
    def english(self) -> bool:
        """Return whether the texts are English."""
        return self.language in (None, "english") or self.task == "translate"

    def settings(self) -> dict[str, Any]:
        """Return the tokenizer's settings, which its folder keeps."""
        return {"language": self.language, "task": self.task, "predict_timestamps": False}


def spoken(checkpoint: Checkpoint, language: str | None, task: Task | None) -> Spoken:
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
    if not checkpoint.stored_generation().get("is_multilingual", not checkpoint.name.endswith(".en")):
        if code not in (None, "en") or task == "translate":
            asked = "speech_task is translate" if code in (None, "en") else f"language is '{language}'"
            raise UserError(f"{asked}, and model {checkpoint.name} knows English alone; next: one without .en")
        return Spoken(None, None)
    if code is None:
        raise UserError(f"model {checkpoint.name} knows many languages; next: language=NAME, that of the sound")
    known = checkpoint.stored_generation().get("lang_to_id")
    if known and f"<|{code}|>" not in known:
        raise UserError(f"language is '{language}', which model {checkpoint.name} does not know; next: another model")
    return Spoken(LANGUAGES[code], task or "transcribe")


def settle(model: Any, tokenizer: Any, said: Spoken) -> None:
    """Let `model` generate text of that language and task, without timestamps.

    Tokens are never forced by `forced_decoder_ids`, which original checkpoints have, and which transformers ignores
    where a language or a task is given (transformers#28687). A generation_config.json of before that lacks the ids of
    languages and tasks, and gets them.
    """
    generation = model.generation_config
    generation.forced_decoder_ids = None
    generation.return_timestamps = False
    generation.no_timestamps_token_id = tokenizer.convert_tokens_to_ids(NO_TIMESTAMPS)
    generation.decoder_start_token_id = tokenizer.convert_tokens_to_ids(START)
    model.config.decoder_start_token_id = generation.decoder_start_token_id
    generation.is_multilingual = said.language is not None
    if said.language is None:
        return
    generation.language, generation.task = said.language, said.task
    if not getattr(generation, "lang_to_id", None):
        generation.lang_to_id = languages(tokenizer)
    if not getattr(generation, "task_to_id", None):
        generation.task_to_id = {task: tokenizer.convert_tokens_to_ids(f"<|{task}|>") for task in TASKS}


TASKS: tuple[Task, ...] = ("transcribe", "translate")


def languages(tokenizer: Any) -> dict[str, int]:
    """Return the token of each language that a tokenizer has, with its id."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    vocabulary = tokenizer.get_vocab()
    return {f"<|{code}|>": vocabulary[f"<|{code}|>"] for code in LANGUAGES if f"<|{code}|>" in vocabulary}


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
        share = 0.0 if said.english else marked(texts)
        kind = "english" if said.english else "none" if share > MARKED else "basic"
        reason = {
            "english": "the texts are English: contractions, numbers and spelling are made alike",
            "basic": "letters are lowered and punctuation is dropped, as Whisper's figures have it",
            "none": f"{share:.0%} of the words have vowel signs, which Whisper's normaliser would take out",
        }[kind]
    makers: dict[str, Callable[[], Callable[[str], str]]] = {
        "english": lambda: EnglishTextNormalizer(getattr(tokenizer, "english_spelling_normalizer", None) or {}),
        "basic": BasicTextNormalizer,
        "none": lambda: str,
    }
    clean = makers[kind]()
    return lambda text: " ".join(clean(text).split()), Choice(kind, reason)


def marked(texts: Iterable[str]) -> float:
    """Return the share of words with a separate mark, as the vowel signs of Indic scripts do."""
    words = [word for text in texts for word in unicodedata.normalize("NFKC", text).split()]
    with_marks = sum(any(unicodedata.category(sign)[0] == "M" for sign in word) for word in words)
    return with_marks / max(1, len(words))
