"""A hub on this machine: what huggingface_hub's client asks of the real one to upload a folder, by HTTP."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_the_test"


class Hub:
    """What was sent to it: the repositories that were made, the files of each, and the commit messages."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.address = ""

    def answer(self, method: str, path: str, body: bytes) -> Any:
        """What the hub says to a request, as JSON or None for an empty answer; KeyError for what it does not know."""
        path = path.partition("?")[0]
        if path == "/api/repos/create":
            said = json.loads(body)
            name = f"{said.get('organization') or 'somebody'}/{said['name']}"
            self.repositories[name] = said
            return {"url": f"{self.address}/{name}", "name": name, "id": name}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            # The hub's own rule goes by .gitattributes; large and binary files are lfs.
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if file["size"] > 5000 else "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return {"files": modes}
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.address}/blobs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return {"transfer": "basic", "objects": objects}
        if method == "PUT" and path.startswith("/blobs/"):
            assert hashlib.sha256(body).hexdigest() == path.rpartition("/")[2]
            self.blobs[path.rpartition("/")[2]] = body
            return None
        if path.endswith("/commit/main"):
            return self._commit(path.removeprefix("/api/models/").removesuffix("/commit/main"), body)
        raise KeyError(f"{method} {path}")

    def _commit(self, name: str, body: bytes) -> dict[str, Any]:
        for line in body.splitlines():
            entry = json.loads(line)
            kind, value = entry["key"], entry["value"]
            if kind == "header":
                self.messages.append(value["summary"])
            elif kind == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert kind == "lfsFile"
                self.files[value["path"]] = self.blobs[value["oid"]]
        return {"commitUrl": f"{self.address}/{name}/commit/1", "commitOid": "1" * 40, "hookOutput": ""}


@contextmanager
def running() -> Iterator[Hub]:
    """A hub that listens on a free port of this machine while the context lasts; it takes `TOKEN` alone."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}" or self.path.startswith("/blobs/")
            try:
                code, said = (200, hub.answer(self.command, self.path, body)) if known else (401, {"error": "no"})
            except KeyError as error:
                code, said = 404, {"error": str(error)}
            content = b"" if said is None else json.dumps(said).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_HEAD = _serve

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the test looks at what came."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
