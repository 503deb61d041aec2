"""How long a connection may go without a whole request, and how soon a client that is gone is noticed.

uvicorn waits for the head of a request for ever. Who sends one slowly, or nothing, would keep a connection for as long
as they like (Slowloris).
Sources: RFC 9110, section 15.5.9 (408); https://man7.org/linux/man-pages/man7/tcp.7.html.
"""

import asyncio
import contextlib
import socket
from functools import partial
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

KEEPALIVE_IDLE_S = 60
KEEPALIVE_INTERVAL_S = 15
KEEPALIVE_PROBES = 4
# For a client that is there and does not read what it asked for: a stopped program, a suspended tab.
UNREAD_TIMEOUT_S = 300

TIMED_OUT = (
    b"HTTP/1.1 408 Request Timeout\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 37\r\n"
    b"Connection: close\r\n\r\nThe request's head did not come whole"
)


class BoundedConnection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP connection, closed when a request's head is not whole in time."""

    def __init__(self, *args: Any, head_timeout_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._has_head_part = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._has_head_part = True
            self._await_head()
        else:
            self._forget_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(error)

    def _await_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            loop = asyncio.get_running_loop()
            self._head_timer = loop.call_later(self._head_timeout_s, self._give_up)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer, self._has_head_part = None, False

    def _give_up(self) -> None:
        self._head_timer = None
        if self._has_head_part and not self.transport.is_closing():
            self.transport.write(TIMED_OUT)
        self.transport.close()


def bounded(head_timeout_s: float) -> Any:
    """What uvicorn makes its connections with."""
    return partial(BoundedConnection, head_timeout_s=head_timeout_s)


def notice_dead_peers(listener: socket.socket) -> None:
    """Let the kernel end the connections that a listener accepts when their clients are gone or read nothing.

    What a platform does not have is left as it is there.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", UNREAD_TIMEOUT_S * 1000),
    ):
        if (option := getattr(socket, name, None)) is not None:
            with contextlib.suppress(OSError):
                listener.setsockopt(socket.IPPROTO_TCP, option, value)
