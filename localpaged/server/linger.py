"""Lets a refusal arrive: what is answered before its body came whole is closed only when the rest of the body did.

A connection that is closed while the client still sends is reset, and the answer may be lost with it; a proxy then says
502. Source: RFC 9112, section 9.6.
"""

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PAUSE_S = 5.0
LINGER_S = 30.0


class LingerMiddleware:
    """Outermost, for refusals of every kind. The rest of the body is thrown away as it comes."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]} if scope["type"] == "http" else set()
        if not names & {b"content-length", b"transfer-encoding"}:
            await self.app(scope, receive, send)
            return
        is_whole = False

        async def watched() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole = is_whole or not message.get("more_body", False)
            return message

        async def lingering(message: Message) -> None:
            if is_whole or message["type"] != "http.response.body" or message.get("more_body", False):
                await send(message)
                return
            # All of the answer, but for its end.
            await send({**message, "more_body": True})
            deadline = time.monotonic() + LINGER_S
            while not is_whole and time.monotonic() < deadline:
                try:
                    await asyncio.wait_for(watched(), PAUSE_S)
                except TimeoutError:
                    break
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self.app(scope, watched, lingering)
