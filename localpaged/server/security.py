"""Who may talk to the server, and what its pages may do.

Refuses foreign Host names (DNS rebinding), requests that other sites' pages send (Origin and fetch
metadata), and, where an API key is set, whoever does not have it. Every page gets a Content-Security-
Policy whose scripts carry a nonce, so that markup inside a message cannot run anything.
Sources: https://www.w3.org/TR/CSP3/, https://web.dev/articles/fetch-metadata, RFC 6454.
"""

import re
import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localpaged.errors import SettingError
from localpaged.server.access import Access
from localpaged.server.error_response import error_response

OPEN_PATHS = {"/health", "/login", "/favicon.ico", "/static/localpaged/favicon.svg"}
SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}

POLICY = (
    # Gradio compiles its components' code at run time (unsafe-eval) and writes style attributes.
    "default-src 'none'; script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; media-src 'self' blob:; "
    "worker-src 'self' blob:; manifest-src 'self'; form-action 'self'; base-uri 'self'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not no-referrer: browsers would send our own forms with "Origin: null".
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


class SecurityMiddleware:
    """Lets a request through, or answers it with the reason; adds the headers to every response."""

    def __init__(self, app: ASGIApp, access: Access, page_head: str = "", page_body: str = "") -> None:
        self.app = app
        self.access = access
        self._page = _Page(page_head, page_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        nonce = secrets.token_urlsafe(18)
        send = self._with_headers(send, nonce)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        if scope["path"] not in OPEN_PATHS and "text/html" in headers.get("accept", ""):
            # The page is rewritten on its way out, so it must not arrive compressed.
            scope = {**scope, "headers": _without(scope["headers"], b"accept-encoding")}
            send = self._page.rewriting(send, nonce)
        await self.app(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> ASGIApp | None:
        path = scope["path"]
        if not self.access.allows_host(headers.get("host")):
            return error_response(
                path,
                400,
                "host",
                f"This server does not answer to the name {headers.get('host')!r}. Use its address,"
                " or allow the name with --allowed-host.",
            )
        if self._comes_from_another_site(scope["method"], headers):
            return error_response(
                path,
                403,
                "origin",
                "A page of another site sent this request. Open localpaged's own address, or allow"
                " that site with --allowed-origin.",
            )
        if scope["method"] == "OPTIONS" or path in OPEN_PATHS:
            return None
        try:
            user = self.access.user_of(headers)
        except SettingError as error:
            return error_response(path, 503, error.code, str(error))
        if user is not None:
            scope.setdefault("state", {})["user"] = user
            return None
        if scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            return RedirectResponse("/login", status_code=303)
        return error_response(
            path,
            401,
            "invalid_api_key",
            "An API key is needed. Send it as 'Authorization: Bearer …' or 'x-api-key: …', or log in with a browser.",
        )

    def _comes_from_another_site(self, method: str, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin in self.access.allowed_origins:
            return False
        navigation = method in SAFE_METHODS and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not navigation:
            return True
        changes = method not in SAFE_METHODS or "text/event-stream" in headers.get("accept", "")
        return changes and origin is not None and not self.access.allows_origin(origin, headers.get("host"))

    def _with_headers(self, send: Send, nonce: str) -> Send:
        async def wrapped(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers["Content-Security-Policy"] = POLICY.format(nonce=nonce)
                if headers.get("content-type", "").startswith("text/event-stream"):
                    headers["X-Accel-Buffering"] = "no"
            await send(message)

        return wrapped


class _Page:
    """Gradio's page made ours: nonces on its scripts, our own head, no pictures from elsewhere."""

    def __init__(self, head: str, body: str) -> None:
        self._head = head
        self._body = body

    def rewriting(self, send: Send, nonce: str) -> Send:
        start: Message | None = None
        body = b""

        async def wrapped(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                if not Headers(raw=message["headers"]).get("content-type", "").startswith("text/html"):
                    await send(message)
                    return
                start = message
                return
            if start is None or message["type"] != "http.response.body":
                await send(message)
                return
            body += message.get("body", b"")
            if message.get("more_body"):
                return
            page = self.rewrite(body.decode(), nonce).encode()
            MutableHeaders(scope=start)["content-length"] = str(len(page))
            await send(start)
            await send({"type": "http.response.body", "body": page})

        return wrapped

    def rewrite(self, page: str, nonce: str) -> str:
        page = re.sub(r'\s*<meta\s+(?:property="og:|name="twitter:)[^>]*>', "", page)
        page = page.replace("</head>", f"{self._head}</head>", 1)
        page = re.sub(r"(<body[^>]*>)", lambda match: match.group(1) + self._body, page, count=1)
        return re.sub(r"<script(?=[\s>])", f'<script nonce="{nonce}"', page)


def _without(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[tuple[bytes, bytes]]:
    return [header for header in headers if header[0] != name]
