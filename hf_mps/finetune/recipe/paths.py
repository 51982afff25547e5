"""The keys of a recipe that name a file or a folder, which a recipe file means relative to itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_mps.core.errors import nearest

# What `chat_template` says instead of a file.
PLAIN = "plain"


def changed(values: dict[str, Any], change: Callable[[str], Path]) -> None:
    """Put `change` of every path in its place in `values`, a recipe's plain values, validated or not.

    A `model` is a path where that folder is there; otherwise it is a name on the hub or of a package.
    """
    _put(values, "chat_template", lambda said: said if said == PLAIN else change(said))
    _put(values, "model", lambda said: found if (found := change(said)).is_dir() else said)
    if isinstance(data := values.get("data"), dict):
        _put(data, "folder", change)
        for split in data["files"] if isinstance(data.get("files"), dict) else ():
            _put(data["files"], split, change)
    if isinstance(training := values.get("training"), dict):
        _put(training, "resume_from_checkpoint", change)


def neighbour(path: Path) -> str:
    """A clause for a path that is not there: the nearest name in its folder, or a word about the folder."""
    if not path.parent.is_dir():
        return f"; the folder {path.parent} is not there either"
    return nearest(path.name, [other.name for other in path.parent.iterdir()])


def _put(section: dict[str, Any], key: str, change: Callable[[str], Path | str]) -> None:
    if isinstance(said := section.get(key), str):
        section[key] = str(change(said))
