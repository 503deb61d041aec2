"""A server with OpenAI's streaming API that answers as it is told, also wrongly."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode()) + b"\n\n"


def piece(text: str, index: int = 0, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]})


def usage(prompt: int, completion: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


END = event(b"[DONE]")
GOOD = [piece("Still"), piece("water\u2028"), piece("", finish="stop"), usage(10, 6), END]


class Hang:
    """A step of a script: wait for so many seconds, or with None close the connection in the middle."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds


Script = list[bytes | Hang] | tuple[int, bytes] | bytes


@contextmanager
def scripted(*scripts: Script) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Answer the requests with these, the last one over again; yields the base URL and the bodies that came.

    A list is a stream, a pair a status and a body, bytes an answer that is no stream.
    """
    bodies: list[dict[str, Any]] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, "application/json", [b'{"data": [{"id": "scripted"}]}'])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                # The probes are not counted.
                is_probe = body["max_tokens"] == 2 and "n" in body
                script = GOOD if is_probe else scripts[min(len(bodies), len(scripts) - 1)]
                if not is_probe:
                    bodies.append(body | {"authorization": self.headers.get("Authorization")})
            if isinstance(script, tuple):
                self.answer(script[0], "application/json", [script[1]])
            elif isinstance(script, bytes):
                self.answer(200, "application/json", [script])
            else:
                self.answer(200, "text/event-stream", script)

        def answer(self, status: int, kind: str, steps: list[Any]) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if not any(isinstance(step, Hang) and step.seconds is None for step in steps):
                self.send_header("Connection", "close")
            else:
                self.send_header("Content-Length", "100000")
            self.end_headers()
            for step in steps:
                if isinstance(step, bytes):
                    self.wfile.write(step)
                    self.wfile.flush()
                elif step.seconds is None:
                    return
                else:
                    time.sleep(step.seconds)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", bodies
        finally:
            server.shutdown()
            thread.join()
