"""What a dry run found out, in the form asked for: a table for people, JSON, GitHub annotations, a README's badge."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError
from hf_mps.core.files import plain
from hf_mps.metal.device import simulated

Form = Literal["table", "json", "github", "badge"]


@dataclass(frozen=True)
class Annotation:
    """One finding for the summary of a GitHub job."""

    level: Literal["error", "warning", "notice"]
    text: str


@dataclass(frozen=True)
class Report:
    """The result of `verb` for `target`. `facts` say how it was looked at; the table also shows the `table_facts`.

    `body` are the table's lines below the facts: a line, or cells of which the first is as wide as the facts' names and
    `names`. `values` are the JSON object's keys behind the facts. `badge` is the badge's text and colour. `problem`
    says why the exit code is 1 and is empty where all is well.
    """

    verb: str
    target: str
    facts: Mapping[str, Choice[Any]]
    body: Sequence[str | tuple[str, ...]]
    values: Mapping[str, Any]
    table_facts: Mapping[str, Choice[Any]] = field(default_factory=dict)
    names: Sequence[str] = ()
    annotations: Sequence[Annotation] = ()
    badge: tuple[str, str] = ("", "")
    problem: str = ""


def form(*, json: bool = False, github: bool = False, badge: bool = False) -> Form:
    """Return the form that a verb's options ask for. Raises UserError where they ask for more than one."""
    if sum((json, github, badge)) > 1:
        raise UserError("--json, --github and --badge are three forms of one result; give one of them")
    return "json" if json else "github" if github else "badge" if badge else "table"


def show(report: Report, form: Form = "table") -> None:
    """Print the report. Raises RunError (exit code 1) where it has a problem."""
    print(render(report, form))
    if report.problem:
        raise RunError(f"{report.verb}: {report.problem}")


def render(report: Report, form: Form = "table") -> str:
    """Return the report's text in one form, without a newline at its end."""
    return _RENDERERS[form](report)


def _table(report: Report) -> str:
    facts = {**report.facts, **report.table_facts}
    width = max(map(len, (*facts, *report.names)), default=0)
    lines = [f"hf-mps {report.verb} {report.target}"]
    lines += [f"  {name:<{width}}  {choice.value}  {choice.reason}".rstrip() for name, choice in facts.items()]
    for line in report.body:
        lines.append(line if isinstance(line, str) else f"  {line[0]:<{width}}  {'  '.join(line[1:])}")
    return "\n".join(lines)


def _json(report: Report) -> str:
    head = {"target": report.target, "simulated": simulated(), "facts": report.facts}
    return json.dumps(plain({**head, **report.values}), indent=2)


def _github(report: Report) -> str:
    """GitHub's workflow commands. Source: docs.github.com, "Workflow commands for GitHub Actions"."""
    title = _escaped(f"hf-mps {report.verb} {report.target}", ":,")
    return "\n".join(f"::{note.level} title={title}::{_escaped(note.text)}" for note in report.annotations)


def _badge(report: Report) -> str:
    """Return a line of Markdown with a static badge of shields.io."""
    words, colour = report.badge
    return f"![Metal: {words}](https://img.shields.io/badge/Metal-{words.replace(' ', '_')}-{colour})"


def _escaped(text: str, further: str = "") -> str:
    for letter in "%\r\n" + further:
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text


_RENDERERS: dict[Form, Callable[[Report], str]] = {"table": _table, "json": _json, "github": _github, "badge": _badge}
