"""A stand-in for the hub, on this machine alone: what huggingface_hub asks for, answered from a folder."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """`models`: name → folder; `gated`: names that answer as those whose terms are not accepted; `asked`: what was."""

    def __init__(self, models: dict[str, Path], gated: tuple[str, ...] = ()) -> None:
        self.models, self.gated = models, gated
        self.asked: list[str] = []
        self.address = ""

    @property
    def fetched(self) -> list[str]:
        """The files whose bytes were asked for."""
        return [line.rsplit("/", 1)[1] for line in self.asked if line.startswith("GET") and "/resolve/" in line]

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body)"""
        self.asked.append(f"{method} {path}")
        path = path.split("?")[0]
        api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models" if api else "").split("/")[1:]
        name, (verb, revision), file = "/".join(parts[:2]), parts[2:4] or ("revision", "main"), "/".join(parts[4:])
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to {name} is restricted"}, b""
        if name not in self.models:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if revision not in ("main", "v1", SHA):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        folder = self.models[name]
        if api:
            return 200, {"Content-Type": "application/json"}, json.dumps(self._about(name, folder, verb)).encode()
        if verb != "resolve" or not (folder / file).is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        data = (folder / file).read_bytes()
        return 200, {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": SHA}, data

    def _about(self, name: str, folder: Path, verb: str) -> Any:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in files]
        if verb == "revision":
            return {"id": name, "modelId": name, "sha": SHA, "siblings": [{"rfilename": name} for name in names]}
        return [
            {"type": "file", "path": name, "size": path.stat().st_size, "oid": _digest(path.read_bytes())}
            for name, path in zip(names, files, strict=True)
        ]


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The stand-in at an address of this machine, for as long as the block runs."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer("GET")

        def do_HEAD(self) -> None:
            self._answer("HEAD")

        def _answer(self, method: str) -> None:
            status, headers, body = hub.answer(method, self.path)
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            self.end_headers()
            if method == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: `asked` holds it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
