"""A model hub on loopback: as much of the hub's API as huggingface_hub asks for, over folders that a test makes.

with Hub({"someone/tiny": folder}) as hub:      hub.served lists the files that were sent
    use_here(monkeypatch, hub.url, home)        huggingface_hub in this process
    environment(hub.url, home)                  for a process of its own
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    import pytest

PARQUET = "refs/convert/parquet"  # the revision in which the hub keeps every data set as parquet
LARGE = 1000  # bytes from which a file has a sha256, as large files on the hub have


def environment(url: str, home: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}


def constants_for(url: str, home: Path) -> dict[str, object]:
    """What huggingface_hub makes of this environment when it is imported, and reads whenever it is used."""
    pattern = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    found = {"ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": pattern, "HF_HUB_CACHE": str(home / "hub")}
    return found | {"HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}


def use_here(patch: pytest.MonkeyPatch, url: str, home: Path) -> None:
    from huggingface_hub import close_session, constants

    close_session()  # a connection that it keeps to a hub that is gone fails in another way than a new one
    for name, value in constants_for(url, home).items():
        patch.setattr(constants, name, value)


class Hub:
    def __init__(self, models: dict[str, Path] | None = None, datasets: dict[str, Path] | None = None):
        self.folders = {("models", name): path for name, path in (models or {}).items()}
        self.folders |= {("datasets", name): path for name, path in (datasets or {}).items()}
        self.served: list[str] = []
        self.cut: str | None = None  # a file whose download breaks off half-way and is then refused
        self.gone = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def commit(self, kind: str, name: str) -> str:
        files = sorted(path for path in self.folders[kind, name].rglob("*") if path.is_file())
        return hashlib.sha1(b"".join(path.read_bytes() for path in files)).hexdigest()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if self.gone:  # a connection that was kept
            request.close_connection = True
            return
        path = unquote(urlsplit(request.path).path).replace(PARQUET, "parquet")
        parts = [part for part in path.split("/") if part]
        if not parts:  # is anybody there?
            return self._json(request, {})
        if parts[0] == "api":
            kind, name, what = parts[1], "/".join(parts[2:4]), parts[4:]
            if (kind, name) not in self.folders:
                return self._error(request, 404, "RepoNotFound")
            commit = self.commit(kind, name)
            if len(what) > 1 and what[1] not in ("main", commit):
                return self._error(request, 404, "RevisionNotFound")
            if what[:1] == ["tree"]:
                return self._json(request, [self._entry(kind, name, path) for path in self._files(kind, name)])
            siblings = [{"rfilename": path} for path in self._files(kind, name)]
            return self._json(request, {"id": name, "sha": commit, "siblings": siblings, "tags": [], "private": False})
        kind = "datasets" if parts[0] == "datasets" else "models"
        parts = parts[1:] if kind == "datasets" else parts
        name, file = "/".join(parts[:2]), "/".join(parts[4:])
        if (kind, name) not in self.folders or file not in self._files(kind, name):
            return self._error(request, 404, "EntryNotFound")
        self._send_file(request, kind, name, file)

    def _files(self, kind: str, name: str) -> list[str]:
        folder = self.folders[kind, name]
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def _entry(self, kind: str, name: str, file: str) -> dict:
        content = (self.folders[kind, name] / file).read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        large = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return {"type": "file", "path": file, "size": len(content), "oid": git} | (
            {"lfs": large} if len(content) >= LARGE else {}
        )

    def _send_file(self, request: BaseHTTPRequestHandler, kind: str, name: str, file: str) -> None:
        content, entry = (self.folders[kind, name] / file).read_bytes(), self._entry(kind, name, file)
        start = int(request.headers.get("Range", "bytes=0-")[6:].split("-")[0])
        if request.command == "GET" and file == self.cut and file in self.served:
            return self._error(request, 403, "")  # the library would try again five times, a second apart
        request.send_response(206 if start else 200)
        request.send_header("X-Repo-Commit", self.commit(kind, name))
        request.send_header("ETag", f'"{entry.get("lfs", entry)["oid"]}"')
        request.send_header("Content-Length", str(len(content) - start))
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        request.end_headers()
        if request.command == "GET":
            self.served.append(file)
            if file == self.cut:
                request.wfile.write(content[start : len(content) // 2])
                request.close_connection = True
                return
            request.wfile.write(content[start:])

    def _json(self, request: BaseHTTPRequestHandler, content: object) -> None:
        body = json.dumps(content).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(b"" if request.command == "HEAD" else body)

    def _error(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        request.send_response(status)
        request.send_header("X-Error-Code", code)
        request.send_header("Content-Length", "0")
        request.end_headers()

    def __enter__(self) -> Hub:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gone = True
        self.server.shutdown()
        self.server.server_close()
