"""The server's handle on one engine process: start, generate, cancel, audit; it starts a dead one again."""

import asyncio
import contextlib
import itertools
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import msgspec

from localpaged.engine.config import EngineConfig
from localpaged.engine.features import Features
from localpaged.engine.messages import (
    AskEstimate,
    AskResidency,
    AskStats,
    Cancel,
    ChooseLease,
    Command,
    DropLeases,
    Estimate,
    Estimated,
    Event,
    Failed,
    Finished,
    Generate,
    ModelInfo,
    PinConversation,
    Ready,
    Reply,
    Residencies,
    Residency,
    Shutdown,
    StartFailed,
    Stats,
    Warm,
)
from localpaged.engine.prompt import Prompt
from localpaged.engine.sampling_params import SamplingParams
from localpaged.engine.wire import HEADER, decode_replies, encode
from localpaged.errors import EngineDeadError, ModelError

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


class EngineClient:
    """One engine process. All methods belong to the event loop that called start()."""

    features = Features()

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.info: ModelInfo | None = None
        self.state: Literal["starting", "ready", "dead", "stopped"] = "stopped"
        self.start_error: str | None = None
        self.num_restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._launched: socket.socket | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._events: dict[str, asyncio.Queue[Event]] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()
        # A process that is started again is told anew.
        self._pinned: set[str] = set()
        self._drops: list[DropLeases] = []

    @property
    def pid(self) -> int | None:
        """The process's id while there is one."""
        return self._process.pid if self._process is not None else None

    def launch(self) -> None:
        """Start the process without an event loop; start() takes it over. Saves the time until then."""
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "localpaged.engine.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.close()
        body = msgspec.msgpack.encode(self.config)
        ours.sendall(HEADER.pack(len(body)) + body)
        self._launched = ours

    async def start(self) -> None:
        """Launch the process; returns at once. wait_ready() tells when the model is loaded."""
        if self.state in ("starting", "ready"):
            return
        self.state, self.start_error = "starting", None
        self._settled.clear()
        if self._launched is None:
            self.launch()
        ours, self._launched = self._launched, None
        assert self._process is not None
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader, self._process))

    async def restart_if_dead(self) -> None:
        """Start a process that has ended again; returns at once."""
        if self.state == "dead":
            self.num_restarts += 1
            await self.start()

    async def wait_ready(self) -> ModelInfo:
        """Wait for the model. Raises ModelError with the child's message when it cannot be loaded."""
        await self._settled.wait()
        if self.info is None or self.state != "ready":
            raise ModelError(self.start_error or "The engine is stopped.")
        return self.info

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        conversation: str | None = None,
        lease_ids: list[str] | None = None,
        goes_on: bool = False,
        embeds: bool = False,
    ) -> AsyncIterator[Event]:
        """Submit one request and yield its events until Finished or Failed; what is not said here is as in Generate.

        prompt: token ids, since there is a tokenizer to make them with.
        Restarts a dead process first. When the process dies under the request the last event is
        Failed with code "engine_dead". Closing the iterator early cancels the request.
        """
        assert isinstance(prompt, list)
        request_id = request_id or f"request-{next(self._ids)}"
        try:
            await self.restart_if_dead()
            await self.wait_ready()
        except ModelError as error:
            yield Failed(request_id=request_id, code=error.code, message=str(error))
            return
        events: asyncio.Queue[Event] = asyncio.Queue()
        self._events[request_id] = events
        ended = False
        try:
            self._send(
                Generate(
                    request_id=request_id,
                    prompt_token_ids=prompt,
                    params=params,
                    conversation=conversation,
                    lease_ids=lease_ids or [],
                    goes_on=goes_on,
                    embeds=embeds,
                )
            )
            while not ended:
                event = await events.get()
                ended = isinstance(event, Finished | Failed)
                yield event
        finally:
            self._events.pop(request_id, None)
            if not ended and self.state == "ready":
                self._send(Cancel(request_id))

    async def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its candidates, within one step. Unknown ids are ignored."""
        if self.state == "ready":
            self._send(Cancel(request_id, index))

    def choose_lease(self, lease_id: str) -> None:
        """Say which answer its conversation goes on from. Without an engine there is nothing to say."""
        if self.state == "ready":
            self._send(ChooseLease(lease_id))

    def pin(self, conversation: str, pinned: bool) -> None:
        """Let a conversation's KV be the last to go, or no longer; an engine that starts later is told too."""
        (self._pinned.add if pinned else self._pinned.discard)(conversation)
        if self.state == "ready":
            self._send(PinConversation(conversation, pinned))

    def drop_leases(self, conversation: str | None = None, lease_ids: list[str] | None = None) -> None:
        """Forget the KV of some answers, of a conversation, or with neither of all of them.

        What an engine that is not there has on disk is forgotten when it is.
        """
        command = DropLeases(lease_ids=lease_ids, conversation=conversation)
        if self.state == "ready":
            self._send(command)
        else:
            self._drops.append(command)

    def warm(self, conversation: str, token_ids: list[int]) -> None:
        """Bring a conversation's KV in from disk while its next message is written."""
        if self.state == "ready":
            self._send(Warm(conversation, token_ids))

    async def residency(self) -> list[Residency]:
        """What each conversation's KV holds, the latest used first. Empty when there is no engine."""
        if self.state != "ready":
            return []
        values: list[Residency] = await self._call(AskResidency)
        return values

    async def estimate(
        self, token_ids: list[int], conversation: str | None, n: int, max_tokens: int | None
    ) -> Estimate:
        """What a turn would cost. Raises EngineDeadError when there is no engine to ask."""
        value: Estimate = await self._call(
            AskEstimate, token_ids=token_ids, conversation=conversation, n=n, max_tokens=max_tokens
        )
        return value

    async def stats(self) -> dict[str, int | float | str | bool]:
        """The pool's audit: block_size, num_blocks, free, cached, referenced, shared, waste_tokens, ...

        Raises EngineDeadError when there is no engine to ask.
        """
        values: dict[str, int | float | str | bool] = await self._call(AskStats)
        return values

    async def _call(self, kind: Callable[..., Command], **fields: Any) -> Any:
        if self.state != "ready":
            raise EngineDeadError(self.start_error or f"The engine is {self.state}.")
        call_id = next(self._ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(kind(call_id=call_id, **fields))
        return await answer

    async def stop(self) -> None:
        """End the process and wait for it."""
        process, reading = self._process, self._reading
        self.state = "stopped"
        self._settled.set()
        if self._writer is not None:
            with contextlib.suppress(ConnectionError):
                self._send(Shutdown())
                await self._writer.drain()
        if process is not None:
            try:
                await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        if reading is not None:
            await reading
        self._process = None

    def kill(self) -> None:
        """End the process at once, where no event loop is left to stop() it in."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _send(self, command: Command) -> None:
        # Without a writer the process has just ended, and _on_end() tells everyone who waits.
        if self._writer is not None:
            self._writer.write(encode([command]))

    async def _read(self, reader: asyncio.StreamReader, process: "subprocess.Popen[bytes]") -> None:
        try:
            while True:
                header = await reader.readexactly(HEADER.size)
                for reply in decode_replies(await reader.readexactly(HEADER.unpack(header)[0])):
                    self._deliver(reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
            self._writer = None
        code = await asyncio.to_thread(process.wait)
        self._on_end(code)

    def _deliver(self, reply: Reply) -> None:
        if isinstance(reply, Ready):
            self.info, self.state = reply.info, "ready"
            for conversation in self._pinned:
                self.pin(conversation, True)
            for drop in self._drops:
                self._send(drop)
            self._drops.clear()
            self._settled.set()
        elif isinstance(reply, StartFailed):
            self.start_error = reply.message
        elif isinstance(reply, Stats | Residencies):
            self._answer(reply.call_id, reply.values)
        elif isinstance(reply, Estimated):
            self._answer(reply.call_id, reply.value)
        elif reply.request_id in self._events:
            self._events[reply.request_id].put_nowait(reply)

    def _answer(self, call_id: int, value: Any) -> None:
        answer = self._calls.pop(call_id, None)
        if answer is not None and not answer.done():
            answer.set_result(value)

    def _on_end(self, code: int) -> None:
        """The process has ended: fail what was running, and leave the rest to the next message."""
        message = (
            "The engine process was killed (out of memory, or by hand)"
            if code < 0
            else f"The engine process ended with exit code {code}"
        ) + ". What was shown is kept; send the message again and the model is loaded anew."
        if self.state != "stopped":
            logger.error("%s", self.start_error or message)
            self.start_error = self.start_error or message
            self.state = "dead"
        for request_id, events in self._events.items():
            events.put_nowait(Failed(request_id=request_id, code=EngineDeadError.code, message=message))
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(message))
        self._calls.clear()
        self._settled.set()
