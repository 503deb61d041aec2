"""How large and how slow a request's body may be, and how many requests for answers there may be at once.

What is beyond it is refused before anything reads it.
Sources: RFC 9110, sections 15.5.9 (408) and 15.5.14 (413); RFC 6585, section 4 (429).
"""

import asyncio
import time
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localpaged.server.error_response import error_response
from localpaged.server.sound_json import unsound

ANSWER_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/messages",
        "/api/chat",
        "/api/generate",
    }
)
IMPORT_PATH = "/api/import"
RETRY_AFTER_S = 5
# A body that drips in would hold its place for as long as it likes.
MIN_BYTES_PER_S = 500


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """max_body_bytes of one request; body_timeout_s between two pieces of it, and for all of them.

    Every MIN_BYTES_PER_S of a body that have come give it another second.

    max_requests: for answers of the APIs, running and waiting together; the page's are one a conversation
    """

    max_body_bytes: int = 32 << 20
    body_timeout_s: float = 30.0
    max_requests: int = 256


class Gate:
    """num_requests: for answers of the APIs, running and waiting. stopping: nothing that begins is let in."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.stopping = False


class LimitsMiddleware:
    """Answers 413, 408, 429, 400 for JSON that cannot be kept and, while the server stops, 503 itself.

    Other requests pass.
    """

    def __init__(self, app: ASGIApp, limits: RequestLimits, gate: Gate) -> None:
        self.app = app
        self.limits = limits
        self.gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        gate, path = self.gate, scope["path"]
        if gate.stopping and scope["method"] not in ("GET", "HEAD", "OPTIONS") and not path.endswith("/stop"):
            told = "The server is stopping. Send it again when it is back."
            await _come_back(error_response(path, 503, "stopping", told))(scope, receive, send)
            return
        if scope["method"] != "POST" or path not in ANSWER_PATHS:
            await self._within_size(scope, receive, send)
            return
        if gate.num_requests >= self.limits.max_requests:
            told = f"The server is busy with {gate.num_requests} requests. Try again in {RETRY_AFTER_S} seconds."
            await _come_back(error_response(path, 429, "overloaded", told))(scope, receive, send)
            return
        gate.num_requests += 1
        try:
            await self._within_size(scope, receive, send)
        finally:
            gate.num_requests -= 1

    async def _within_size(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the whole body first: frameworks take what a body's reading raises for a body that is wrong."""
        limits, path = self.limits, scope["path"]
        declared = Headers(scope=scope).get("content-length", "0")
        num_bytes = int(declared) if declared.isdigit() else 0
        pieces: list[bytes] = []
        num_come, begun_at = 0, time.monotonic()
        while num_bytes <= limits.max_body_bytes:
            left_s = limits.body_timeout_s + num_come / MIN_BYTES_PER_S - (time.monotonic() - begun_at)
            try:
                message = await asyncio.wait_for(receive(), min(limits.body_timeout_s, left_s))
            except TimeoutError:
                told = (
                    f"Nothing more of the body came for {limits.body_timeout_s:g} s, or fewer than {MIN_BYTES_PER_S} "
                    "bytes a second. Send it again."
                )
                await error_response(path, 408, "request_timeout", told)(scope, receive, send)
                return
            if message["type"] == "http.disconnect":
                return
            pieces.append(message.get("body", b""))
            num_come += len(pieces[-1])
            num_bytes = max(num_bytes, num_come)
            if not message.get("more_body", False):
                break
        if num_bytes > limits.max_body_bytes:
            told = (
                f"The request's body is larger than {limits.max_body_bytes:,} bytes. Send less, or start the server "
                "with a larger --max-request-bytes."
            )
            await error_response(path, 413, "request_too_large", told)(scope, receive, send)
            return
        whole_body = b"".join(pieces)
        # Files that are imported are read by those who know them.
        if path != IMPORT_PATH and (wrong := unsound(whole_body)) is not None:
            await error_response(path, 400, "invalid_request", wrong)(scope, receive, send)
            return
        body: Message | None = {"type": "http.request", "body": whole_body, "more_body": False}

        async def receive_again() -> Message:
            nonlocal body
            if body is None:
                return await receive()
            whole, body = body, None
            return whole

        await self.app(scope, receive_again, send)


def _come_back(response: Response) -> Response:
    response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response
