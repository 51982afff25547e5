"""Words spelled in tones, a tone for a letter: sound that a tiny model can learn to write down, for smoke runs."""

from __future__ import annotations

import math
import struct
import wave
from pathlib import Path
from typing import Any

WORDS = ("abba", "baa", "cab", "dad", "add", "bad", "cad", "dab")
RATE, LETTER = 8000, 800
"""Samples a second, and of a letter."""


def rows(folder: Path, audio: str, text: str) -> dict[str, list[dict[str, Any]]]:
    """Write 24 wav files of two words each into `folder`; return rows with these columns: 16 to train on, 8 others."""
    made = []
    for number in range(24):
        said = f"{WORDS[number % 8]} {WORDS[number // 8]}"
        path = folder / f"{number}.wav"
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            for letter in said:
                pitch = 0 if letter == " " else 300 + 200 * (ord(letter) - ord("a"))  # a space is silence
                tone = (int(9000 * math.sin(2 * math.pi * pitch * time / RATE)) for time in range(LETTER))
                file.writeframes(b"".join(struct.pack("<h", sample) for sample in tone))
        made.append({audio: str(path), text: said})
    return {"train": made[:16], "validation": made[16:]}
