"""Metal's syntax as clang's: attributes as annotations, threadgroup variables, and vectors made by T(a, b).

What clang's errors name is rewritten where they name it, since a text alone does not say which T is a vector. No line
moves, so that an error's line is the author's; `Text` knows which columns did.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator

from hf_mps.metal.source import clang
from hf_mps.metal.source.clang import Problem

NAME = "program_source"
"""What Metal calls a text that it compiles at run time, in its errors."""
TURNS = 20
"""How often the text is compiled at most; a turn rewrites what the errors of the one before name."""

_MARKER = re.compile(r'^# (\d+) "([^"]*)"')
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<(?:metal_\w+|metal/\w+|simd/simd\.h)>[^\n]*", re.MULTILINE)
_ATTRIBUTES = re.compile(r"\[\[((?:[^\[\]\n]|\[[^\]\n]*\])*)\]\]")
_ATTRIBUTE = re.compile(r"\s*(?:\w+::)?(\w+)\s*(\((?:[^()]|\([^()]*\))*\))?\s*(?:,|$)")
_CPP = {"unroll", "maybe_unused", "fallthrough", "nodiscard", "noreturn", "likely", "unlikely", "deprecated"}
"""Attributes that are C++'s; all others are Metal's, and module.py reads them from what clang writes."""
_DIMENSIONS = r"\w+\s*(?:\[[^;=\]\n]*\]\s*)*"
_VARIABLE = re.compile(
    r"(?<![\w(,])threadgroup\s+((?:(?:const|volatile|alignas\s*\([^)]*\))\s+)*[A-Za-z_][\w:]*(?:\s*<[^;{}()\n]*?>)?"
    rf"(?:::\w+)*)\s+({_DIMENSIONS}(?:,\s*{_DIMENSIONS})*);"
)
_LITERAL = re.compile(r'(?:"(?:[^"\\\n]|\\.)*"[ \t]*)+|\b__(?:func|FUNCTION|PRETTY_FUNCTION)__\b')
_NUMBER = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|^#.*$|[A-Za-z_]\w*|(?P<number>(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])|\d+[eE][+-]?\d+(?![\w.]))'
    r"|(?P<brain>\d[\d.eE+-]*(?=(?:bf|BF)\b))|\d[\w.]*",
    re.MULTILINE,
)
_NO_VALUE = re.compile(r"^#.*\Z|\b(?:annotate|static_assert|asm|__asm|_Pragma|deprecated)\s*\([^;]*\Z", re.MULTILINE)
_NO_VECTOR = re.compile(
    r"excess elements in (?:scalar|vector) initializer|invalid conversion between|(?:from|to) vector '"
    r"|(?:functional-style cast|C-style cast|static_cast) from .*vector of"
    r"|cannot initialize a variable of type '[^']*' \(vector of|cast from '.*(?:bf.* to 'half|half.* to '.*bf)"
)
_REINTERPRETED = re.compile(r"= bitcast <(\d+) x (\w+)> \S+ to <\1 x (?!\2>)\w+>, !dbg !(\d+)$", re.MULTILINE)
_DECLARED = re.compile(r"(?<![\w:])(?!return\b|else\b)([A-Za-z_][\w:]*(?:\s*<[^;{}()]*>)?)\s+\Z")
_STATIC_CAST = re.compile(r"static_cast\s*<")
_C_CAST = re.compile(r"\(\s*([\w:]+(?:<[^<>()]*>)?)\s*\)")
_CONFLICT = re.compile(r"candidate template ignored: deduced conflicting types for parameter .*__private")
_TWICE = re.compile(r"^redefinition of '|cannot be redeclared$")
_ENDS = re.compile(r"[{};]")
_SPACE = re.compile(r"\b(?:device|constant|threadgroup|__global|__local|__private)\b")


class Rejected(Exception):
    """Source that does not compile; `problems` name the author's own lines and columns."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"{at.file}:{at.line}:{at.column}: error: {at.text.strip()}" for at in problems))


