"""A model hub on this machine: as much of its protocol as huggingface_hub needs to download and to upload a model."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


def split(path: str) -> tuple[str, str]:
    """Repository and the rest of a path."""
    match = re.fullmatch(r"/(?:api/models/)?([^/]+/[^/]+)/?(.*)", path)
    return (match[1], match[2]) if match else ("", "")


class FakeHub(ThreadingHTTPServer):
    """A server in a thread.

    `repositories` maps owner/name to {"private": bool, "files": {...}}, and "gated": True if its licence must be
    accepted first.
    """

    daemon_threads = True

    def __init__(self, token: str = "hf_right") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token = token
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, dict[str, Any]] = {}

    def publish(self, name: str, folder: Path) -> None:
        """Make a folder's files a model of the hub."""
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.repositories[name] = {"private": False, "files": files}

    def environment(self, home: Path) -> dict[str, str]:
        """Environment variables that make this the only hub, with an empty cache."""
        kept = {
            name: value for name, value in os.environ.items() if name != "HF_TOKEN" and not name.endswith("_OFFLINE")
        }  # which libraries set for one another
        return {**kept, "HF_ENDPOINT": self.url, "HF_HOME": str(home / "hub"), "HF_TOKEN": self.token,
                "HF_HUB_DISABLE_XET": "1"}  # fmt: skip

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reply(self, content: object) -> None:
        self.answer(200, json.dumps(content).encode(), Content_Type="application/json")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        name, rest = split(path)
        if path == "/api/whoami-v2":
            if self.headers.get("Authorization") == f"Bearer {self.server.token}":
                self.reply({"type": "user", "name": "me", "auth": {}})
            else:
                self.answer(401)
        elif name not in self.server.repositories:
            self.answer(404, X_Error_Code="RepoNotFound")
        elif self.server.repositories[name].get("gated"):
            self.answer(403, X_Error_Code="GatedRepo")
        else:
            self.show(name, rest, self.server.repositories[name]["files"])

    def show(self, name: str, rest: str, files: dict[str, bytes]) -> None:
        hashes = {path: hashlib.sha1(content).hexdigest() for path, content in files.items()}
        if rest.startswith("resolve/"):
            path = rest.split("/", 2)[2]
            if path in files:
                self.answer(200, files[path], ETag=f'"{hashes[path]}"')
            else:
                self.answer(404, X_Error_Code="EntryNotFound")
        elif rest.startswith("tree/"):
            self.reply([{"type": "file", "oid": hashes[path], "size": len(files[path]), "path": path}
                        for path in files])  # fmt: skip
        else:
            self.reply({"id": name, "sha": COMMIT, "private": False, "tags": [], "downloads": 0,
                        "siblings": [{"rfilename": path} for path in files]})  # fmt: skip

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        name, rest = split(path)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            private = asked.get("visibility") == "private" or bool(asked.get("private"))
            self.server.repositories.setdefault(name, {"private": private, "files": {}})
            self.reply({"url": f"{self.server.url}/{name}", "id": name, "name": name})
        elif path == "/api/validate-yaml":
            self.reply({"errors": [], "warnings": []})
        elif rest.startswith("preupload/"):
            self.reply({"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                                  for file in json.loads(body)["files"]]})  # fmt: skip
        elif rest.startswith("commit/"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.repositories[name]["files"][line["value"]["path"]] = content
            self.reply({"commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self.answer(404)
