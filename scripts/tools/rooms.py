"""docs/img/rooms.svg: the rooms of the package and who imports whom; scripts/tools/docs.py draws it from the sources.

A row is a room, a dot what it imports, in functions too; what only a type checker imports is left out. Rooms stand from
the highest to the lowest: what runs down lies right of the diagonal, what runs up, by a named exception, left of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.test_house import ROOMS, arrows, room

CELL, LEFT, TOP = 26, 130, 100
INK, LINE, DOWN, UP, SELF = "#1f2328", "#d0d7de", "#0072B2", "#D55E00", "#eaeef2"


def imports() -> set[tuple[str, str]]:
    """Every pair of a room and another one that it imports."""
    pairs = {(room(importer), room(imported)) for importer, targets in arrows().items() for imported in targets}
    return {pair for pair in pairs if all(pair) and pair[0] != pair[1]}


def picture() -> str:
    """The picture as SVG text."""
    pairs = imports()
    rooms = [name for name in reversed(ROOMS) if any(name in pair for pair in pairs)]
    size = len(rooms) * CELL
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + size + 20} {TOP + size + 20}"'
            ' font-family="ui-sans-serif, system-ui, sans-serif" font-size="12">',
            "<title>Rooms of hf_mps and their imports: a row imports its columns; all run down, to the right</title>",
            '<rect width="100%" height="100%" fill="white"/>',
            *_grid(rooms, size),
            *_cells(rooms, pairs),
            "</svg>\n",
        )
    )


def _grid(rooms: Sequence[str], size: int) -> Iterator[str]:
    for place, name in enumerate(rooms):
        x, y = LEFT + place * CELL, TOP + place * CELL
        yield f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end" fill="{INK}">{name}</text>'
        yield f'<text transform="translate({x + 17} {TOP - 8}) rotate(-60)" fill="{INK}">{name}</text>'
        yield f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{SELF}"/>'
    for place in range(len(rooms) + 1):
        along = place * CELL
        yield f'<path d="M{LEFT} {TOP + along}h{size}M{LEFT + along} {TOP}v{size}" stroke="{LINE}" fill="none"/>'


def _cells(rooms: Sequence[str], pairs: set[tuple[str, str]]) -> Iterator[str]:
    for row, here in enumerate(rooms):
        for column, there in enumerate(rooms):
            if (here, there) in pairs:
                x, y = LEFT + column * CELL + CELL // 2, TOP + row * CELL + CELL // 2
                yield f'<circle cx="{x}" cy="{y}" r="7" fill="{DOWN if column > row else UP}"/>'