class Text:
    """Preprocessed text: where each of the author's lines is, and what was rewritten."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines: dict[tuple[str, int], int] = {}
        self._longer: dict[int, list[tuple[int, int]]] = {}
        file, number = NAME, 0
        for index, line in enumerate(text.split("\n")):
            if marker := _MARKER.match(line):
                number, file = int(marker[1]) - 1, marker[2].rsplit("/", 1)[-1]
            else:
                number += 1
                self._lines[file, number] = index
        self._find_starts()

    def _find_starts(self) -> None:
        self._starts = [0, *(found.end() for found in re.finditer("\n", self.text))]

    def offset(self, problem: Problem) -> int | None:
        """Return where a problem is in the text; None in Metal's library, which is as it is."""
        index = self._lines.get((problem.file, problem.line)) if problem.file != clang.header().name else None
        return None if index is None else self._starts[index] + problem.column - 1

    def replace(self, changes: list[tuple[int, int, str]]) -> None:
        """Put texts in the place of parts (start, end), which do not overlap."""
        for start, end, text in sorted(changes, reverse=True):
            line = bisect_right(self._starts, start) - 1
            self._longer.setdefault(line, []).append((start - self._starts[line], len(text) - (end - start)))
            self.text = self.text[:start] + text + self.text[end:]
        self._find_starts()

    def original(self, problem: Problem) -> Problem:
        """Return the problem with the column that the author's line has."""
        column = problem.column - 1
        line = self._lines.get((problem.file, problem.line), -1)
        for start, longer in reversed(self._longer.get(line, [])):
            if column > start:
                column = max(start, column - longer)
        return problem._replace(column=column + 1)


def compiled(source: str) -> str:
    """Compile Metal source to LLVM assembly.

    Raises:
        Rejected: the source has errors.
    """
    library = clang.header().read_text(encoding="utf-8")
    given = _INCLUDE.sub("", source)
    whole, problems = clang.preprocessed(f'# 1 "metal_stdlib"\n{library}\n# 1 "{NAME}"\n{given}\n')
    text = Text(whole)
    if "function_constant(" in whole and (at := given.find("function_constant(")) >= 0:
        problems = [Problem(NAME, given.count("\n", 0, at) + 1, 1, "error", "hf_mps has no function constants")]
    if not problems:
        for rewritten in (_annotations, _variables, _literals, _numbers):
            text.replace(list(rewritten(text.text)))
    fine = False
    for _ in range(0 if problems else TURNS):
        module, problems = clang.compiled(text.text)
        fine = all(each.kind == "note" for each in problems)
        found = _reinterpreted(module) if fine else problems
        # Notes of a call may name the place of a second definition as well, which is cured first.
        found = sorted(found, key=lambda each: bool(_TWICE.search(each.text)))
        places = {place: each.text for each in found if (place := text.offset(each)) is not None}
        changes = [change for place, told in places.items() for change in _cured(text.text, place, told)]
        if not changes:
            break
        text.replace(changes)
    if fine:
        return module
    errors = [text.original(each) for each in problems if each.kind != "note"]
    # What Metal has and the header refuses by name: what follows from that says nothing more.
    errors = [each for each in errors if "' is unavailable: Metal has it" in each.text] or errors
    raise Rejected([each for each in errors if each.file == NAME] or errors)


Changes = Iterator[tuple[int, int, str]]


def _annotations(text: str) -> Changes:
    """`[[buffer(0)]]` as an annotation, which clang's module then has."""
    for found in _ATTRIBUTES.finditer(text):
        names = _ATTRIBUTE.findall(found[1])
        if names and "clang::" not in found[1] and all(name not in _CPP for name, _ in names):
            # A member of an argument buffer has its place by its order, which is all that [[id(n)]] says.
            kept = [(name, f", {value[1:-1]}" if value else "") for name, value in names if name != "id"]
            given = ", ".join(f'annotate("{name}"{value})' for name, value in kept)
            yield *found.span(), f"__attribute__(({given}))" if given else ""


def _variables(text: str) -> Changes:
    """`threadgroup float part[32];` as a reference to memory that a call gives.

    OpenCL has such variables in kernels alone, Metal in templates and helpers too. The type that the call declares on
    the way (`struct _shared_1`) is another one in each instantiation, as the variable is.
    """
    number = 0
    for found in _VARIABLE.finditer(text):
        made = []
        for variable in re.findall(_DIMENSIONS, found[2]):
            name, _, dimensions = variable.partition("[")
            dimensions = f"[{dimensions.strip()}" if dimensions else ""
            number += 1
            memory = f"::metal::_shared<{found[1]}{dimensions}, struct _shared_{number}>()"
            made.append(f"threadgroup {found[1]} (&{name.strip()}){dimensions} = {memory};")
        yield *found.span(), " ".join(made)


