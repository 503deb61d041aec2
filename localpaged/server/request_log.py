"""Gives every request an id, which its answer carries and its log lines have, and writes a line when it ends.

A client's own X-Request-ID is taken where it is plain. Only the path is logged: no query, no header, no body.
"""

import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localpaged.log import REQUEST_ID, REQUESTS

logger = logging.getLogger(REQUESTS)

HEADER = "X-Request-ID"
PLAIN = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Asked for all the time by programs and by the page itself.
QUIET = ("/health", "/metrics", "/static/", "/assets/", "/gradio_api/")


class RequestLogMiddleware:
    """Outermost, so that what is refused is logged too."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if PLAIN.fullmatch(given) else secrets.token_hex(8)
        token = REQUEST_ID.set(request_id)
        begun_at, status, num_bytes, ended = time.perf_counter(), 0, 0, False

        async def noted(message: Message) -> None:
            nonlocal status, num_bytes, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            elif message["type"] == "http.response.body":
                num_bytes += len(message.get("body", b""))
                ended = not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            fields = {
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(time.perf_counter() - begun_at, 4),
                "bytes": num_bytes,
                "client": (scope.get("client") or ("",))[0],
            }
            if user := scope.get("state", {}).get("user"):
                fields["user"] = user
            if not ended:
                fields["cut_off"] = True
            quiet = scope["path"].startswith(QUIET) and status < 400
            logger.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})
            REQUEST_ID.reset(token)
