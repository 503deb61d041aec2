"""Who may talk to the server, and what its pages may do.

Refuses foreign Host names (DNS rebinding), requests that other sites' pages send (Origin and fetch
metadata), and, where an API key is set, whoever does not have it. Every page gets a Content-Security-
Policy whose scripts carry a nonce, so that markup inside a message cannot run anything.
Sources: https://www.w3.org/TR/CSP3/, https://web.dev/articles/fetch-metadata, RFC 6454.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localpaged.errors import SettingError
from localpaged.server.error_response import error_response

COOKIE = "localpaged_session"
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


def check_bind(host: str, api_key: str | None) -> None:
    """Refuse to listen beyond this machine without a key. Raises SettingError."""
    if not is_loopback(host) and not api_key:
        raise SettingError(
            f"The address {host} can be reached from other machines. Set a key with --api-key (or"
            " LOCALPAGED_API_KEY), or leave --host at 127.0.0.1."
        )


def is_loopback(host: str) -> bool:
    """Whether a host name or address stays on this machine."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """Which names the server answers to, which other sites' pages may call it, and its key."""

    bind_host: str = "127.0.0.1"
    api_key: str | None = None
    allowed_hosts: frozenset[str] = frozenset()
    allowed_origins: frozenset[str] = frozenset()

    def allows_host(self, header: str | None) -> bool:
        name = _host_name(header or "")
        if is_loopback(name) or name in {host.lower() for host in self.allowed_hosts}:
            return True
        if is_loopback(self.bind_host):
            return False
        # Reachable from outside: an address cannot be rebound by DNS, a name must be known.
        return name == self.bind_host.lower() or _is_address(name)

    def allows_origin(self, origin: str, host: str | None) -> bool:
        if origin in self.allowed_origins:
            return True
        return origin != "null" and urlsplit(origin).netloc.lower() == (host or "").lower()

    def session(self) -> str:
        """What a logged-in browser's cookie holds: derived from the key, without giving it away."""
        return hmac.new((self.api_key or "").encode(), b"localpaged session 1", hashlib.sha256).hexdigest()

    def key_is_right(self, key: str) -> bool:
        return self.api_key is None or hmac.compare_digest(key.encode(), self.api_key.encode())

    def knows(self, headers: Headers) -> bool:
        """Whether a request carries the key or a session made from it."""
        if self.api_key is None:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.key_is_right(token.strip()):
            return True
        # As Anthropic's API has it.
        if (key := headers.get("x-api-key")) is not None and self.key_is_right(key.strip()):
            return True
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return morsel is not None and hmac.compare_digest(morsel.value.encode(), self.session().encode())


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
        if scope["method"] == "OPTIONS" or path in OPEN_PATHS or self.access.knows(headers):
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


def _host_name(header: str) -> str:
    """The name of a Host header, without its port."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@]+)(?::\d+)?", header)
    return match.group(1).lower().rstrip(".") if match else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
