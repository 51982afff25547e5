"""Sound: decoded by libsndfile, mixed to one channel, resampled, and padded to a short list of lengths.

`datasets` would decode through torchcodec, which needs FFmpeg; soundfile's wheel carries its own libsndfile for wav,
flac, ogg and mp3 on macOS and Linux.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import numpy

from hf_mps.core import extras
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import counted
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.recipe.schema import Recipe
from hf_mps.finetune.recipe.training_section import DEFAULT_BATCH
from hf_mps.finetune.text import buckets, lengths
from hf_mps.finetune.text.lengths import IGNORED, PadToBucket

# Samples a second that a recording may have. A damaged header says anything, and resampling from one sample a second to
# 16,000 would fill any memory.
RATES = (1_000, 768_000)


def library() -> Any:
    """Return the module soundfile. Raises UserError, with the command that installs it, where it is absent."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: a system without a wheel and without libsndfile
        raise UserError(f"reading sound needs soundfile; next: {extras.install('audio')}") from error
    return soundfile


def samples(rows: Rows, index: int, rate: int) -> int:
    """Return the number of samples that `read` will return for one row, from the file's header. Raises UserError as
    `read`.
    """
    sound, _ = _opened(rows, index)
    with sound:
        frames: int = sound.frames
        return -(-frames * rate // int(sound.samplerate))


def read(rows: Rows, index: int, rate: int) -> Any:
    """Return one row's sound as float32 of shape (samples,), at `rate` samples a second, the mean of its channels.

    scipy's polyphase filter resamples to ceil(samples x rate / file's rate). Raises UserError, naming the row, for a
    file that is missing, is no sound that libsndfile reads, is cut off or empty, holds NaN, or has a rate outside of
    RATES.
    """
    sound, where = _opened(rows, index)
    with sound:
        try:
            channels = sound.read(dtype="float32", always_2d=True)
        except (RuntimeError, ValueError) as error:  # soundfile's own is a RuntimeError
            raise UserError(f"{where} cannot be decoded: {error}; allowed: wav, flac, ogg, mp3") from error
        file_rate, promised = sound.samplerate, sound.frames
    if len(channels) != promised:
        raise UserError(f"{where} ends after {len(channels)} of {promised} samples; next: fetch the file again")
    # Mixed before it is resampled: one pass of the filter in place of one for each channel.
    samples = channels.mean(axis=1)
    if not numpy.isfinite(samples).all():
        raise UserError(f"{where} holds NaN or infinite samples; allowed: finite ones")
    if file_rate != rate:
        from scipy.signal import resample_poly

        common = gcd(rate, file_rate)
        samples = resample_poly(samples, rate // common, file_rate // common)
    return samples.astype("float32", copy=False)


class Wav(wave.Wave_read):
    """A wav file of 16 bits a sample, read by Python itself, with the part of soundfile.SoundFile that is used here.

    Plans and audits make up such files and need no soundfile for them. Raises wave.Error for other files.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        if self.getsampwidth() != 2:
            raise wave.Error(f"{8 * self.getsampwidth()} bits")
        self.frames, self.samplerate = self.getnframes(), self.getframerate()

    def read(self, dtype: str, always_2d: bool) -> Any:
        """Return the samples between -1 and 1, shape (frames, channels)."""
        samples = numpy.frombuffer(self.readframes(self.frames), "<i2") / 2**15
        return samples.astype(dtype).reshape(-1, self.getnchannels())


def _opened(rows: Rows, index: int) -> tuple[Any, str]:
    """Open a row's sound with soundfile, or with `Wav` where that is absent. Raises UserError for anything else.

    Also returns where a person finds it, with the name of its file where the data say it.
    """
    value = rows.dataset[index]["audio"]
    content = rows.content_of(value, index, "audio")
    where = f"{rows.place(index)}: audio {(value.get('path') if isinstance(value, dict) else value) or ''}".rstrip()
    try:
        soundfile = library()
    except UserError:
        try:
            sound = Wav(content)
        except (wave.Error, EOFError):
            sound = None
        if sound is None:  # raised here, where the error in hand is still that soundfile is absent
            raise
    else:
        try:
            sound = soundfile.SoundFile(io.BytesIO(content))
        except soundfile.LibsndfileError as error:
            problem = str(error.error_string).rstrip(".\n ")
            allowed = "allowed: wav, flac, ogg, mp3"
            raise UserError(f"{where} is no sound that can be read: {problem}; {allowed}") from error
    if sound.frames <= 0:
        raise UserError(f"{where} is empty; allowed: at least one sample")
    if not RATES[0] <= sound.samplerate <= RATES[1]:
        problem = f"has {sound.samplerate:,} samples a second"
        raise UserError(f"{where} {problem}; allowed: {RATES[0]:,} to {RATES[1]:,}")
    if content[:4] == b"RIFF" and content[8:12] == b"WAVE":
        # libsndfile ignores bytes that a wav's header (RIFF, Microsoft 1991) promises and the file lacks. Programs that
        # write into a pipe do not know the length and write 0 or all ones. A last chunk of odd length has a padding
        # byte, which some programs count and do not write.
        promised = int.from_bytes(content[4:8], "little")
        missing = promised + 8 - len(content) - 1
        if 0 < promised < 2**31 - 256 and missing > 0:
            raise UserError(f"{where} ends {missing:,} bytes before its header says; next: fetch the file again")
    return sound, where


@dataclass(frozen=True)
class Durations(lengths.Lengths):
    """Lengths in frames of the model's encoder, each of `hop` samples at `rate` samples a second."""

    hop: int = 320
    rate: int = 16000

    def __str__(self) -> str:
        seconds = ", ".join(f"{frames * self.hop / self.rate:.1f}" for frames in self.shapes)
        return f"{seconds} seconds" if self.shapes else "as long as the batch's longest row"

    def collator(self, inner: Any, tokenizer: Any = None, **settings: Any) -> PadToBucket:
        """Wrap `inner` so that its `input_values` are padded with silence up to a length of the list."""

        def samples(width: int) -> int:
            return max(width, self.target(-(-width // self.hop)) * self.hop)

        return PadToBucket(inner, samples, {"input_values": 0.0, "attention_mask": 0})


def kept(chosen: Mapping[str, Any], hop: int, rate: int) -> Choice[Durations]:
    """Return what a saved model's batches are padded to: what its run chose, or the batch's longest row."""
    if (said := lengths.of_a_run(chosen)) is not None and "hop" in said:
        return Choice(Durations(**said), lengths.KEPT)
    return Choice(Durations(0, "longest", hop=hop, rate=rate), "a model without a run")


@dataclass(frozen=True)
class Spectrograms(lengths.Lengths):
    """Frames of a spectrogram, each `hop` samples after the last at `rate` samples a second: as many in every batch."""

    hop: int = 160
    rate: int = 16000

    def __str__(self) -> str:
        return f"{self.longest * self.hop / self.rate:g} seconds in every batch"


def durations(recipe: Recipe, counts: Sequence[int], others: Sequence[int], hop: int, rate: int) -> Choice[Durations]:
    """Choose what batches of sound are padded to, from the frames of each training row and of `others`."""
    summary = f"half of the rows within {sorted(counts)[len(counts) // 2] * hop / rate:.1f} seconds"
    if lengths.decided():
        return kept(lengths.decided(), hop, rate)
    longest = max([*counts, *others])
    if not recipe.optimizations:
        plain = Durations(longest, "longest", hop=hop, rate=rate)
        return Choice(plain, f"optimizations is false in the recipe; {summary}")
    batch = recipe.training.get("per_device_train_batch_size") or DEFAULT_BATCH
    alike = buckets.grouped(buckets.decide(recipe, counts, batch))
    drawn = 1 if alike else batch
    shapes = buckets.optimal_buckets(counts, top=longest, limit=longest, batch=drawn, most=lengths.SHAPES, step=1)
    listed = Durations(longest, "list", shapes, hop=hop, rate=rate)
    silence = 1 - sum(counts) / buckets.padded_tokens(counts, batch, listed.target, alike=alike)
    return Choice(
        listed, f"{counted(len(shapes), 'length')}, chosen from your data: about {silence:.0%} silence; {summary}"
    )


@dataclass
class Sounds:
    """Rows for Trainer, decoded on access: what the extractor makes of the sound, under its own name, and `labels`.

    Rows to be answered have no labels.

    Decoded sound is some twenty times as large as a compressed file, so none is kept in memory. `kept` are the numbers
    of the rows that take part, `counts` the samples of each row at the extractor's rate.
    """

    rows: Rows
    labels: Sequence[Sequence[int]] | None
    kept: Sequence[int]
    counts: Sequence[int]
    extractor: Any

    @property
    def seconds(self) -> list[float]:
        """How long each of the rows that take part is."""
        return [self.counts[row] / self.extractor.sampling_rate for row in self.kept]

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, rate = self.kept[index], self.extractor.sampling_rate
        name = self.extractor.model_input_names[0]
        values = self.extractor(read(self.rows, row, rate), sampling_rate=rate)[name][0]
        return {name: values} | ({"labels": self.labels[row]} if self.labels is not None else {})


def collate(extractor: Any, width: int, features: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make a batch of `Sounds`: the extractor pads the sound, labels are padded to `width` or their longest row."""
    import torch

    name = extractor.model_input_names[0]
    batch = extractor.pad([{name: row[name]} for row in features], return_tensors="pt")
    if "labels" not in features[0]:
        return dict(batch)
    longest = max(width, *(len(row["labels"]) for row in features))
    labels = [[*row["labels"], *[IGNORED] * (longest - len(row["labels"]))] for row in features]
    return {**batch, "labels": torch.tensor(labels, dtype=torch.long)}


def collator(extractor: Any, width: int) -> Any:
    """Return `collate` for Trainer."""
    return partial(collate, extractor, width)
