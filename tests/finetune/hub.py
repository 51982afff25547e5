"""A Hub of one's own: serves data sets from a folder by the part of the Hub's HTTP API that its clients read with.

The paths and headers are those that huggingface_hub 2.4 asks for: hf_api.py (repo_info, list_repo_tree,
get_paths_info), hf_file_system.py (_fetch_range) and file_download.py (get_hf_file_metadata). A program is led there by
`HF_ENDPOINT`, which huggingface_hub reads when it is imported.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

REVISION = "main"
OF_API = re.compile(
    r"/api/datasets/(?P<name>[^/]+/[^/]+)(/(?P<what>revision|tree|paths-info)/(?P<rev>[^/]+)(/(?P<path>.*))?)?$"
)
OF_FILES = re.compile(r"/datasets/(?P<name>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)$")


@dataclass
class Hub:
    """The data sets below `folder`, as NAMESPACE/NAME; `endpoint` is where they are served."""

    folder: Path
    endpoint: str = ""
    read: list[tuple[str, str]] = field(default_factory=list)
    """Each file that was asked for, with the range of bytes, "" for the whole."""
    to_cut: list[str] = field(default_factory=list)
    """Files of which one answer breaks off in the middle, once for each time that they stand here."""

    def entry(self, name: str, path: Path) -> dict[str, Any]:
        """What the API says of a file or folder of a data set."""
        about: dict[str, Any] = {"path": path.relative_to(self.folder / name).as_posix(), "oid": digest(path)}
        if path.is_dir():
            return about | {"type": "directory"}
        return about | {"type": "file", "size": path.stat().st_size}

    def commit(self, name: str) -> str:
        """The commit of a data set: another one where a file is."""
        entries = [self.entry(name, path) for path in sorted((self.folder / name).rglob("*"))]
        return hashlib.sha1(json.dumps(entries).encode()).hexdigest()


def digest(path: Path) -> str:
    """Git's kind of an object id for a file or folder."""
    content = path.read_bytes() if path.is_file() else path.name.encode()
    return hashlib.sha1(content).hexdigest()


class Answers(BaseHTTPRequestHandler):
    """One connection to the hub."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        """Nothing: the test's output is its own."""

    def _answer(self) -> None:
        where = urlsplit(self.path)
        path, asked = unquote(where.path), parse_qs(where.query)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if found := OF_FILES.match(path):
            return self._file(*self._known(found))
        if found := OF_API.match(path):
            name, rev, target = self._known(found)
            if not (self.hub.folder / name).is_dir():
                return self._refuse("RepoNotFound")
            if rev not in (REVISION, self.hub.commit(name)):
                return self._refuse("RevisionNotFound")
            what = found["what"] or "revision"
            if what == "tree":
                return self._tree(name, target, recursive=asked.get("recursive", [""])[0].lower() == "true")
            if what == "paths-info":
                paths = [self.hub.folder / name / each for each in parse_qs(body.decode()).get("paths", [])]
                return self._json([self.hub.entry(name, each) for each in paths if each.exists()])
            files = [each for each in (self.hub.folder / name).rglob("*") if each.is_file()]
            siblings = [{"rfilename": self.hub.entry(name, each)["path"]} for each in sorted(files)]
            return self._json({"id": name, "sha": self.hub.commit(name), "private": False, "siblings": siblings})
        return self._refuse("EntryNotFound")

    def _known(self, found: re.Match[str]) -> tuple[str, str, str]:
        return found["name"], found["rev"] or REVISION, found["path"] or ""

    def _tree(self, name: str, target: str, *, recursive: bool) -> None:
        root = self.hub.folder / name / target
        if not root.is_dir():
            return self._refuse("EntryNotFound")
        return self._json(
            [self.hub.entry(name, each) for each in sorted(root.rglob("*") if recursive else root.iterdir())]
        )

    def _file(self, name: str, rev: str, target: str) -> None:
        path = self.hub.folder / name / target
        if not path.is_file():
            return self._refuse("EntryNotFound" if (self.hub.folder / name).is_dir() else "RepoNotFound")
        content, asked = path.read_bytes(), self.headers.get("Range", "")
        size, status, headers = len(content), 200, {}
        if of := re.fullmatch(r"bytes=(\d+)-(\d*)", asked):
            begin, end = int(of[1]), min(int(of[2] or size - 1), size - 1)
            content, status = content[begin : end + 1], 206
            headers = {"Content-Range": f"bytes {begin}-{end}/{size}"}
        if self.command == "GET":
            self.hub.read.append((target, asked))
        headers |= {"ETag": f'"{digest(path)}"', "X-Repo-Commit": self.hub.commit(name), "Accept-Ranges": "bytes"}
        cut = self.command == "GET" and target in self.hub.to_cut
        if cut:
            self.hub.to_cut.remove(target)
        return self._send(status, content, headers, cut=cut)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, code: str) -> None:
        self._send(404, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, content: bytes, headers: dict[str, str], *, cut: bool = False) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True


@contextmanager
def served(folder: Path) -> Iterator[Hub]:
    """Serve the data sets below `folder` while the context lasts."""
    hub = Hub(folder)
    handler = type("Connection", (Answers,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            with suppress(RuntimeError):
                thread.join(timeout=5)
