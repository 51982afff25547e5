"""The differences that are known, each with its reason, and which of those found they explain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "opinfo_exceptions.yaml"


def read() -> list[dict[str, Any]]:
    """The entries of opinfo_exceptions.yaml for the installed torch: operator, form, dtypes (absent: any), reason.

    `releases` is a specifier of the releases of torch that have the difference; absent: all.
    """
    import torch
    import yaml
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    entries: list[dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8")) or []
    here = Version(str(torch.__version__)).base_version
    return [entry for entry in entries if here in SpecifierSet(entry.get("releases", ""))]


def match(
    differences: list[dict[str, Any]], listed: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The differences that no entry explains, and the entries that explain none (they are to be deleted)."""
    used: list[dict[str, Any]] = []
    unexplained = []
    for item in differences:
        fits = [entry for entry in listed if _fits(item, entry)]
        used += fits
        if not fits:
            unexplained.append(item)
    return unexplained, [entry for entry in listed if entry not in used]


def _fits(item: dict[str, Any], entry: dict[str, Any]) -> bool:
    return (
        entry["operator"] == item["operator"]
        and entry["form"] in (item["form"], "any")
        and item["dtype"] in entry.get("dtypes", [item["dtype"]])
    )
