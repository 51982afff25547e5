"""Sound: decoded by libsndfile, brought to one channel and the model's rate, and padded to a short list of lengths.

`datasets` would decode through torchcodec, which needs FFmpeg; soundfile's wheel carries its own libsndfile for wav,
flac, ogg and mp3 on macOS and Linux.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any

from hf_mps import extras
from hf_mps.choice import Choice
from hf_mps.errors import UserError
from hf_mps.finetune.plan import BATCH
from hf_mps.finetune.text import batches
from hf_mps.finetune.text.lengths import SHAPES, Lengths
from hf_mps.finetune.text.padding import IGNORED, PadUp
from hf_mps.finetune.text.shapes import best

if TYPE_CHECKING:
    from hf_mps.finetune.recipe import Recipe
    from hf_mps.finetune.rows import Rows


def library() -> Any:
    """The module soundfile. Raises UserError, with the command that installs it, where it is absent."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: a system without a wheel and without libsndfile
        raise UserError(f"reading sound needs soundfile; next: {extras.install('audio')}") from error
    return soundfile


def samples(rows: Rows, index: int, rate: int, role: str = "audio") -> int:
    """The number of samples that `read` will give for one row, from the file's header. Raises UserError as `read`."""
    with _opened(rows, index, role) as sound:
        frames: int = sound.frames
        return -(-frames * rate // int(sound.samplerate))


def read(rows: Rows, index: int, rate: int, role: str = "audio") -> Any:
    """One row's sound as a numpy array of float32, shape (samples,), `rate` samples a second, its channels' mean.

    Resampled by scipy's polyphase filter, whose length is ceil(samples x rate / rate before). Raises UserError, naming
    the row, for a file that is not there, is no sound that libsndfile reads, or is empty.
    """
    with _opened(rows, index, role) as sound:
        wave = sound.read(dtype="float32", always_2d=True).mean(axis=1)
        before = sound.samplerate
    if before != rate:
        from scipy.signal import resample_poly

        common = gcd(rate, before)
        wave = resample_poly(wave, rate // common, before // common)
    return wave.astype("float32", copy=False)


def _opened(rows: Rows, index: int, role: str) -> Any:
    soundfile = library()
    content = rows.content(index, role)
    try:
        sound = soundfile.SoundFile(io.BytesIO(content))
    except soundfile.LibsndfileError as error:
        raise UserError(
            f"{rows.where}: row {rows.number(index)}: {role} is no sound that can be read: {error.error_string}"
            " allowed: wav, flac, ogg, mp3"
        ) from error
    if sound.frames <= 0:
        raise UserError(f"{rows.where}: row {rows.number(index)}: {role} is empty; allowed: at least one sample")
    return sound


@dataclass(frozen=True)
class Durations(Lengths):
    """Lengths in frames of the model's encoder, each of `hop` samples at `rate` samples a second."""

    hop: int = 320
    rate: int = 16000

    def __str__(self) -> str:
        seconds = ", ".join(f"{frames * self.hop / self.rate:.1f}" for frames in self.shapes)
        return f"{seconds} seconds" if self.shapes else "as long as the batch's longest row"

    def collator(self, inner: Any, tokenizer: Any = None, **settings: Any) -> PadUp:
        """`inner`, whose batches of `input_values` are padded with silence up to a length of the list."""
        return PadUp(inner, self._samples, {"input_values": 0.0, "attention_mask": 0})

    def _samples(self, width: int) -> int:
        return max(width, self.target(-(-width // self.hop)) * self.hop)


def durations(recipe: Recipe, counts: Sequence[int], others: Sequence[int], hop: int, rate: int) -> Choice[Durations]:
    """Choose what batches of sound are padded to, from the frames of each training row and of `others`."""
    told = f"half of the rows within {sorted(counts)[len(counts) // 2] * hop / rate:.1f} seconds"
    longest = max([*counts, *others])
    if not recipe.speedups:
        return Choice(Durations(longest, "longest", hop=hop, rate=rate), f"speedups is false in the recipe; {told}")
    batch = recipe.training.get("per_device_train_batch_size") or BATCH
    alike = batches.grouped(batches.decide(recipe, counts, batch))
    found = best(counts, top=longest, limit=longest, batch=1 if alike else batch, most=SHAPES, step=1)
    listed = Durations(longest, "list", found, hop=hop, rate=rate)
    silence = 1 - sum(counts) / batches.held(counts, batch, listed.target, alike=alike)
    return Choice(listed, f"{len(found)} lengths, laid where the rows are: about {silence:.0%} silence; {told}")


class Sounds:
    """Rows for Trainer, decoded when they are asked for: `input_values` as the extractor makes them, and `labels`.

    Decoded sound is some twenty times as large as a compressed file, so none is kept. `kept` are the numbers of the
    rows that take part.
    """

    def __init__(self, rows: Rows, labels: Sequence[Sequence[int]], kept: Sequence[int], extractor: Any) -> None:
        self._rows = rows
        self._labels = labels
        self._kept = kept
        self._extractor = extractor

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, place: int) -> dict[str, Any]:
        row = self._kept[place]
        rate = self._extractor.sampling_rate
        wave = read(self._rows, row, rate)
        values = self._extractor(wave, sampling_rate=rate)["input_values"][0]
        return {"input_values": values, "labels": self._labels[row]}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.__getitem__, range(len(self)))


def collate(extractor: Any, width: int, features: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch of `Sounds`: sound padded as the extractor pads, labels padded to `width` (or their longest row)."""
    import torch

    batch = extractor.pad([{"input_values": row["input_values"]} for row in features], return_tensors="pt")
    labels = [torch.tensor(row["labels"], dtype=torch.long) for row in features]
    longest = max(width, *map(len, labels))
    padded = torch.full((len(labels), longest), IGNORED, dtype=torch.long)
    for line, label in zip(padded, labels, strict=True):
        line[: len(label)] = label
    return {**batch, "labels": padded}


def collator(extractor: Any, width: int) -> Any:
    """`collate` for Trainer."""
    return partial(collate, extractor, width)
