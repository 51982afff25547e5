"""Speech recognition: sound to text, by connectionist temporal classification over an encoder such as wav2vec 2.0.

With the other task of sound it shares columns, which rows are heard, and the rows of predictions.csv.
"""

from __future__ import annotations

import json
import math
import struct
import tempfile
import wave
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import counted
from hf_mps.finetune.data import labels
from hf_mps.finetune.data.load import SPLITS, Rows
from hf_mps.finetune.media import audio
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks import GENERATES, Prepared, R, Task
from hf_mps.finetune.text import tokens
from hf_mps.metrics.texts import cer, wer

# Words spelled in tones, a tone for a letter: sound that a tiny model can learn to write down, for smoke runs.
SPELLED = ("abba", "baa", "cab", "dad", "add", "bad", "cad", "dab")
RATE, LETTER = 8000, 800
"""Samples a second, and of a letter."""

Case = Literal["lower", "upper", "keep"]
Left = dict[str, dict[str, int]]
"""How many rows of each split are left out, by the reason."""
Ids = Callable[[Sequence[str], Sequence[int]], list[list[int]]]
"""Makes ids of texts; the second argument has their rows' numbers."""


class Columns(schema.Columns):
    """The columns of the data by their roles: `audio` holds a path, relative to its file, or the bytes of a file."""

    audio: str = "audio"
    """The column of the sound: a path, or bytes."""
    text: str = "text"
    """The column of the text."""


class Data(schema.Data):
    """Adds the columns."""

    columns: Columns = Columns()


