"""What SECURITY.md promises, as far as the sources themselves can show it."""

from __future__ import annotations

import ast

from tests.sources import sources

CONNECTING = ("aiohttp", "ftplib", "http", "httpx", "requests", "smtplib", "socket", "urllib.request", "urllib3")

BETWEEN_HOSTS = "hf_mps/distributed/"
"""What connects the hosts of a run, which a person starts on each."""


def test_nothing_opens_a_connection_by_itself() -> None:
    imported = [
        (f"{source.path}:{node.lineno}", name)
        for source in sources().values()
        if BETWEEN_HOSTS not in source.path.as_posix()
        for node in (*source.imports, *source.for_types)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    ]
    assert len(imported) > 1000
    assert [each for each in imported if f"{each[1]}.".startswith(tuple(f"{name}." for name in CONNECTING))] == []


def test_no_call_trusts_code_of_the_hub_or_goes_through_a_shell() -> None:
    calls = [call for source in sources().values() for call in source.calls]
    assert len(calls) > 1000
    assert [call for call in calls if {"trust_remote_code", "shell"} & call.words.keys()] == []
    refused = ("os.system", "os.popen", "pickle.load", "pickle.loads")
    assert [call for call in calls if call.function in refused] == []


def test_torch_files_are_read_as_data() -> None:
    loads = [call for source in sources().values() for call in source.calls if call.function == "torch.load"]
    assert loads
    assert [call for call in loads if call.words.get("weights_only") != "True"] == []
