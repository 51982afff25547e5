"""What SECURITY.md promises, as far as the sources themselves can show it."""

from __future__ import annotations

import ast
from functools import cache

from tests.conftest import CHECKOUT

CONNECTING = ("aiohttp", "ftplib", "http", "httpx", "requests", "smtplib", "socket", "urllib.request", "urllib3")

BETWEEN_HOSTS = "hf_mps/distributed/"
"""What connects the hosts of a run, which a person starts on each."""


@cache
def _nodes() -> list[tuple[str, ast.AST]]:
    return [
        (f"{path.relative_to(CHECKOUT)}:{getattr(node, 'lineno', 0)}", node)
        for path in sorted((CHECKOUT / "hf_mps").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]


def test_nothing_opens_a_connection_by_itself() -> None:
    imported = [
        (where, name)
        for where, node in _nodes()
        if isinstance(node, ast.Import | ast.ImportFrom) and not where.startswith(BETWEEN_HOSTS)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    ]
    assert len(imported) > 1000
    assert [each for each in imported if f"{each[1]}.".startswith(tuple(f"{name}." for name in CONNECTING))] == []


def test_no_call_trusts_code_of_the_hub_or_goes_through_a_shell() -> None:
    calls = [(where, node) for where, node in _nodes() if isinstance(node, ast.Call)]
    given = {word.arg for _, call in calls for word in call.keywords}
    assert not given & {"trust_remote_code", "shell"}
    refused = ("os.system", "os.popen", "pickle.load", "pickle.loads")
    assert [where for where, call in calls if ast.unparse(call.func) in refused] == []


def test_torch_files_are_read_as_data() -> None:
    loads = [call for _, call in _nodes() if isinstance(call, ast.Call) and ast.unparse(call.func) == "torch.load"]
    assert loads
    for call in loads:
        assert {"weights_only": "True"}.items() <= {word.arg: ast.unparse(word.value) for word in call.keywords}.items()
