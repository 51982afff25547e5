"""Messages as inline snapshots: how a test holds them, without what differs from run to run."""

from __future__ import annotations

import re
from typing import Any

from inline_snapshot.plugin import Builder, Custom, customize


def masked(text: str, **values: object) -> str:
    """Replace each of `values` in `text` by its name in angle brackets, longer values first.

    masked("in /tmp/a7: none", folder="/tmp/a7") is "in <folder>: none".
    """
    for name, value in sorted(values.items(), key=lambda item: -len(str(item[1]))):
        text = text.replace(str(value), f"<{name}>")
    return text


@customize
def text_in_pieces(value: Any, builder: Builder) -> Custom | None:
    """Write a text for `pytest --inline-snapshot=fix` in pieces that fit a line, each line of the text on its own."""
    if not isinstance(value, str) or (len(value) <= 100 and "\n" not in value[:-1]):
        return None
    pieces = [
        piece for line in value.splitlines(keepends=True) for piece in re.findall(r"(?s) ?.{1,100}(?= |$)|.+", line)
    ]
    assert "".join(pieces) == value
    return builder.create_code(" ".join(map(repr, pieces)))