def _literals(text: str) -> Changes:
    """A string as one in device memory: `constant` is that here, and OpenCL's own space is not."""
    for found in _LITERAL.finditer(text, text.index(f'"{NAME}"')):
        start = max(text.rfind(end, 0, found.start()) for end in ";{}")
        if not _NO_VALUE.search(text[start + 1 : found.start()]):
            yield *found.span(), f"::metal::_text({found[0]})"


def _numbers(text: str) -> Changes:
    """`0.5` as `0.5f`, which it is in Metal; clang has it as a double in templates, even where it knows none.

    And `0.5bf` as `0.5_bf`, since C++ has no literal of the user's without that sign.
    """
    for found in _NUMBER.finditer(text):
        if found["number"] or found["brain"]:
            yield found.end(), found.end(), "f" if found["number"] else "_"


def _reinterpreted(module: str) -> Iterator[Problem]:
    """Where clang took float4(int4) for other numbers of the same bits, which it does without a word."""
    nodes = dict(re.findall(r"^!(\d+) = (?:distinct )?!DI\w+\((.*)\)$", module, re.MULTILINE))
    for number in sorted({each[2] for each in _REINTERPRETED.findall(module)}):
        line, column, scope = re.findall(r"(?:line: |column: |scope: !)(\d+)", nodes[number])
        file = nodes[re.findall(r"file: !(\d+)", nodes[scope])[0]].split('"')[1]
        yield Problem(file.rsplit("/", 1)[-1], int(line), int(column), "error", "from vector '")


def _cured(text: str, place: int, told: str) -> Changes:
    """What makes the text at a place one that clang accepts, where an error or note there has a cure."""
    if _CONFLICT.search(told):
        yield from _private_parameters(text, place)
    if _TWICE.search(told):
        yield from _of_one_space(text, place)
    if not _NO_VECTOR.search(told):
        return
    if cast := _STATIC_CAST.match(text, place):
        yield place, cast.end(), "::metal::_make<"
    elif cast := _C_CAST.match(text, place):
        yield place, cast.end(), f"::metal::_cast<{cast[1]}>() ->* "
    elif (kind := _DECLARED.search(text, place - 200, place)) and (name := re.match(r"\w+(?=\s*\()", text[place:])):
        yield place + name.end(), place + name.end(), f" = ::metal::_make<{kind[1]}>"
    elif named := _type_before_parenthesis(text, place):
        yield place, place + len(named), f"::metal::_make<{named}>"


def _of_one_space(text: str, place: int) -> Changes:
    """Leave out the second of two functions that differ by `device` and `constant` alone, which are one space here."""

    def alike(part: str) -> str:
        return "".join(re.sub(r"\bconst\b", "", re.sub(r"\bconstant\b", "device", part)).split())

    start = max(text.rfind(end, 0, place) for end in ";{}") + 1
    start = max([start, *(start + line.end() for line in re.finditer(r"^#.*", text[start:place], re.MULTILINE))])
    depth, end = 0, place
    for found in _ENDS.finditer(text, place):
        depth += {"{": 1, "}": -1, ";": 0}[found[0]]
        end = found.end()
        if not depth:
            break
    function = text[start:end]
    if text.count(function.strip()) == 1 and alike(text).count(alike(function)) > 1:
        yield start, end, "\n" * function.count("\n")


def _type_before_parenthesis(text: str, place: int) -> str | None:
    """The name of a type, template arguments included, that a parenthesis follows at once."""
    depth = 0
    for at in range(place, len(text)):
        # A statement's end behind `<` says that it was a comparison.
        if text[at] in ";{}" or not (depth or text[at].isalnum() or text[at] in "_:<> "):
            break
        depth += {"<": 1, ">": -1}.get(text[at], 0)
    kind = text[place:at]
    return kind if text[at] == "(" and kind.strip() and "_make<" not in kind else None


def _private_parameters(text: str, place: int) -> Changes:
    """Put the pointers and references of a template that name no space in the thread's own.

    Of `f(thread T* p, T x)` clang deduces T twice, once with the space of the argument's pointer, where the pointer may
    be of any space.
    """
    at = text.index("(", place)
    depth, start = 0, at + 1
    while True:
        depth += {"(": 1, "<": 1, "[": 1, ")": -1, ">": -1, "]": -1}.get(text[at], 0)
        if depth == 0 or (depth == 1 and text[at] == ","):
            given = text[start:at]
            if re.search(r"[*&\[]", given) and not _SPACE.search(given):
                first = start + len(given) - len(given.lstrip())
                yield first, first, "__private "
            start = at + 1
        if depth == 0:
            return
        at += 1
