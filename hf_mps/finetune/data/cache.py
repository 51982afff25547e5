"""Rows that were read once, cached below the user's HF_HOME as Arrow under a digest of the file and how it was read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core import source_digest

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset

# Rows of one table: enough for Arrow to be fast, few enough to be held as Python objects.
ROWS = 10_000
BLOCK = 1 << 20

Tables = Iterator["pyarrow.Table"]


def cached(path: Path, read_options: Sequence[Any], make: Callable[[], Tables]) -> Dataset:
    """Return the rows of the file `path` as `make` reads them; `make` runs only for content that was not yet read so.

    `read_options` is all that `make` depends on beside its code and the file's content, as plain values. Raises OSError
    for a full disk, and what `make` raises; neither leaves a file behind.
    """
    from datasets import Dataset, config

    digest = _digest(path, (source_digest.digest(make), *read_options))
    rows_file = Path(config.HF_DATASETS_CACHE) / "hf_mps" / digest / "rows.arrow"
    if not rows_file.is_file():
        _write(rows_file, make())
    dataset = Dataset.from_file(str(rows_file))
    # Named by content: what a task makes of the rows is found again wherever the file lies.
    dataset._fingerprint = digest
    return dataset


def _digest(path: Path, read_options: Sequence[Any]) -> str:
    digest = hashlib.sha256(repr(read_options).encode())
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()[:32]


def _write(path: Path, chunks: Tables) -> None:
    """Write Arrow's stream format, which `datasets` memory-maps. A table without rows is written for its column
    names.
    """
    import pyarrow

    tables = iter(chunks)
    first = next(tables)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: two processes may read one file at once; the last to finish wins, with equal rows.
    hidden = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with pyarrow.OSFile(str(hidden), "wb") as sink, pyarrow.ipc.new_stream(sink, first.schema) as writer:
            writer.write_table(first)
            for table in tables:
                writer.write_table(table)
        hidden.replace(path)
    except BaseException:  # Ctrl-C included
        with contextlib.suppress(OSError):
            hidden.unlink()
            path.parent.rmdir()
        raise