class SpeechTask(Task[R]):
    """A task that writes down what is said."""

    pipeline_tag = "automatic-speech-recognition"
    metrics = ("wer", "cer")
    truth = ("text",)
    unsharded = GENERATES
    shows = "texts"
    extractor: Any
    tokenizer: Any

    def inputs(self, rows: Rows) -> audio.Sounds:
        every = range(len(rows.dataset))
        counts = [audio.samples(rows, at, self.extractor.sampling_rate) for at in every]
        return audio.Sounds(rows, None, every, counts, self.extractor)

    def encoded(self, rows: Rows, key: Sequence[Any], ids: Ids) -> Any:
        """Return `labels`, what `ids` makes of texts and their rows' numbers, and `samples` of each row.

        `key` is that of `tokens.map_cached`.
        """
        rate = self.extractor.sampling_rate

        def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
            found = ids(tokens.texts(rows, "text", batch, indices), indices)
            return {"labels": found, "samples": [audio.samples(rows, index, rate) for index in indices]}

        content, kinds = tokens.digest(self.tokenizer), {"labels": ("int32",), "samples": "int64"}
        return tokens.map_cached(rows, encode, content=content, key=(*key, rate), features=kinds)

    def short_enough(self, rows: Rows, counts: Sequence[int]) -> tuple[list[int], dict[str, int]]:
        """Return the numbers of the rows that are no longer than the recipe allows, and how many others there are, by
        the reason; `counts` are the rows' samples.

        Raises UserError where none is short enough.
        """
        most, rate = self.recipe.max_duration_in_seconds, self.extractor.sampling_rate
        kept = [row for row, count in enumerate(counts) if count <= most * rate]
        if not kept:
            allowed = f"allowed: {min(counts) / rate:.1f} or more"
            raise UserError(f"{rows.where}: each row is longer than max_duration_in_seconds, {most:g}; {allowed}")
        return kept, {f"longer than {most:g} seconds": len(counts) - len(kept)}

    @classmethod
    def smoke_rows(cls, recipe: Any, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Write 24 wav files of two words each into `folder`; return their rows: 16 to train on, 8 others."""
        made, named = [], recipe.data.columns
        for number in range(24):
            said = f"{SPELLED[number % 8]} {SPELLED[number // 8]}"
            path = folder / f"{number}.wav"
            with wave.open(str(path), "wb") as file:
                file.setparams((1, 2, RATE, 0, "NONE", ""))  # one channel of two bytes a sample
                for letter in said:
                    pitch = 0 if letter == " " else 300 + 200 * (ord(letter) - ord("a"))  # a space is silence
                    tone = (int(9000 * math.sin(2 * math.pi * pitch * time / RATE)) for time in range(LETTER))
                    file.writeframes(b"".join(struct.pack("<h", sample) for sample in tone))
            made.append({named.audio: path.name, named.text: said})
        return {"train": made[:16], "validation": made[16:]}


def cleaned(text: str, case: Case, ignored: str) -> str:
    """Return `text` in `case`, without the `ignored` characters and surplus white space."""
    kept = " ".join(text.translate(dict.fromkeys(map(ord, ignored))).split())
    return {"lower": kept.lower(), "upper": kept.upper(), "keep": kept}[case]


def left_out(counts: Left) -> dict[str, Choice[str]]:
    """Return the choice that says which rows take no part, and why; empty where all do."""
    parts = ((split, why, count) for split, reasons in counts.items() for why, count in reasons.items())
    told = [(counted(count, f"{split} row"), why) for split, why, count in parts if count]
    if not told:
        return {}
    return {"left_out": Choice(", ".join(what for what, _ in told), ", ".join(dict.fromkeys(why for _, why in told)))}


def lines(
    sounds: audio.Sounds, texts: Sequence[str], truths: Sequence[str] = (), clean: Callable[[str], str] = str
) -> Iterator[dict[str, Any]]:
    """Yield the rows of predictions.csv: each answer beside its truth, with the error rates of both after `clean`.

    A row whose truth is nothing after `clean` has no rates; without `truths` none has.
    """
    for place, (number, length, text) in enumerate(zip(sounds.kept, sounds.seconds, texts, strict=True)):
        line: dict[str, Any] = {"row": sounds.rows.number(number), "seconds": round(length, 2), "prediction": text}
        if truths:
            line["truth"] = truths[place]
            said, right = clean(text), clean(truths[place])
            line |= {"wer": round(wer([said], [right]), 4), "cer": round(cer([said], [right]), 4)} if right else {}
        yield line


DELIMITER, UNKNOWN, PAD = "|", "[UNK]", "[PAD]"
# Samples for each frame of wav2vec 2.0, where a configuration does not say.
HOP = 320


class Recipe(labels.Overridden):
    """Adds options under the names of transformers' run_speech_recognition_ctc.py.

    `vocabulary` is by default the checkpoint's if it was fine-tuned for recognition, else that of the training texts.
    """

    data: Data
    vocabulary: Literal["data", "checkpoint"] | None = None
    """The letters: those of the training texts, or the checkpoint's."""
    letter_case: Case | None = None
    """The case of all texts; by default what suits the vocabulary."""
    chars_to_ignore: list[str] = Field(default_factory=list)
    """Characters that are taken out of the texts."""
    max_duration_in_seconds: float = Field(default=20.0, gt=0)
    """Longer training rows are left out."""
    freeze_feature_encoder: bool = True
    """true keeps the layers that read the waveform as they are."""


class SpeechRecognition(SpeechTask[Recipe]):
    """Learns to write down sound, letter by letter."""

    at_a_time = 128  # decoded sound is large
    architectures = ("ForCTC",)
    shape = "sound"
    family = ("wav2vec2", "sound")
    case: Case
    ignored: str
    """The characters that are taken out of all texts."""

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
        self.spell(rows, config)
        config.vocab_size, config.pad_token_id = len(self.tokenizer), self.tokenizer.pad_token_id
        config.ctc_loss_reduction = "mean"
        # A text with more letters than the sound has frames has no alignment; its infinite loss is left out.
        config.ctc_zero_infinity = True
        # As run_speech_recognition_ctc.py has it by default: wav2vec 2.0's configuration drops a tenth of the layers.
        config.layerdrop = 0.0
        labels.override(config, recipe.config_overrides)
        reason = "mean over the batch, rows with more letters than frames left out, no layer dropped"
        self.choices["ctc"] = Choice(f"{config.vocab_size} letters and signs", reason)
        rate = extractor.sampling_rate
        encoded = {split: self._encoded(rows[split]) for split in SPLITS}
        counts = {split: encoded[split]["samples"][:] for split in SPLITS}
        kept = {split: list(range(len(counts[split]))) for split in SPLITS}
        kept["train"], missing = self.short_enough(rows["train"], counts["train"])
        hop = getattr(config, "inputs_to_logits_ratio", HOP)
        frames = {split: [-(-counts[split][row] // hop) for row in kept[split]] for split in SPLITS}
        length = audio.durations(recipe, frames["train"], frames["validation"], hop, rate)
        self.choices["lengths"] = length
        self._load(config)
        truths = self._truths(rows["validation"])
        labels_of = {split: encoded[split]["labels"][:] for split in SPLITS}
        sounds = {
            split: audio.Sounds(rows[split], labels_of[split], kept[split], counts[split], extractor)
            for split in SPLITS
        }
        missing["more letters than frames"] = self._unaligned(sounds["train"], labels_of["train"])
        self.choices |= left_out({"training": missing})
        return self.made(
            splits=sounds,
            collator=length.value.collator(audio.collator(extractor, max(map(len, labels_of["train"])))),
            metrics=measured,
            compute_metrics=lambda evaluated: measured.compute(
                self._texts(sounds["validation"], evaluated.predictions), truths
            ),
            baseline=metrics.Baseline("answers nothing", measured.compute([""] * len(truths), truths)),
            token_counts=frames["train"],
            predicted=(rows["validation"], sounds["validation"]),
            figures=pictures.transcripts,
        )

    def clean(self, text: str) -> str:
        """Return `text` as the model is to spell it."""
        return cleaned(text, self.case, self.ignored)

    def spell(self, rows: Mapping[str, Rows], config: Any) -> None:
        """Choose vocabulary and case: the recipe's (`vocabulary`, `letter_case`, `chars_to_ignore`), or what suits.

        Raises UserError for a checkpoint without letters where the recipe asks for them, and for texts without any.
        """
        recipe = self.recipe
        tuned = any(name.endswith("ForCTC") for name in getattr(config, "architectures", None) or ())
        reason = "vocabulary in the recipe"
        if recipe.vocabulary is None:
            reason = f"the checkpoint {'was' if tuned else 'was not'} fine-tuned for recognition"
        self.ignored = "".join(recipe.chars_to_ignore)
        if recipe.vocabulary == "checkpoint" or (recipe.vocabulary is None and tuned):
            self.tokenizer = self.checkpoint.tokenizer()
            delimiter = getattr(self.tokenizer, "word_delimiter_token", None)
            alphabet = sorted(token for token in self.tokenizer.get_vocab() if len(token) == 1 and token != delimiter)
            large, small = any(map(str.isupper, alphabet)), any(map(str.islower, alphabet))
            suits: Case = "keep" if large == small else "upper" if large else "lower"
            self.case = recipe.letter_case or suits
            origin, why = "the checkpoint's", "the case of the vocabulary"
        else:
            self.case = recipe.letter_case or "lower"
            origin, why = "the letters of the training texts", "the default for a new vocabulary"
            alphabet = _letters(self.clean(text or "") for text in rows["train"].dataset["text"])
            if not alphabet:
                told = "no text has a letter; allowed: texts that are to be recognised"
                raise UserError(f"{rows['train'].where}: {told}")
            self.tokenizer = _tokenizer(alphabet)
        self.choices["vocabulary"] = Choice(_shown(alphabet), f"{origin}: {reason}")
        self.choices["letter_case"] = Choice(self.case, "letter_case in the recipe" if recipe.letter_case else why)
        vocabulary = self.tokenizer.get_vocab()
        texts = (self.clean(text or "") for split in rows.values() for text in split.dataset["text"])
        if missing := [letter for letter in _letters(texts) if letter not in vocabulary]:
            # They are learned and measured as one unknown token.
            told = f"not in the vocabulary, each is {self.tokenizer.unk_token}; chars_to_ignore leaves them out"
            self.choices["unknown_letters"] = Choice(_shown(missing), told)

    def _encoded(self, rows: Rows) -> Any:
        """Return `labels` (the letters' ids) and `samples` of each row."""

        def ids(texts: Sequence[str], indices: Sequence[int]) -> list[list[int]]:
            clean = list(map(self.clean, texts))
            if "" in clean:
                place = rows.place(indices[clean.index("")])
                raise UserError(f"{place} has no letters in its text; allowed: some in every row")
            return list(self.tokenizer(clean)["input_ids"])

        return self.encoded(rows, ("speech-recognition", self.case, self.ignored), ids)

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        config, extractor = self._begin()
        self.tokenizer = self.checkpoint.tokenizer()
        self._load(config)
        length = audio.kept(chosen, getattr(config, "inputs_to_logits_ratio", HOP), extractor.sampling_rate)
        return self.made(collator=length.value.collator(audio.collator(extractor, 0)))

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        texts = self._texts(inputs, trainer.predict(inputs).predictions)
        return lines(inputs, texts, self._truths(rows) if "text" in rows.dataset.column_names else ())

    def _texts(self, sounds: audio.Sounds, letter_ids: Any) -> list[str]:
        """Return the text of each row; `letter_ids` has shape (rows, frames), and padding frames spell nothing."""
        own = [ids[:count] for ids, count in zip(letter_ids, self._frames(sounds), strict=True)]
        return [str(text) for text in self.tokenizer.batch_decode(own)]

    def _frames(self, sounds: audio.Sounds) -> list[int]:
        import torch

        # The model's own arithmetic of its convolutions, which transformers gives no public name.
        counts = torch.tensor([sounds.counts[row] for row in sounds.kept])
        return list(self.model._get_feat_extract_output_lengths(counts).tolist())

    def _unaligned(self, sounds: audio.Sounds, labels_of: Sequence[Sequence[int]]) -> int:
        """Return how many rows teach nothing: a frame spells one letter, and equal letters need a frame between them.

        Raises UserError where all rows do.
        """
        texts = [labels_of[row] for row in sounds.kept]
        needed = [len(ids) + sum(a == b for a, b in pairwise(ids)) for ids in texts]
        count = sum(frames < least for frames, least in zip(self._frames(sounds), needed, strict=True))
        if count == len(texts):
            told = "each text has more letters than its sound has frames; allowed: sounds that spell their texts"
            raise UserError(f"{sounds.rows.where}: {told}")
        return count

    def _truths(self, rows: Rows) -> list[str]:
        return list(map(self.clean, rows.dataset["text"]))

    def _begin(self) -> tuple[Any, Any]:
        """Open configuration and feature extractor. Raises UserError for a model that does not take the wave."""
        self.extractor = extractor = self.checkpoint.feature_extractor()
        self._refuse_other_than_the_wave(extractor.model_input_names)
        return self.checkpoint.config(), extractor

    def _refuse_other_than_the_wave(self, names: Iterable[str]) -> None:
        # omniASR's wave has a dimension more, and a padding_mask.
        if other := [name for name in names if name not in ("input_values", "attention_mask")]:
            told = f"model {self.checkpoint.name}: it takes {other[0]}"
            allowed = "models that take the wave itself, such as wav2vec2, hubert, wavlm, sew"
            raise UserError(f"{told}; allowed: {allowed}; next: for Whisper task=speech-seq2seq")

    def _load(self, config: Any) -> None:
        """Load the model, with its feature encoder frozen where the recipe says so."""
        from transformers import Wav2Vec2Processor

        self.load(config)
        # A stand-in's extractor may be of another kind than the model.
        mask = "padding_mask" if "padding_mask" in signature(self.model.forward).parameters else "attention_mask"
        self._refuse_other_than_the_wave((self.model.main_input_name, mask))
        # transformers' CTC loss takes num_items_in_batch and does not divide by it. Trainer assumes that it does, and
        # loss and gradients would be gradient_accumulation_steps times as large (loss/loss_ctc.py, trainer.py).
        self.model.accepts_loss_kwargs = False
        # Those that read spectrograms have no such encoder.
        if self.recipe.freeze_feature_encoder and hasattr(self.model, "freeze_feature_encoder"):
            self.model.freeze_feature_encoder()
            reason = "its filters are learned in pretraining; freeze_feature_encoder"
            self.choices["feature_encoder"] = Choice("frozen", reason)
        self.processing_class = Wav2Vec2Processor(feature_extractor=self.extractor, tokenizer=self.tokenizer)


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
