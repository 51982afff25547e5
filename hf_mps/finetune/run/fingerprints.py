"""The rows that a run trains on: a digest of each split in the run's folder, so that it never resumes with others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core.files import write_json

if TYPE_CHECKING:
    from hf_mps.finetune.data.rows import Rows
    from hf_mps.finetune.recipe.schema import Data

FILE = "data.json"
# Rows that are read at once.
BLOCK = 1000
# Bytes of a file that are.
CHUNK = 2**20
# Columns whose texts name files: what is in the files counts, not where they lie.
MEDIA = ("image", "images", "mask", "audio")

Splits = Mapping[str, Mapping[str, Any]]


def digest_rows(rows: Mapping[str, Rows]) -> dict[str, dict[str, Any]]:
    """Return the number of rows of each split, and a digest of their content in their order.

    Takes about a second for 200,000 rows of text; images and sound are read, not decoded. Of streamed rows it
    is the names, sizes and stamps of their files. Raises UserError for a file
    that cannot be read, with its row.
    """
    return {split: _of_split(one) for split, one in rows.items()}


def _of_split(rows: Rows) -> dict[str, Any]:
    if rows.stream is not None:
        return {"bytes": rows.stream.bytes, "digest": rows.stream.digest}
    return {"rows": len(rows.dataset), "digest": _digest(rows)}


def store(output: Path, data: Data, splits: Splits) -> Path:
    """Write `splits`, of `digest_rows`, and the digest of each local file into a run's folder; return the path."""
    return write_json(output / FILE, {"splits": splits, "files": _files(data)})


def differences(output: Path, splits: Splits) -> list[str]:
    """Return which `splits` differ from those of the run in `output`, as `train (48 rows then, 47 now)`.

    A run of a release that stored no digests matches any rows.
    """
    before = _read(output).get("splits", {})
    every = dict.fromkeys((*before, *splits)) if before else ()
    return list(filter(None, (_difference(split, before.get(split), splits.get(split)) for split in every)))


def changed_files(output: Path, data: Data) -> list[str]:
    """Return the recipe's files that changed since the run in `output`, as `data.files.train has other content`.

    Rows of the hub and of folders are not compared: that takes as long as loading them.
    """
    before: dict[str, str] = _read(output).get("files", {})
    now = _files(data) if before else {}
    return [f"data.files.{split} has other content" for split in before if now.get(split) != before[split]]


def _difference(split: str, before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    """Return how a split changed, as a clause; empty where it did not."""
    if before == now:
        return ""
    if any("bytes" in one for one in (before, now) if one is not None):
        return f"{split} (other files)"
    counts = [f"{one['rows']:,}" if one is not None else "no" for one in (before, now)]
    return f"{split} ({counts[0]} rows then, {counts[1]} now)" if counts[0] != counts[1] else f"{split} (other content)"


def _read(output: Path) -> dict[str, Any]:
    try:
        stored = json.loads((output / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _files(data: Data) -> dict[str, str]:
    """Return the digest of each local file, by its split."""
    digests: dict[str, str] = {}
    if data.streaming:
        return digests
    for split, name in (data.files or {}).items():
        path = Path(name).expanduser()
        if path.is_file():
            digest = _hash()
            with path.open("rb") as file:
                while block := file.read(CHUNK):
                    digest.update(block)
            digests[split] = digest.hexdigest()
    return digests


def _digest(rows: Rows) -> str:
    digest = _hash()
    dataset, first = rows.dataset, 0
    media = [column for column in dataset.column_names if column in MEDIA]
    for block in dataset.iter(BLOCK):
        count = len(next(iter(block.values()), ()))
        for role in media:
            block[role] = [_content(rows, block[role][place], first + place, role) for place in range(count)]
        # Of a text the letters, of a number the number: how Arrow cut and padded its buffers is no content.
        digest.update(json.dumps(block, sort_keys=True, default=_plain).encode())
        first += count
    return digest.hexdigest()


def _content(rows: Rows, value: Any, index: int, role: str) -> str | list[str]:
    if isinstance(value, list):
        return [_hash(rows.content_of(one, index, role)).hexdigest() for one in value]
    return _hash(rows.content_of(value, index, role)).hexdigest()


def _plain(value: Any) -> str:
    """Return bytes as their digest, dates and times as text."""
    return _hash(value).hexdigest() if isinstance(value, bytes) else str(value)


def _hash(content: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=16)
