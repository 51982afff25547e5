"""Metal's syntax as clang's: attributes as annotations, threadgroup variables, and vectors made by T(a, b).

Lines stay where they are, so that an error's line is the author's; `Text` keeps which columns moved.
"""

from __future__ import annotations

import re

from hf_mps.metal.source import clang
from hf_mps.metal.source.clang import Problem

NAME = "program_source"
"""What Metal calls a text that it compiles at run time, in its errors."""

_MARKER = re.compile(r'^# (\d+) "([^"]*)"')
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<(?:metal_\w+|metal/\w+|simd/simd\.h)>[^\n]*", re.MULTILINE)
_ATTRIBUTE = re.compile(r"\[\[((?:[^\[\]]|\[[^\]]*\])*)\]\]")
_ONE = re.compile(r"\s*(?:\w+::)?(\w+)\s*(\((?:[^()]|\([^()]*\))*\))?\s*(?:,|$)")
_PLAIN = {"unroll", "maybe_unused", "fallthrough", "nodiscard", "noreturn", "likely", "unlikely", "deprecated", "clang"}
"""Attributes that are C++'s or clang's; all others are Metal's, and are read from the module (module.py)."""
_DIMENSIONS = r"\w+\s*(?:\[[^;=\]]*\]\s*)*"
_SHARED = re.compile(
    r"(?<![\w(,])threadgroup(\s+)((?:(?:const|volatile|alignas\s*\([^)]*\))\s+)*[A-Za-z_][\w:]*(?:\s*<[^;{}()]*?>)?(?:::\w+)*)\s+"
    rf"({_DIMENSIONS}(?:,\s*{_DIMENSIONS})*);"
)
_MAKES = re.compile(
    r"excess elements in (?:scalar|vector) initializer|invalid conversion between|(?:from|to) vector '"
    r"|(?:functional-style cast|C-style cast|static_cast) from .*vector of"
)
_CONFLICT = re.compile(r"candidate template ignored: deduced conflicting types for parameter .*__private")
_LITERAL = re.compile(r'(?:"(?:[^"\\]|\\.)*"\s*)+|\b__(?:func|FUNCTION|PRETTY_FUNCTION)__\b')
_NO_VALUE = re.compile(r"\b(?:annotate|static_assert|asm|__asm|_Pragma|deprecated)\s*\([^;]*$")
_SPACE = re.compile(r"\b(?:device|constant|threadgroup|__global|__local|__private)\b")
_MOST = 20
"""Turns of rewriting, of which each makes what the errors of the one before name."""


class Rejected(Exception):
    """Source that does not compile; `problems` names the places in the author's own lines and columns."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"{at.file}:{at.line}:{at.column}: {at.kind}: {at.text.strip()}" for at in problems))


class Text:
    """Preprocessed lines, what was rewritten in them, and the place of each line in the author's text."""

    def __init__(self, text: str) -> None:
        self.lines: list[str] = []
        self._places: dict[tuple[str, int], int] = {}
        self._moved: dict[int, list[tuple[int, int]]] = {}
        file, number = NAME, 0
        for line in text.splitlines():
            if marker := _MARKER.match(line):
                number, file = int(marker[1]) - 1, marker[2].rsplit("/", 1)[-1]
            else:
                number += 1
                self._places[file, number] = len(self.lines)
            self.lines.append(line)

    def at(self, problem: Problem) -> tuple[int, int] | None:
        """Return the index of a problem's line and of its column."""
        index = self._places.get((problem.file, problem.line))
        return None if index is None else (index, problem.column - 1)

    def replace(self, index: int, start: int, end: int, text: str) -> None:
        """Put another text in the place of a part of a line."""
        line = self.lines[index]
        self.lines[index] = line[:start] + text + line[end:]
        self._moved.setdefault(index, []).append((start, len(text) - (end - start)))

    def original(self, problem: Problem) -> Problem:
        """Return the problem with the column that the author's line has."""
        place = self.at(problem)
        if place is None:
            return problem
        index, column = place
        for start, longer in reversed(self._moved.get(index, [])):
            if column > start:
                column = max(start, column - longer)
        return problem._replace(column=column + 1)

    def __str__(self) -> str:
        return "\n".join(self.lines) + "\n"


def compiled(source: str) -> str:
    """Compile Metal source to LLVM assembly.

    Raises:
        Rejected: the source has errors.
    """
    library = clang.header().read_text(encoding="utf-8")
    given = _INCLUDE.sub("", source)
    whole, problems = clang.preprocessed(f'# 1 "metal_stdlib"\n{library}\n# 1 "{NAME}"\n{given}\n')
    if problems:
        raise Rejected(problems)
    text = Text(whole)
    _attributes(text)
    _threadgroup_variables(text)
    _literals(text)
    for _ in range(_MOST):
        module, problems = clang.compiled(str(text))
        if not problems:
            return module
        if not _made(text, problems) | _spaced(text, problems):
            break
    raise Rejected([text.original(each) for each in problems if each.file == NAME and each.kind != "note"] or problems)


