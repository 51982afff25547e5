"""docs/img/rooms.svg: the rooms of the package and who imports whom; scripts/tools/docs.py draws it from the sources.

A row is a room, a dot what it imports, in functions too; what only a type checker imports is left out. Rooms stand from
the highest to the lowest: what runs down lies right of the diagonal, what runs up, by a named exception, left of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

# From the lowest up; tests/test_house.py holds every import to it.
ORDER = (
    *("core", "device", "operators", "simulator", "fallback", "guards", "compat", "integrations", "activation"),
    *("autoload", "early", "doctor", "finetune", "dryrun", "pytest_plugin", "cli"),
)
PACKAGE = Path(__file__).resolve().parents[2] / "hf_mps"
CELL, LEFT, TOP = 26, 130, 100
INK, LINE, DOWN, UP, SELF = "#1f2328", "#d0d7de", "#0072B2", "#D55E00", "#eaeef2"


def imports() -> set[tuple[str, str]]:
    """Every pair of a room and another one that it imports."""
    pairs: set[tuple[str, str]] = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        package = ("hf_mps", *path.relative_to(PACKAGE).parts[:-1])
        for module in _modules(tree, package):
            target = _room(module)
            here = _room((*package, path.stem))
            if target and here and target != here:
                pairs.add((here, target))
    return pairs


def _modules(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The modules of hf_mps that a file imports, each as its parts; not what only a type checker imports."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (tuple(name.name.split(".")) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = tuple((node.module or "").split(".")) if node.module else ()
            base = (*package[: len(package) + 1 - node.level], *base) if node.level else base
            yield from ((*base, name.name) for name in node.names)
        yield from _modules(node, package)


def _room(module: Sequence[str]) -> str | None:
    """The room of a module: the folder or file directly below hf_mps; None for the package itself and for others."""
    if len(module) < 2 or module[0] != "hf_mps":
        return None
    name = module[1]
    return name if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file() else None


def picture() -> str:
    """The picture as SVG text."""
    pairs = imports()
    rooms = [room for room in reversed(ORDER) if any(room in pair for pair in pairs)]
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
    for place, room in enumerate(rooms):
        x, y = LEFT + place * CELL, TOP + place * CELL
        yield f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end" fill="{INK}">{room}</text>'
        yield f'<text transform="translate({x + 17} {TOP - 8}) rotate(-60)" fill="{INK}">{room}</text>'
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
