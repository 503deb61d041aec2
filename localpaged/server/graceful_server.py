"""The HTTP server's life: it says where it is once it listens, and stops without losing what runs.

At SIGTERM or Ctrl-C it takes no new work, lets what runs come to its end for a while, and then parks the rest: their
text so far is stored, and their KV kept, so that they can be continued. A second signal does not wait.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from socket import socket

import uvicorn
from fastapi import FastAPI

from localpaged.errors import ModelError
from localpaged.server.connection import bounded
from localpaged.server.jobs import JobManager
from localpaged.server.limits import Gate

POLL_S = 0.05
# For connections that have no work: pages that listen for what is new.
CLOSE_TIMEOUT_S = 1


class GracefulServer(uvicorn.Server):
    """announce: awaited once it listens; it ends the server when it raises ModelError.

    head_timeout_s: for the head of a request.
    """

    def __init__(
        self,
        app: FastAPI,
        announce: Callable[[], Awaitable[None]],
        stop_timeout_s: float,
        head_timeout_s: float = 30.0,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=bounded(head_timeout_s),
            log_config=None,
            log_level="warning",
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
            server_header=False,
            ws="none",
        )
        super().__init__(config)
        self._gate: Gate = app.state.gate
        self._jobs: JobManager = app.state.jobs
        self._announce = announce
        self._announcing: asyncio.Task[None] | None = None
        self._stop_timeout_s = stop_timeout_s

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announcing = asyncio.create_task(self._tell())

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        self._gate.stopping = True
        for server in self.servers:
            server.close()
        deadline = time.monotonic() + self._stop_timeout_s
        if self._num_running:
            # Where this goes to a file on a full disk it is not said; the server stops all the same.
            with contextlib.suppress(OSError):
                told = (
                    f"Stopping, when {self._num_running} running requests have ended, or in {self._stop_timeout_s:g} s"
                )
                print(told, flush=True)
        while self._num_running and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(POLL_S)
        await super().shutdown(sockets)

    @property
    def _num_running(self) -> int:
        return self._gate.num_requests + len(self._jobs.running_conversations())

    async def _tell(self) -> None:
        try:
            await self._announce()
        except ModelError:
            self.should_exit = True