def _attributes(text: Text) -> None:
    """`[[buffer(0)]]` as an annotation, which the module then has."""
    for index, line in enumerate(text.lines):
        for found in reversed(list(_ATTRIBUTE.finditer(line))):
            names = _ONE.findall(found[1])
            if names and all(name not in _PLAIN and f"{name}::" not in found[1] for name, _ in names):
                # The place of a member in an argument buffer is its order, which is all that [[id(n)]] says.
                given = [f'annotate("{name}"{", " + value[1:-1] if value else ""})' for name, value in names if name != "id"]
                text.replace(index, *found.span(), f"__attribute__(({', '.join(given)}))" if given else "")


def _literals(text: Text) -> None:
    """A string's address as one of the constant space, which OpenCL keeps apart from device memory and Metal does not."""
    for index, line in enumerate(text.lines):
        for found in reversed(list(_LITERAL.finditer(line))) if not line.startswith("#") else ():
            if not _NO_VALUE.search(line[: found.start()]):
                text.replace(index, *found.span(), f"::metal::_text({found[0]})")


def _threadgroup_variables(text: Text) -> None:
    """`threadgroup float part[32];` as a reference to memory that a call of its own names.

    OpenCL has such variables in kernels alone, while Metal's stand in templates and helpers too. The type that the
    declaration makes on the way (`struct _shared_1`) is another one in each instantiation, as the variable is.
    """
    number = 0
    for index, line in enumerate(text.lines):
        for found in reversed(list(_SHARED.finditer(line))):
            made = []
            for each in re.findall(_DIMENSIONS, found[3]):
                name, dimensions = re.match(r"(\w+)\s*(.*)", each.strip()).groups()  # type: ignore[union-attr]
                number += 1
                made.append(
                    f"threadgroup {found[2]} (&{name}){dimensions} = "
                    f"::metal::_shared<{found[2]}{dimensions}, struct _shared_{number}>();"
                )
            text.replace(index, *found.span(), " ".join(made))


def _made(text: Text, problems: list[Problem]) -> bool:
    """Rewrite each `T(a, b)` and `static_cast<T>(v)` of vectors that clang does not accept; whether there was any."""
    places = {place for each in problems if _MAKES.search(each.text) and (place := text.at(each)) is not None}
    changed = False
    for index, column in sorted(places, reverse=True):
        line = text.lines[index]
        if cast := re.compile(r"static_cast\s*<").match(line, column):
            text.replace(index, column, cast.end(), "::metal::_make<")
            changed = True
        elif cast := re.compile(r"\(\s*([\w:]+(?:<[^<>()]*>)?)\s*\)").match(line, column):
            text.replace(index, column, cast.end(), f"::metal::_cast<{cast[1]}>() ->* ")
            changed = True
        elif kind := _type_before_parenthesis(line, column):
            text.replace(index, column, column + len(kind), f"::metal::_make<{kind}>")
            changed = True
    return changed


def _type_before_parenthesis(line: str, column: int) -> str | None:
    """Return the name of a type, template arguments included, that a parenthesis follows at once."""
    at, depth = column, 0
    while at < len(line) and (depth or line[at].isalnum() or line[at] in "_:<> "):
        depth += {"<": 1, ">": -1}.get(line[at], 0)
        at += 1
    kind = line[column:at]
    return kind if at < len(line) and line[at] == "(" and kind.strip() and "_make<" not in kind else None


def _spaced(text: Text, problems: list[Problem]) -> bool:
    """Put the parameters without address space of a template in the thread's own, where it was not matched for them.

    Of `f(thread T* p, T x)` clang deduces T twice, once with the space of the argument's pointer. Whether there was any.
    """
    places = {place for each in problems if _CONFLICT.search(each.text) and (place := text.at(each)) is not None}
    changed = False
    for index, column in sorted(places, reverse=True):
        at, depth = text.lines[index].find("(", column), 0
        starts: list[tuple[int, int]] = []
        while at >= 0 and index < len(text.lines):
            line = text.lines[index]
            for place in range(at, len(line)):
                depth += {"(": 1, "<": 1, "[": 1, ")": -1, ">": -1, "]": -1}.get(line[place], 0)
                if depth == 1 and line[place] in "(,":
                    starts.append((index, place + 1))
                if depth == 0:
                    break
            if depth == 0:
                break
            index, at = index + 1, 0
        ends = [*starts[1:], (index, len(text.lines[index]) if at < 0 else place)]
        for start, end in reversed(list(zip(starts, ends, strict=True))):
            lines = text.lines[start[0] : end[0] + 1]
            lines[-1] = lines[-1][: end[1]]
            lines[0] = lines[0][start[1] :]
            given = " ".join(lines)
            if re.search(r"[*&\[]", given) and not _SPACE.search(given):
                row, place = start
                if not text.lines[row][place:].strip():
                    row, place = row + 1, 0
                text.replace(row, place, place, " __private ")
                changed = True
    return changed
