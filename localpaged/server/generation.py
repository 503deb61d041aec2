"""What the HTTP APIs share of a request's way through the engine: its events, its errors, and a client that goes away.

Knows nothing of how an API writes its answers.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from localpaged.engine.messages import Admitted, Delta, Event, Failed, Finished, Prefilled
from localpaged.errors import (
    EngineDeadError,
    FeatureAbsentError,
    InvalidRequestError,
    LocalpagedError,
    ModelError,
    PromptTooLongError,
    RemoteAwayError,
    RemoteBusyError,
    RemoteError,
)

T = TypeVar("T")

WITH_FIELD = {kind.code: kind for kind in (InvalidRequestError, PromptTooLongError, FeatureAbsentError)}
WITHOUT_FIELD = {
    kind.code: kind for kind in (RemoteError, RemoteAwayError, RemoteBusyError, ModelError, EngineDeadError)
}

CLIENT_CLOSED = 499
TAKEN = "localpaged.taken"  # in a request's scope: the events of its answer


class ClientGoneError(Exception):
    """The client went away before its request's turn came; nobody reads an answer."""


class AnswerStream(StreamingResponse):
    """A stream of what taken() took, which is closed with it, whatever ended it: what still runs is cancelled."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # A client that went away in the middle of a piece leaves generators that wait to be asked for the next.
            for source in (self.body_iterator, scope.get(TAKEN)):
                if isinstance(source, AsyncGenerator):
                    await source.aclose()


@dataclass(slots=True)
class Answer:
    """The one answer of a request as it grows: its text, its end, its counts, and when (ns, of a monotonic clock).

    A count is None where a remote engine was not told it.
    """

    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int | None = 0
    num_cached_tokens: int | None = 0
    num_generated_tokens: int | None = 0
    begun_at_ns: int = field(default_factory=time.perf_counter_ns)
    prefilled_at_ns: int | None = None
    ended_at_ns: int | None = None

    def take(self, event: Event) -> str:
        """Note an event; returns the text that it brings. Raises what a Failed one stands for."""
        if isinstance(event, Failed):
            raise as_error(event)
        if isinstance(event, Delta):
            self.text += event.text
            if event.token_ids:
                self.num_generated_tokens = (self.num_generated_tokens or 0) + len(event.token_ids)
            if event.text and self.prefilled_at_ns is None:
                # Of another server's prefill this alone is told, that a first word comes after it.
                self.prefilled_at_ns = time.perf_counter_ns()
            if event.finish_reason is not None:
                self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
            return event.text
        self.num_prompt_tokens = event.num_prompt_tokens
        if isinstance(event, Admitted | Finished):
            self.num_cached_tokens = event.num_cached_tokens
        if isinstance(event, Finished):
            self.num_generated_tokens = event.num_generated_tokens
            self.ended_at_ns = time.perf_counter_ns()
        # A request that was put aside for others is computed again later; that is no longer its prompt.
        if isinstance(event, Prefilled) and not self.num_generated_tokens:
            self.prefilled_at_ns = time.perf_counter_ns()
        return ""


async def whole(events: AsyncIterator[tuple[int, Event]], answer: Answer) -> Answer:
    """Read all events of one request into its answer. Raises what a Failed one stands for."""
    async for _, event in events:
        answer.take(event)
    return answer


def as_error(event: Failed) -> LocalpagedError:
    """The exception that a Failed event stands for, so that it gets its status code."""
    if event.code in WITH_FIELD:
        return WITH_FIELD[event.code](event.message, event.param)
    if event.code in WITHOUT_FIELD:
        return WITHOUT_FIELD[event.code](event.message)
    error = LocalpagedError(event.message)
    error.code = event.code
    return error


async def merge(streams: list[AsyncIterator[Event]]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of several requests as they come, each with the number of its request.

    Closing this closes all of them, which cancels what still runs.
    """
    merged: asyncio.Queue[tuple[int, Event | None]] = asyncio.Queue()

    async def forward(index: int, events: AsyncIterator[Event]) -> None:
        try:
            async for event in events:
                merged.put_nowait((index, event))
        finally:
            await events.aclose()  # type: ignore[attr-defined]
            merged.put_nowait((index, None))

    tasks = [asyncio.create_task(forward(index, events)) for index, events in enumerate(streams)]
    try:
        open_streams = len(tasks)
        while open_streams:
            index, event = await merged.get()
            if event is None:
                open_streams -= 1
            else:
                yield index, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gathered(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same bytes in fewer pieces: what is there at one moment, such as the tokens of one step, goes out as one.

    Closing this closes the chunks.
    """
    waiting: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def forward() -> None:
        try:
            async for chunk in chunks:
                waiting.put_nowait(chunk)
        finally:
            await chunks.aclose()
            waiting.put_nowait(None)

    task = asyncio.create_task(forward())
    ended = False
    try:
        while not ended:
            pieces = [await waiting.get()]
            while not waiting.empty():
                pieces.append(waiting.get_nowait())
            ended = pieces[-1] is None
            if body := b"".join(piece for piece in pieces if piece is not None):
                yield body
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def taken(request: Request, events: AsyncGenerator[tuple[int, Event], None]) -> AsyncIterator[tuple[int, Event]]:
    """The events, once the first of them tells that the engine takes the request.

    Until then there is still a status code to refuse it with: raises what a Failed event stands for, and
    ClientGoneError where the client did not wait for its turn. An AnswerStream closes them.
    """
    request.scope[TAKEN] = events
    begun = await while_connected(request, anext(events))
    if begun is None:
        await events.aclose()
        raise ClientGoneError
    index, first = begun
    if isinstance(first, Failed):
        await events.aclose()
        raise as_error(first)
    return _resume(index, first, events)


async def _resume(index: int, first: Event, rest: AsyncIterator[tuple[int, Event]]) -> AsyncIterator[tuple[int, Event]]:
    """The rest of a stream with its first event put back."""
    yield index, first
    async for item in rest:
        yield item


async def while_connected(request: Request, work: Awaitable[T]) -> T | None:
    """Do the work, or drop it when the client goes away first (None)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
