"""File formats of rows, recognised by the file's name. Imports nothing heavy, so that mistakes are reported at once."""

from __future__ import annotations

import glob
import gzip
import io
import shlex
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hf_mps.core.errors import UserError, neighbour
from hf_mps.core.text import first_line

# Each ending of a file's name, and its reader.
ENDINGS = {f".{kind}": kind for kind in ("csv", "tsv", "json", "jsonl", "parquet", "xlsx", "conll")}
ENDINGS |= {".conllu": "conll", ".txt": "text", ".tokens": "text"}
# Text formats, which gzip makes several times smaller; Parquet and xlsx are compressed already.
PACKED = tuple(ending for ending, kind in ENDINGS.items() if kind not in ("parquet", "xlsx"))
GZ = ".gz"
NO_ROWS = "holds no rows; allowed: at least one"
# First bytes of files that may have a wrong name, and what they are.
MAGIC = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"PAR1": "Parquet"}


def ending(path: Path) -> str:
    """Return the ending that names the format, in lower case and without .gz: `UP.CSV.gz` has `.csv`."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    # a.parquet.gz is no format: Parquet and xlsx are compressed, and are read from their ends.
    if suffixes[-1:] == [GZ] and len(suffixes) == 2 and suffixes[0] in PACKED:
        return suffixes[0]
    return suffixes[-1] if suffixes else ""


def kind(path: Path) -> str | None:
    """Return a file's format by its name: one of ENDINGS' values, or None for any other ending."""
    return ENDINGS.get(ending(path))


def packed(path: Path) -> bool:
    """Return whether a file is read through gzip."""
    return path.suffix.lower() == GZ


def in_shell(path: Path, *, unpacked: bool = False) -> str:
    """Return a file as a word of a shell's command line, or with `unpacked` what is in it."""
    word = shlex.quote(str(path))
    return f"<(gzip -dc {word})" if unpacked and packed(path) else word


def allowed(kinds: tuple[str, ...] = tuple(ENDINGS.values())) -> str:
    """Return the endings of `kinds`, separated by commas."""
    return ", ".join(ending for ending, kind in ENDINGS.items() if kind in kinds)


def found(path: Path) -> list[Path]:
    """Return the file `path`, or those that it is a pattern of (`train-*.parquet`), by name."""
    if path.is_file():
        return [path]
    # Path.glob takes no absolute pattern.
    return sorted(Path(one) for one in glob.glob(str(path), recursive=True) if Path(one).is_file())  # noqa: PTH207


def pattern(folder: Path) -> str:
    """Return a pattern of the files of rows in a folder, as a word of a shell; empty where there are none."""
    files = sorted(one for one in folder.iterdir() if one.is_file() and kind(one))
    return in_shell(folder / f"*{ending(files[0])}") if files else ""


def refuse_missing(path: Path, name: str) -> None:
    """Raise UserError for a path at which there is no file with something in it."""
    if path.is_file():
        if path.stat().st_size == 0:
            raise UserError(f"{name}: the file is empty; allowed: at least one row")
    elif path.is_dir():
        several = f", or several, as {inside}" if (inside := pattern(path)) else ""
        raise UserError(f"{name}: is a folder; allowed: a file of rows ({allowed()}){several}")
    elif path.exists():  # a pipe, as `<(zcat rows.csv.gz)` makes one: its rows are gone once they are read
        way_on = f"next: cat {in_shell(path)} > rows.csv"
        raise UserError(f"{name}: is no regular file, and rows are read more than once; {way_on}")
    elif path.is_symlink():
        raise UserError(f"{name}: is a link to {path.readlink()}, which is not there; allowed: a file")
    else:
        raise UserError(f"{name}: there is no such file{neighbour(path)}")


def refuse_disguised(path: Path, name: str) -> None:
    """Raise UserError for a file whose first bytes contradict its name."""
    with path.open("rb") as file:
        begun = file.read(4)
    actual = next((what for magic, what in MAGIC.items() if begun.startswith(magic)), None)
    expected = "gzip" if packed(path) else {"xlsx": "zip", "parquet": "Parquet"}.get(kind(path) or "")
    if actual == expected:
        return
    if actual is None:
        what = "Excel workbook" if expected == "zip" else f"{expected} file"
        raise UserError(f"{name}: is no {what}, though its name says so; next: fetch it again, or rename it")
    right_ending = {"gzip": GZ, "zip": ".xlsx if it is a workbook", "Parquet": ".parquet"}[actual]
    way_on = f"mv {in_shell(path)} {in_shell(path)}{GZ}" if actual == "gzip" else f"a name that ends in {right_ending}"
    raise UserError(f"{name}: is a {actual} file, though its name does not say so; next: {way_on}")


@contextmanager
def opened(path: Path, name: str) -> Iterator[IO[bytes]]:
    """Open a file's bytes, unpacked where it is packed. Raises UserError for a gzip file that is cut off or damaged."""
    try:
        # GzipFile is an IO[bytes] in all but its declared type.
        with gzip.open(path, "rb") if packed(path) else path.open("rb") as file:
            yield file  # type: ignore[misc]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        problem = "the gzip file cannot be unpacked, it is cut off or damaged; next: fetch or pack it again"
        raise UserError(f"{name}: {problem}") from error


@contextmanager
def opened_parquet(source: Path | IO[bytes], name: str) -> Iterator[Any]:
    """Open a Parquet file as pyarrow's ParquetFile. Raises UserError for one that is broken, as late as it is read."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's or the network's failure
            raise
        raise UserError(f"{name}: cannot be read as parquet: {first_line(error)}; next: fetch it again") from error


@contextmanager
def opened_text(path: Path, name: str, newline: str | None = None) -> Iterator[Iterator[str]]:
    """Open a file as lines with their ends (as `io.TextIOWrapper` reads `newline`), without a byte order mark.

    Raises UserError for text that is not UTF-8.
    """
    try:
        with opened(path, name) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline) as text:
            yield iter(text)
    except UnicodeDecodeError as error:
        raise not_text(path, name) from error


def not_text(path: Path, name: str) -> UserError:
    """Return the error for a text file that is not UTF-8: the byte, and the command that converts it."""
    with opened(path, name) as file:
        content = file.read()
    coding, offset = "latin1", 0
    try:
        content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        offset = error.start
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        coding = "utf-16"
    way_on = f"iconv -f {coding} -t utf-8 {in_shell(path, unpacked=True)} > new{ending(path)}"
    return UserError(f"{name}: is not UTF-8 text (byte {offset}); next: {way_on}")
