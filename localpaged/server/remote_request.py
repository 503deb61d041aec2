"""One request's candidates on their way from another server: asked for, counted, stopped, and told as events.

Several are asked for in one request where the server takes n, and else in one request each.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from localpaged.engine.messages import Admitted, Delta, Event, Failed, Finished
from localpaged.engine.prompt import Prompt
from localpaged.engine.sampling_params import SamplingParams
from localpaged.errors import InvalidRequestError, LocalpagedError, PromptTooLongError, RemoteError
from localpaged.server.remote_body import Quirks, body_of, path_of
from localpaged.server.remote_candidate import RemoteCandidate
from localpaged.server.remote_client import RefusedError, RemoteClient
from localpaged.server.remote_vocabulary import RemoteVocabulary

# How servers say that a prompt does not fit: OpenAI's code, vLLM's and SGLang's words.
TOO_LONG = ("context_length_exceeded", "maximum context length", "context length", "maximum model length")


class RemoteRequest:
    """One request. Its events are read once; cancel() may be called meanwhile, from the same event loop.

    One of several candidates that share a request to the server is stopped by hearing it no further: the server
    writes on until all of them have ended or are stopped, and then the connection is closed. One with a request of its
    own stops at once. A candidate that fails lets the others go on; Failed comes when they have ended.
    """

    def __init__(
        self,
        client: RemoteClient,
        quirks: Quirks,
        vocabulary: RemoteVocabulary,
        model: str,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
    ) -> None:
        self._client = client
        self._quirks = quirks
        self._model = model
        self._prompt = prompt
        self._params = params
        self._id = request_id
        self.candidates = [RemoteCandidate(request_id, index, vocabulary) for index in range(params.n)]
        self.num_prompt_tokens: int | None = None
        self.num_cached_tokens: int | None = None
        self._num_generated_tokens: int | None = None  # of one request for all, by the server's sum
        self.error: LocalpagedError | None = None
        self._admitted = False
        self._alone: dict[int, asyncio.Task[None]] = {}
        self._driving: asyncio.Task[None] | None = None
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()

    async def events(self) -> AsyncIterator[Event]:
        """Ask, and yield what comes; Finished or Failed is last. Closing this closes the connections."""
        driving = self._driving = asyncio.create_task(self._drive())
        driving.add_done_callback(lambda _: self._queue.put_nowait(None))
        try:
            while (event := await self._queue.get()) is not None:
                yield event
            if not driving.cancelled():
                driving.result()
            yield self._last()
        finally:
            tasks = [driving, *self._alone.values()]
            for task in tasks:
                _cancel_once(task)
            await asyncio.wait(tasks)

    def cancel(self, index: int | None = None) -> None:
        """End all candidates, or one. What they have stays."""
        for candidate in self.candidates:
            if candidate.index == index or index is None:
                self._tell(candidate.end("cancelled"))
                if candidate.index in self._alone:
                    _cancel_once(self._alone[candidate.index])
        if self._driving is not None and not self._open():
            _cancel_once(self._driving)

    @property
    def num_running(self) -> int:
        return len(self._open())

    def _open(self) -> list[RemoteCandidate]:
        return [candidate for candidate in self.candidates if not candidate.ended]

    @property
    def num_generated_tokens(self) -> int | None:
        """Of all candidates: the server's own sum, or else that of each; None when it was not told."""
        if self._num_generated_tokens is not None and not self._alone:
            return self._num_generated_tokens
        counts = [candidate.num_tokens for candidate in self.candidates]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def _last(self) -> Event:
        if self.error is not None:
            param = getattr(self.error, "param", None)
            return Failed(request_id=self._id, code=self.error.code, message=str(self.error), param=param)
        return Finished(
            request_id=self._id,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
        )

    async def _drive(self) -> None:
        together = self._params.n > 1 and self._quirks.takes_n
        if together:
            try:
                await self._ask(self.candidates)
            except RefusedError as refusal:
                if is_too_long(refusal) or refusal.param not in (None, "n"):
                    self._fail(refusal)
        # What is left is what the server would not write in one request, or left out without a word.
        rest = [candidate for candidate in self._open() if not candidate.heard]
        if self.error is not None or not rest:
            return
        self._alone = {candidate.index: asyncio.create_task(self._ask_alone(candidate)) for candidate in rest}
        await asyncio.wait(self._alone.values())
        for task in self._alone.values():
            if not task.cancelled():
                task.result()
        # Some servers refuse n for greedy answers alone, which would all be the same.
        if together and self.error is None and not self._params.greedy:
            self._quirks.takes_n = False

    async def _ask_alone(self, candidate: RemoteCandidate) -> None:
        try:
            await self._ask([candidate])
        except RefusedError as refusal:
            self._fail(refusal)

    async def _ask(self, candidates: list[RemoteCandidate]) -> None:
        """Ask for candidates in one request, and hear them to their end. Raises RefusedError before any is heard."""
        indexes = [candidate.index for candidate in candidates]
        before = replace(self._quirks)
        while True:
            body = body_of(self._prompt, self._params, self._model, indexes, self._quirks)
            try:
                async with self._client.answering(path_of(self._prompt), body) as chunks:
                    self._admit()
                    await self._hear(candidates, chunks)
                return
            except RefusedError as refusal:
                if not self._quirks.learn(refusal):
                    # It was about something else: what was taken for the reason is not.
                    vars(self._quirks).update(vars(before))
                    raise
            except LocalpagedError as error:
                if not all(candidate.complete for candidate in candidates):
                    self._fail(error)
                return
            finally:
                for candidate in candidates:
                    self._tell(candidate.release())

    async def _hear(self, candidates: list[RemoteCandidate], chunks: AsyncIterator[dict[str, Any]]) -> None:
        try:
            async for chunk in chunks:
                self._take(candidates, chunk)
        except (KeyError, TypeError, AttributeError) as error:
            raise RemoteError(f"The server at {self._client.address} sent what is no chunk of an answer.") from error
        heard = [candidate for candidate in candidates if candidate.heard]
        if not heard or any(not candidate.complete for candidate in heard):
            raise RemoteError(
                f"The answer of the server at {self._client.address} ended before its end: the connection closed, or "
                "it stopped. What came is kept; send again."
            )
        for candidate in heard:
            if candidate.strange_end is not None:
                self._fail(RemoteError(f"The server at {self._client.address} ended with {candidate.strange_end!r}."))

    def _take(self, candidates: list[RemoteCandidate], chunk: dict[str, Any]) -> None:
        usage = chunk.get("usage") or {}
        choices = chunk.get("choices") or []
        alone = len(candidates) == 1
        for choice in choices:
            place = choice.get("index") or 0
            if 0 <= place < len(candidates):
                candidate = candidates[place]
                # A running count comes from the beginning on; a sum of all candidates may come with a last chunk.
                running = len(choices) == 1 and (candidate.counts or not choice.get("finish_reason"))
                count = usage.get("completion_tokens") if alone or running else None
                self._tell(candidate.take(choice, count, holds_end=alone))
        if usage:
            self._count(usage)
            if alone:
                candidates[0].count(usage.get("completion_tokens"))
            elif not choices:
                self._num_generated_tokens = _whole(usage.get("completion_tokens"))

    def _count(self, usage: dict[str, Any]) -> None:
        """A prompt counts once, however many requests it was sent in; of it is cached what was in each."""
        self.num_prompt_tokens = _whole(usage.get("prompt_tokens"), self.num_prompt_tokens)
        cached = _whole((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
        if cached is not None:
            self.num_cached_tokens = cached if self.num_cached_tokens is None else min(cached, self.num_cached_tokens)

    def _admit(self) -> None:
        if not self._admitted:
            self._admitted = True
            self._queue.put_nowait(Admitted(request_id=self._id, num_prompt_tokens=None, num_cached_tokens=None))

    def _fail(self, error: LocalpagedError) -> None:
        """Note the first failure; it is told last."""
        if isinstance(error, RefusedError):
            error = _as_ours(error, self._client.address)
        self.error = self.error or error

    def _tell(self, event: Delta | None) -> None:
        if event is not None:
            self._queue.put_nowait(event)


def _cancel_once(task: asyncio.Task[None]) -> None:
    """A second time would interrupt the closing of its connection."""
    if not task.cancelling():
        task.cancel()


def _whole(value: Any, otherwise: int | None = None) -> int | None:
    return value if isinstance(value, int) else otherwise


def is_too_long(refusal: RefusedError) -> bool:
    """Whether it is the prompt that does not fit."""
    text = f"{refusal.code} {refusal}".lower()
    return any(words in text for words in TOO_LONG)


def _as_ours(refusal: RefusedError, address: str) -> InvalidRequestError:
    """The server's refusal in its own words, with the field that it names."""
    said = f"The server at {address} refuses the request: {refusal}"
    if is_too_long(refusal):
        return PromptTooLongError(f"{said} Shorten it, lower the longest answer, or start a new conversation.")
    param = refusal.param or next((name for name in SENT_NAMES if name in str(refusal)), None)
    return InvalidRequestError(said, param)


# Longest first: some names are in others.
SENT_NAMES = sorted(SamplingParams.__struct_fields__[1:], key=len, reverse=True)
