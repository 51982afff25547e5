"""Files of separated values, csv and tsv: how they are to be read, and what is wrong with one in a person's words."""

from __future__ import annotations

import codecs
import csv
import re
from pathlib import Path
from typing import Any, Literal

from hf_mps.errors import UserError

SEPARATORS = {".csv": (",", ";", "\t"), ".tsv": ("\t",)}


def settings(path: Path, name: str) -> dict[str, Any]:
    """How pandas is to read a csv or tsv."""
    from datasets import Features, Value

    separator, columns, spaced = first_line(path, name)
    # Text throughout: pandas would guess a type for every 10,000 rows anew, and take the word "null" for a gap.
    return {
        "features": Features({column: Value("string") for column in columns}),
        "keep_default_na": False,
        "na_filter": False,
        "sep": separator,
        "skipinitialspace": spaced,
        "quoting": _quoting(path),
    }


def first_line(path: Path, name: str) -> tuple[str, list[str], bool]:
    """What separates the columns of a csv or tsv, their names, and whether a space stands behind each separator.

    In a csv the separator is whatever makes columns of its first line. Raises UserError for no names, a name twice, or
    text that is not UTF-8.
    """
    try:
        found = {separator: _names(path, separator, spaced=False) for separator in SEPARATORS[path.suffix]}
    except UnicodeDecodeError as error:
        raise UserError(not_text(path, name)) from error
    except csv.Error as error:
        raise UserError(f"{name}: cannot be read as {path.suffix[1:]}: {error}") from error
    # Spreadsheets of countries that write 0,5 save a csv with semicolons.
    separator, header = next((pair for pair in found.items() if len(pair[1]) > 1), next(iter(found.items())))
    spaced = len(header) > 1 and all(column.startswith(" ") for column in header[1:])
    if spaced:
        header = _names(path, separator, spaced=True)
    twice = [column for column in header if header.count(column) > 1]
    if twice or not header:
        raise UserError(
            f"{name}: its first line " + (f"names the column '{twice[0]}' twice" if twice else "names no columns")
        )
    return separator, header, spaced


def _names(path: Path, separator: str, *, spaced: bool) -> list[str]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return next(csv.reader(file, delimiter=separator, skipinitialspace=spaced, quoting=_quoting(path)), [])


def not_text(path: Path, name: str) -> str:
    """The line for a file of text that is not UTF-8."""
    content = path.read_bytes()
    coding, place = "latin1", 0
    try:
        content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = error.start
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        coding = "utf-16"
    return f"{name}: is not UTF-8 text (byte {place}); next: iconv -f {coding} -t utf-8 {name} > new{path.suffix}"


def in_words(text: str) -> str:
    """What pandas says of a broken file, in our words; empty for anything else that it says."""
    if fields := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", text):
        expected, line, saw = fields.groups()
        told = f"line {line} has {saw} fields and the first line {expected}"
        return f"{told}; allowed: as many in each, a text with a separator inside in quotation marks"
    if opened := re.search(r"EOF inside string starting at row (\d+)", text):
        return f"the quotation mark that opens in row {opened.group(1)} is never closed"
    return ""


def _quoting(path: Path) -> Literal[0, 3]:
    """A tab-separated file has no quoting (IANA text/tab-separated-values): GLUE's hold lone quotation marks."""
    return csv.QUOTE_NONE if path.suffix == ".tsv" else csv.QUOTE_MINIMAL
