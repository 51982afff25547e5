"""The order of the package: imports run down, without circles, and files have a size worth opening."""

from __future__ import annotations

import ast
from functools import cache

from tests.sources import sources

# The rooms, lowest first: a room imports only rooms that stand before it, imports inside functions included.
# docs/architecture.md draws them in this order.
ROOMS = (
    "core",
    "metal.device",
    "metal.operators",
    "metal.kernels",
    "metal.source",
    "metal.training_kernels",
    "metal.simulator",
    "metal.fallback",
    "metal.pytest_plugin",
    "distributed",
    "layer.guards",
    "layer.fused_step",
    "metrics",
    "layer.compat",
    "layer.integrations",
    "layer.activation",
    "autoload",
    "layer.early",
    "layer._hf_mps_early",
    "tools.doctor",
    "finetune",
    "tools.saved",
    "tools.export",
    "tools.dryrun",
    "tools.bench",
    "cli",
    "__main__",
)

# Imports that run up all the same, each with its reason. At most six; one that is no longer there fails the test.
EXCEPTIONS = {("hf_mps.finetune.__main__", "hf_mps.cli.main"): "`python -m hf_mps.finetune` is a documented command"}


@cache
def arrows() -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports, at its top or inside a function."""
    found: dict[str, set[str]] = {}
    for name, source in sources().items():
        targets: set[str] = set()
        for statement in source.imports:
            if isinstance(statement, ast.Import):
                dotted = [alias.name for alias in statement.names]
            else:
                assert not statement.level, f"{name}: relative imports hide where they lead"
                dotted = [f"{statement.module}.{alias.name}" for alias in statement.names]
            targets |= {resolved for one in dotted if (resolved := longest_module(one))}
        found[name] = targets - {name}
    return found


def longest_module(dotted: str) -> str:
    """The module that `dotted` names, or names something in; empty for another package's."""
    while dotted and dotted not in sources():
        dotted = dotted.rpartition(".")[0]
    return dotted


def room(module: str) -> str:
    """The room of a module: below metal, layer and tools each folder is one."""
    words = module.split(".")[1:]
    if words[:1] in (["metal"], ["layer"], ["tools"]):
        return ".".join(words[:2]) if words[1:] else ""
    return "".join(words[:1])


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in edges.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            place = stack.index(node)
            component = stack[place:]
            del stack[place:]
            if len(component) > 1:
                components.append(sorted(component))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return components


def upward() -> set[tuple[str, str]]:
    height = {name: place for place, name in enumerate(ROOMS)}
    return {
        (importer, imported)
        for importer, targets in arrows().items()
        for imported in targets
        if room(importer) and room(imported) and height[room(imported)] > height[room(importer)]
    }


def test_every_room_has_its_place_in_the_order() -> None:
    assert {room(module) for module in sources()} - {""} == set(ROOMS)


def test_imports_run_down() -> None:
    assert sorted(upward() - set(EXCEPTIONS)) == []


def test_exceptions_are_few_and_still_needed() -> None:
    assert len(EXCEPTIONS) <= 6
    assert set(EXCEPTIONS) <= upward(), "an exception that no import needs any more: take it out"


def test_no_circle_among_rooms() -> None:
    edges: dict[str, set[str]] = {}
    for importer, targets in arrows().items():
        for imported in targets:
            if (importer, imported) not in EXCEPTIONS and room(importer) != room(imported) and room(imported):
                edges.setdefault(room(importer), set()).add(room(imported))
    assert circles(edges) == []


def test_no_circle_among_modules() -> None:
    """A package that imports its own modules is no circle of them: only modules that lead back to themselves are."""
    assert circles(arrows()) == []


def test_files_have_a_size_worth_opening() -> None:
    assert {name: source.lines for name, source in sources().items() if source.lines > 600} == {}
    empty = [source.path for source in sources().values() if not source.lines]
    assert [path for path in empty if path.name != "__init__.py"] == []


def test_no_function_is_longer_than_a_screen() -> None:
    """From its first statement on: a verb's signature lists its options, each with its help."""
    lengths = {f"{name}:{each}": length for name, of in sources().items() for each, length in of.functions.items()}
    assert {name: length for name, length in lengths.items() if length > 70} == {}


def test_no_module_of_ours_is_imported_under_another_name() -> None:
    aliases = [
        f"{name}: {ast.unparse(statement)}"
        for name, source in sources().items()
        for statement in source.imports
        for alias in statement.names
        if alias.asname
        and alias.asname != alias.name
        and (f"{statement.module}.{alias.name}" if isinstance(statement, ast.ImportFrom) else alias.name) in sources()
    ]
    assert aliases == []
