"""The generations that the server runs, whoever watches. A closed tab changes nothing.

Every step is written to the store before it is shown as saved: the user message before anything
runs, partial answers once a second, the ends at once.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from localpaged.engine.messages import Failed, Finished
from localpaged.engine.prompt import ChatPrompt, Prompt
from localpaged.engine.sampling_params import SamplingParams
from localpaged.errors import FeatureAbsentError, InvalidRequestError, LocalpagedError, StoreError
from localpaged.server.engine_handle import EngineHandle
from localpaged.server.history import (
    Tokenizer,
    beginning_of,
    branch_token_ids,
    build_prompt,
    chat_messages,
    record_span,
)
from localpaged.server.job import PACE_S, Job
from localpaged.store.message import Message, NotFoundError
from localpaged.store.store import Store

logger = logging.getLogger(__name__)

BUSY = "This conversation is still answering. Wait for it, or stop it first."


class ConversationBusyError(InvalidRequestError):
    """The conversation has a generation running."""

    code = "conversation_busy"


class JobManager:
    """Starts, stops and keeps jobs; one at a time in a conversation. Lives on one event loop."""

    def __init__(
        self,
        engine: EngineHandle,
        store: Store,
        tokenizer_provider: Callable[[], Tokenizer] | None,
        flush_s: float = 1.0,
        keep_s: float = 120.0,
    ) -> None:
        """tokenizer_provider: None for an engine that is given messages, not token ids."""
        self._engine = engine
        self._store = store
        self._chats = store.conversations
        self._tokenizer_provider = tokenizer_provider
        self._flush_s = flush_s
        self._keep_s = keep_s
        self._jobs: dict[str, Job] = {}
        self._running: dict[int, Job | None] = {}  # by conversation; None while a job is being made
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing = False

    def get(self, job_id: str) -> Job | None:
        """A job that runs, or ended a short while ago."""
        return self._jobs.get(job_id)

    def running_in(self, conversation_id: int) -> Job | None:
        return self._running.get(conversation_id)

    def check_free(self, conversation_id: int) -> None:
        """Raises ConversationBusyError while a conversation is answering, or about to."""
        if conversation_id in self._running:
            raise ConversationBusyError(BUSY, "conversation")

    def running_conversations(self) -> list[int]:
        return list(self._running)

    async def ask(self, conversation_id: int, parent: int | None, text: str, params: SamplingParams) -> Job:
        """Store a user message under an answer (or as a root) and start the answers to it."""
        if not text.strip():
            raise InvalidRequestError("The message is empty. Write something first.", "text")

        async def add() -> Message:
            user = await self._store.do(self._chats.add_user_message, conversation_id, parent, text)
            conversation = await self._store.do(self._chats.get, conversation_id)
            if not conversation.title:
                await self._store.do(self._chats.update, conversation_id, title=title_of(text))
            return user

        return await self._start(conversation_id, self._add_candidates(add, params), params)

    async def regenerate(self, user_message_id: int, params: SamplingParams, system_prompt: str | None = None) -> Job:
        """Start further answers to a user message, beside those it has. system_prompt: None is the conversation's."""
        user = await self._store.do(self._chats.message, user_message_id)
        if user.role != "user":
            raise InvalidRequestError("Only the answers to a user message can be regenerated.", "message")

        async def same() -> Message:
            return user

        made = self._add_candidates(same, params)
        return await self._start(user.conversation, made, params, system_prompt=system_prompt)

    async def continue_answer(self, message_id: int, params: SamplingParams) -> Job:
        """Write on where an answer was cut off or stopped; nothing that it has is computed again."""
        answer = await self._store.do(self._chats.message, message_id)
        parent = answer.parent
        if answer.role != "assistant" or parent is None:
            raise InvalidRequestError(
                "Only an answer can be continued. Give the id of one that was cut off.", "message"
            )
        if answer.state == "running" or answer.conversation in self._running:
            raise ConversationBusyError(BUSY, "conversation")
        if answer.finish_reason == "stop" or not answer.text:
            raise InvalidRequestError("This answer is complete. Ask for more in a message.", "message")
        if len(await self._store.do(self._chats.subtree, message_id)) > 1:
            raise InvalidRequestError("Messages follow this answer. Regenerate it, or ask for more.", "message")
        if not self._engine.features.continue_answer:
            raise FeatureAbsentError(
                "The server that answers cannot go on from an answer that has begun. Regenerate it, or ask for more.",
                "message",
            )
        self._check_room(branch_token_ids(await self._store.do(self._chats.path_to, message_id)))

        async def go_on() -> tuple[Message, list[Message]]:
            if self._tokenizer_provider is not None:
                tokenizer = await asyncio.to_thread(self._tokenizer_provider)
                answer.token_ids, answer.text = beginning_of(tokenizer, answer)
            answer.state, answer.finish_reason, answer.error = "running", None, None
            user = await self._store.do(self._chats.message, parent)
            await self._store.do(self._chats.choose, message_id)
            await self._store.do(self._chats.save_messages, [answer])
            return user, [answer]

        params = msgspec.structs.replace(params, n=1)
        return await self._start(answer.conversation, go_on(), params, goes_on=True)

    def _check_room(self, token_ids: list[int]) -> None:
        info = self._engine.info
        if info is not None and info.max_model_len is not None and len(token_ids) >= info.max_model_len:
            raise InvalidRequestError(
                f"The conversation fills the model's window of {info.max_model_len:,} tokens. Start a new one.",
                "message",
            )

    async def stop(self, job_id: str, indexes: list[int] | None = None) -> None:
        """End a job, or some of its candidates. What they wrote stays. Unknown jobs are ignored."""
        job = self._jobs.get(job_id)
        if job is None or job.done.is_set():
            return
        if not job.submitted:
            for candidate in job.candidates:
                if indexes is None or candidate.index in indexes:
                    candidate.end("complete", finish_reason="cancelled")
            if not any(candidate.running for candidate in job.candidates):
                self._tasks[job_id].cancel()
        elif indexes is None:
            await self._engine.cancel(job_id)
        else:
            for index in indexes:
                await self._engine.cancel(job_id, index)

    async def close(self) -> None:
        """Interrupt what runs; the text so far is stored, with one more try where the disk refuses."""
        self._closing = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _add_candidates(
        self, add_user: Callable[[], Awaitable[Message]], params: SamplingParams
    ) -> tuple[Message, list[Message]]:
        user = await add_user()
        model = self._engine.info.name if self._engine.info else None
        return user, await self._store.do(self._chats.add_candidates, user.id, params.n, model, _sampling_of(params))

    async def _start(
        self,
        conversation_id: int,
        messages: Coroutine[Any, Any, tuple[Message, list[Message]]],
        params: SamplingParams,
        goes_on: bool = False,
        system_prompt: str | None = None,
    ) -> Job:
        """Run a job on what `messages` makes: the user message and the answers to write."""
        if conversation_id in self._running:
            messages.close()
            raise ConversationBusyError(BUSY, "conversation")
        self._running[conversation_id] = None
        try:
            user, candidates = await messages
        except BaseException:
            del self._running[conversation_id]
            raise
        job = Job(uuid.uuid4().hex[:16], user, candidates, goes_on, system_prompt)
        self._jobs[job.id] = job
        self._running[conversation_id] = job
        self._tasks[job.id] = asyncio.create_task(self._run(job, params))
        return job

    async def _run(self, job: Job, params: SamplingParams) -> None:
        pace = asyncio.create_task(self._keep_up(job))
        try:
            await self._generate(job, params)
            _end_all(job, "complete", finish_reason="cancelled")
        except asyncio.CancelledError:
            _end_all(job, "interrupted")
        except LocalpagedError as error:
            _fail(job, error.code, str(error))
        except Exception:
            logger.exception("job %s failed", job.id)
            _fail(job, "internal", "The server failed while answering; its log says why. Try again.")
        pace.cancel()
        await asyncio.gather(pace, return_exceptions=True)
        try:
            await self._save_the_end(job)
        finally:
            job.phase = "done"
            job.log_progress()
            job.append({"type": "done", "error": job.error})
            job.done.set()
            del self._running[job.conversation_id]
            del self._tasks[job.id]
            asyncio.get_running_loop().call_later(self._keep_s, self._jobs.pop, job.id, None)

    async def _generate(self, job: Job, params: SamplingParams) -> None:
        await self._engine.restart_if_dead()
        if self._engine.state == "starting":
            job.set_phase("loading")
            await self._engine.wait_ready()
        prompt = await self._prompt(job)
        info = self._engine.info
        if info is not None:
            if isinstance(prompt, list) and info.max_model_len is not None:
                room = info.max_model_len - len(prompt)
                if params.max_tokens is None or 0 < room < params.max_tokens:
                    params = msgspec.structs.replace(params, max_tokens=max(room, 1))
            for candidate in job.candidates:
                candidate.message.model = info.name
        early_stops = [candidate.index for candidate in job.candidates if not candidate.running]
        job.begin()
        async for event in self._engine.generate(
            prompt,
            params,
            job.id,
            conversation=str(job.conversation_id),
            lease_ids=[lease_id_of(candidate.message.id) for candidate in job.candidates],
            goes_on=job.goes_on,
        ):
            if isinstance(event, Failed):
                if event.code != "cancelled":
                    _fail(job, event.code, event.message)
                return
            if isinstance(event, Finished):
                job.finish(event)
                return
            job.take(event)
            for index in early_stops:
                await self._engine.cancel(job.id, index)
            early_stops = []

    async def _prompt(self, job: Job) -> Prompt:
        """What the answers go on from, as the engine takes it; the ids of one that takes ids are stored first."""
        conversation = await self._store.do(self._chats.get, job.conversation_id)
        system_prompt = conversation.system_prompt if job.system_prompt is None else job.system_prompt
        path = await self._store.do(self._chats.path_to, job.user.id)
        begun = job.candidates[0].message if job.goes_on else None
        if self._tokenizer_provider is None:
            return ChatPrompt(chat_messages(system_prompt, path), begun.text if begun else "")
        tokenizer = await asyncio.to_thread(self._tokenizer_provider)
        prompt = await asyncio.to_thread(build_prompt, tokenizer, system_prompt, path)
        record_span(path[-1], path[:-1], prompt)
        await self._store.do(self._chats.save_messages, [path[-1]])
        return prompt.token_ids + (begun.token_ids if begun else [])

    async def _keep_up(self, job: Job) -> None:
        """Show what has gathered at a steady pace, and store it about once a second."""
        saved, waited_s, warned = (0, len(job.candidates)), 0.0, False
        while True:
            await asyncio.sleep(PACE_S)
            job.log_progress()
            waited_s += PACE_S
            # Characters too: the tokens of another server may be counted at the end, or never.
            size = sum(
                (candidate.timings.num_tokens or 0) + len(candidate.message.text) for candidate in job.candidates
            )
            state = (size, sum(candidate.running for candidate in job.candidates))
            an_answer_ended = state[1] < saved[1]
            if state == saved or (waited_s < self._flush_s and not an_answer_ended):
                continue
            waited_s, saved = 0.0, state
            try:
                await self._store.do(self._chats.save_messages, _copies(job))
                warned = False
            except StoreError as error:
                saved = (-1, state[1])
                if not warned:
                    job.append({"type": "unsaved", "message": str(error)})
                warned = True

    async def _save_the_end(self, job: Job) -> None:
        """Store every candidate; while the disk refuses, keep the text and try again."""
        messages = [candidate.message for candidate in job.candidates]
        empty = [message for message in messages if message.state in ("error", "interrupted")]
        empty = [message for message in empty if not message.text]
        superfluous = empty[1:] if len(empty) == len(messages) else empty
        warned = False
        while True:
            try:
                await self._store.do(self._chats.save_messages, messages)
                if superfluous:
                    await self._store.do(self._chats.delete_messages, [message.id for message in superfluous])
                return
            except StoreError as error:
                if self._closing:
                    logger.error("job %s: the end of its answers could not be stored. %s", job.id, error)
                    return
                if not warned:
                    job.append({"type": "unsaved", "message": str(error)})
                warned = True
                # close() wakes it for the last try.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(2)
            except NotFoundError:
                return  # The conversation was deleted meanwhile.


def _copies(job: Job) -> list[Message]:
    """The messages as they are at this moment, for another thread."""
    return [
        msgspec.structs.replace(
            candidate.message,
            token_ids=list(candidate.message.token_ids),
            timings=msgspec.structs.replace(candidate.timings),
        )
        for candidate in job.candidates
    ]


def _end_all(job: Job, state: str, finish_reason: str | None = None, error: str | None = None) -> None:
    for candidate in job.candidates:
        candidate.end(state, finish_reason, error)


def _fail(job: Job, code: str, message: str) -> None:
    job.error = {"code": code, "message": message}
    _end_all(job, "error", error=message)


def lease_id_of(message_id: int) -> str:
    """The engine's name for what it keeps of an answer."""
    return str(message_id)


def title_of(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= 60:
        return line
    return line[:59].rsplit(" ", 1)[0].rstrip(",;:.") + "…"


def _sampling_of(params: SamplingParams) -> dict[str, Any]:
    """The parameters that differ from the defaults, and those that people look at."""
    shown = {"n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"}
    defaults = SamplingParams()
    return {
        name: msgspec.to_builtins(getattr(params, name), str_keys=True)
        for name in params.__struct_fields__
        if name in shown or getattr(params, name) != getattr(defaults, name)
    }
