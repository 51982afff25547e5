"""Texts as a snapshot can hold them: what differs from run to run is replaced by its name."""

from __future__ import annotations


def masked(text: str, **values: object) -> str:
    """Replace each of `values` in `text` by its name in angle brackets, longer values first.

    masked("in /tmp/a7: none", folder="/tmp/a7") is "in <folder>: none".
    """
    for name, value in sorted(values.items(), key=lambda item: -len(str(item[1]))):
        text = text.replace(str(value), f"<{name}>")
    return text
