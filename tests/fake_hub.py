"""A small hub on this machine that speaks the endpoints huggingface-hub uses to list and fetch files."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """Its repositories and what was asked of it. cut: files whose transfer breaks after half, once."""

    repositories: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    fetched: list[str] = field(default_factory=list)
    address: str = ""


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
            if parts[:2] == ["api", "models"]:
                self._describe("/".join(parts[2:4]), parts[4:])
            elif len(parts) > 4 and parts[2] == "resolve":
                self._file("/".join(parts[:2]), "/".join(parts[4:]), with_body)
            else:
                self._error(404, "EntryNotFound")

        def _describe(self, name: str, rest: list[str]) -> None:
            if name in hub.gated:
                return self._error(403, "GatedRepo")
            files = hub.repositories.get(name)
            if files is None:
                return self._error(401, "RepoNotFound")
            if rest[:1] in (["revision"], ["tree"]) and rest[1] not in ("main", COMMIT):
                return self._error(404, "RevisionNotFound")
            if rest[:1] == ["tree"]:
                return self._json([self._entry(path, data) for path, data in files.items()])
            siblings = [{"rfilename": path, "size": len(data)} for path, data in files.items()]
            return self._json({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings})

        @staticmethod
        def _entry(path: str, data: bytes) -> dict[str, object]:
            return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

        def _file(self, name: str, path: str, with_body: bool) -> None:
            data = hub.repositories.get(name, {}).get(path)
            if data is None:
                return self._error(404, "EntryNotFound")
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if not with_body:
                return None
            if path in hub.cut:
                hub.cut.discard(path)
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
                return None
            hub.fetched.append(path)
            self.wfile.write(data)
            return None

        def _json(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _error(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """The hub, listening at hub.address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
