"""The alphabet of a speech recogniser: its letters, and how texts are reduced to them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.models.checkpoint import Checkpoint

Case = Literal["lower", "upper", "keep"]
DELIMITER, UNKNOWN, PAD = "|", "[UNK]", "[PAD]"


@dataclass(frozen=True)
class Spelling:
    """A CTC `tokenizer`, the `case` of all texts, the characters `ignored`, and the choices behind them."""

    tokenizer: Any
    case: Case
    ignored: str
    choices: dict[str, Choice[Any]]

    def clean(self, text: str) -> str:
        """Return `text` as the model is to spell it."""
        return cleaned(text, self.case, self.ignored)


def cleaned(text: str, case: Case, ignored: str) -> str:
    """Return `text` in `case`, without the `ignored` characters and surplus white space."""
    kept = " ".join(text.translate(dict.fromkeys(map(ord, ignored))).split())
    return {"lower": kept.lower(), "upper": kept.upper(), "keep": kept}[case]


def decide(recipe: Any, rows: Mapping[str, Rows], checkpoint: Checkpoint, config: Any) -> Spelling:
    """Choose vocabulary and case: the recipe's (`vocabulary`, `letter_case`, `chars_to_ignore`), or what suits.

    Raises UserError for a checkpoint without letters where the recipe asks for them, and for texts without any.
    """
    tuned = any(name.endswith("ForCTC") for name in getattr(config, "architectures", None) or ())
    reason = "vocabulary in the recipe"
    if recipe.vocabulary is None:
        reason = f"the checkpoint {'was' if tuned else 'was not'} fine-tuned for recognition"
    ignored = "".join(recipe.chars_to_ignore)
    if recipe.vocabulary == "checkpoint" or (recipe.vocabulary is None and tuned):
        tokenizer = checkpoint.tokenizer()
        delimiter = getattr(tokenizer, "word_delimiter_token", None)
        alphabet = sorted(token for token in tokenizer.get_vocab() if len(token) == 1 and token != delimiter)
        large, small = any(map(str.isupper, alphabet)), any(map(str.islower, alphabet))
        suits: Case = "keep" if large == small else "upper" if large else "lower"
        case: Case = recipe.letter_case or suits
        origin, why = "the checkpoint's", "the case of the vocabulary"
    else:
        case = recipe.letter_case or "lower"
        origin, why = "the letters of the training texts", "the default for a new vocabulary"
        alphabet = _letters(cleaned(text or "", case, ignored) for text in rows["train"].dataset["text"])
        if not alphabet:
            raise UserError(f"{rows['train'].where}: no text has a letter; allowed: texts that are to be recognised")
        tokenizer = _tokenizer(alphabet)
    choices: dict[str, Choice[Any]] = {
        "vocabulary": Choice(_shown(alphabet), f"{origin}: {reason}"),
        "letter_case": Choice(case, "letter_case in the recipe" if recipe.letter_case else why),
    }
    spelling, vocabulary = Spelling(tokenizer, case, ignored, choices), tokenizer.get_vocab()
    texts = (spelling.clean(text or "") for split in rows.values() for text in split.dataset["text"])
    if missing := [letter for letter in _letters(texts) if letter not in vocabulary]:
        # They are learned and measured as one unknown token.
        told = f"not in the vocabulary, each is {tokenizer.unk_token}; chars_to_ignore leaves them out"
        choices["unknown_letters"] = Choice(_shown(missing), told)
    return spelling


def _tokenizer(alphabet: list[str]) -> Any:
    """Return transformers' CTC tokenizer of these letters."""
    from transformers import Wav2Vec2CTCTokenizer

    ids = {token: number for number, token in enumerate([DELIMITER, *(a for a in alphabet if a != DELIMITER)])}
    ids |= {UNKNOWN: len(ids), PAD: len(ids) + 1}
    special = {"unk_token": UNKNOWN, "pad_token": PAD, "bos_token": None, "eos_token": None}
    with tempfile.TemporaryDirectory(prefix="hf-mps-letters-") as folder:  # the tokenizer reads a file alone
        path = Path(folder, "vocab.json")
        path.write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
        return Wav2Vec2CTCTokenizer(str(path), word_delimiter_token=DELIMITER, **special)


def _letters(texts: Iterable[str]) -> list[str]:
    return sorted({letter for text in texts for letter in text} - {" "})


def _shown(alphabet: list[str]) -> str:
    return "".join(alphabet[:60]) + ("…" if len(alphabet) > 60 else "")
