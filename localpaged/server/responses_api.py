"""/v1/responses: answers that are kept as turns of a conversation, which previous_response_id goes on from.

A response is an answer in the conversation tree: its id has the message's number. The page shows it as any other, and
its KV stays for the next turn. With store false nothing is kept. instructions hold for one response, as with OpenAI.
Source: https://platform.openai.com/docs/api-reference/responses.
"""

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from localpaged.engine.messages import Event, Failed, Finished
from localpaged.engine.prompt import ChatPrompt, Prompt
from localpaged.engine.sampling_params import SamplingParams
from localpaged.errors import InvalidRequestError, LocalpagedError
from localpaged.server.engine_handle import EngineHandle
from localpaged.server.generation import CLIENT_CLOSED, Answer, AnswerStream, as_error, merge, while_connected
from localpaged.server.history import build_prompt, chat_messages
from localpaged.server.job import Job
from localpaged.server.jobs import JobManager, lease_id_of, title_of
from localpaged.server.mine import Mine
from localpaged.server.reasoning import begins_within
from localpaged.server.response_writer import Progress, ResponseWriter
from localpaged.server.responses_schema import ResponsesBody
from localpaged.server.served_model import ServedModel
from localpaged.store.conversations import Conversations
from localpaged.store.message import Message, NotFoundError, Timings
from localpaged.store.store import Store

RESPONSE_ID = re.compile(r"resp_(\d{1,18})")


def router(
    engine: EngineHandle,
    store: Store,
    jobs: JobManager,
    tokenizer_provider: Callable[[], Any] | None,
    served_names: list[str] | None = None,
) -> APIRouter:
    """The routes. served_names: what the model is called besides its own name."""
    routes = APIRouter(prefix="/v1/responses", tags=["openai"])
    served = ServedModel(engine, tokenizer_provider, served_names)

    async def answer_of(mine: Conversations, response_id: str, param: str = "response_id") -> Message:
        """The stored answer. Raises NotFoundError."""
        match = RESPONSE_ID.fullmatch(response_id)
        with contextlib.suppress(NotFoundError):
            message = await store.do(mine.message, int(match[1]) if match else 0)
            if message.role == "assistant":
                return message
        raise NotFoundError(f"There is no response {response_id!r}: it was deleted, or never stored.", param)

    async def start(mine: Conversations, body: ResponsesBody, before: Message | None, params: SamplingParams) -> Job:
        """Store what is new, and start the answer to it."""
        system_prompt, turns = body.messages()
        if before is None:
            conversation = await store.do(mine.create, title_of(turns[-1][1]), system_prompt)
        else:
            jobs.check_free(before.conversation)
            conversation = await store.do(mine.get, before.conversation)
        parent = before.id if before is not None else None
        user = await store.do(mine.add_turns, conversation.id, parent, turns)
        try:
            return await jobs.regenerate(user.id, params, system_prompt)
        except InvalidRequestError:
            await forget(mine, user, before)
            raise

    async def forget(mine: Conversations, user: Message, before: Message | None) -> None:
        """Take back what a request stored that was refused: all from its first turn to user, and what is under it."""
        if before is None:
            await store.do(mine.delete, user.conversation)
        else:
            ids = [message.id for message in await store.do(mine.path_to, user.id)]
            await store.do(mine.delete_messages, [ids[ids.index(before.id) + 1]])

    async def prompt_of(system_prompt: str, path: list[Message]) -> Prompt:
        if tokenizer_provider is None:
            return ChatPrompt(chat_messages(system_prompt, path))
        tokenizer = await served.tokenizer()
        return (await asyncio.to_thread(build_prompt, tokenizer, system_prompt, path)).token_ids

    async def about_thoughts() -> tuple[bool, Callable[[str], int] | None]:
        """Whether answers begin within what the model thinks, and what counts its tokens."""
        if tokenizer_provider is None:
            return False, None
        tokenizer = await served.tokenizer()
        rendered = await asyncio.to_thread(tokenizer.render_chat, [{"role": "user", "content": "?"}])
        return begins_within(rendered), lambda text: len(tokenizer.encode(text))

    @routes.post("", response_model=None)
    async def create(mine: Mine, body: ResponsesBody, request: Request) -> Response:
        """Answer, at once or as a stream; kept as a turn of a conversation unless store is false."""
        model = await served.named(body.model)
        params = body.params()
        system_prompt, turns = body.messages()
        before = None
        if body.previous_response_id is not None:
            before = await answer_of(mine, body.previous_response_id, "previous_response_id")
        if body.keeps:
            job = await start(mine, body, before, params)
            response_id = response_id_of(job.candidates[0].message)
            progress = _of_job(job, jobs)
        else:
            path = await store.do(mine.path_to, before.id if before is not None else None)
            path += [Message(id=0, conversation=0, parent=None, role=role, text=text) for role, text in turns]
            prompt = await prompt_of(system_prompt, path)
            response_id = f"resp_{uuid.uuid4().hex}"
            conversation = str(before.conversation) if before is not None else None
            events = merge([engine.generate(prompt, params, response_id, conversation=conversation)])
            progress = _of_events(events)
        writer = ResponseWriter(response_id, model, body, *await about_thoughts())
        try:
            first = await while_connected(request, anext(progress))
        except InvalidRequestError:
            if body.keeps:
                await forget(mine, job.user, before)
            raise
        if first is None:
            await progress.aclose()
            return Response(status_code=CLIENT_CLOSED)
        if body.stream:
            return AnswerStream(
                _stream(writer, progress),
                media_type="text/event-stream",
                headers={"X-Accel-Buffering": "no", "Cache-Control": "no-cache"},
            )
        done = await while_connected(request, _whole(writer, progress))
        if done is None:
            return Response(status_code=CLIENT_CLOSED)
        return JSONResponse(done)

    @routes.get("/{response_id}")
    async def retrieve(mine: Mine, response_id: str) -> dict[str, Any]:
        """A stored response as it is; what it was asked with is told only as far as it is kept."""
        message = await answer_of(mine, response_id)
        conversation = await store.do(mine.get, message.conversation)
        user = await store.do(mine.message, message.parent or 0)
        sampling = message.sampling or {}
        before = await store.do(mine.message, user.parent) if user.parent is not None else None
        body = ResponsesBody(
            input=user.text,
            instructions=conversation.system_prompt or None,
            previous_response_id=response_id_of(before) if before is not None and before.role == "assistant" else None,
            **{name: sampling.get(name) for name in ("temperature", "top_p")},
            max_output_tokens=sampling.get("max_tokens"),
        )
        writer = ResponseWriter(response_id, message.model or "", body, *await about_thoughts())
        for _ in writer.take(_stored(message)):
            pass
        return writer.response("in_progress" if message.state == "running" else None) | {"created_at": message.created}

    @routes.delete("/{response_id}")
    async def delete(mine: Mine, response_id: str) -> dict[str, Any]:
        """Drop a stored response and all that follows it."""
        message = await answer_of(mine, response_id)
        if job := jobs.running_in(message.conversation):
            await jobs.stop(job.id)
            await job.done.wait()
        under = await store.do(mine.subtree, message.id)
        await store.do(mine.delete_messages, [message.id])
        engine.drop_leases(lease_ids=[lease_id_of(message_id) for message_id in under])
        return {"id": response_id, "object": "response", "deleted": True}

    return routes


def response_id_of(message: Message) -> str:
    return f"resp_{message.id}"


async def _stream(writer: ResponseWriter, progress: AsyncGenerator[Progress, None]) -> AsyncIterator[str]:
    for event in writer.begin():
        yield event
    try:
        async for one in progress:
            for event in writer.take(one):
                yield event
    except LocalpagedError as error:
        for event in writer.take(Progress(error=str(error), code=error.code)):
            yield event
    finally:
        await progress.aclose()


async def _whole(writer: ResponseWriter, progress: AsyncGenerator[Progress, None]) -> dict[str, Any]:
    """The response when it has ended. Raises LocalpagedError when the engine fails on it."""
    try:
        async for one in progress:
            for _ in writer.take(one):
                pass
    finally:
        await progress.aclose()
    return writer.response()


async def _of_events(events: AsyncGenerator[tuple[int, Event], None]) -> AsyncGenerator[Progress, None]:
    """The engine's events of one answer; first that it takes the request. Raises what a Failed one stands for."""
    answer = Answer()
    try:
        async for _, event in events:
            text = answer.take(event)
            yield Progress(
                text=text,
                num_prompt_tokens=answer.num_prompt_tokens,
                num_cached_tokens=answer.num_cached_tokens,
                num_generated_tokens=answer.num_generated_tokens,
                finish_reason=answer.finish_reason if isinstance(event, Finished) else None,
            )
    finally:
        await events.aclose()


async def _of_job(job: Job, jobs: JobManager) -> AsyncGenerator[Progress, None]:
    """The same of a job. Closing it early stops the job."""
    message = job.candidates[0].message

    def now(text: str = "") -> Progress:
        return Progress(text, job.prefill["total"], job.prefill["cached"], job.candidates[0].timings.num_tokens)

    try:
        async for _, event in job.follow(0):
            kind = event["type"] if event is not None else None
            if kind == "prefill":
                yield now()
            elif kind == "tokens":
                assert event is not None
                text = "".join(one["text"] for one in event["candidates"])
                if text or job.error is None:
                    yield now(text)
        if job.error is not None:
            raise as_error(Failed(request_id=job.id, code=job.error["code"], message=job.error["message"]))
        if message.finish_reason is None:
            raise LocalpagedError(message.error or "The server was stopped while it answered. What came is stored.")
        end = now()
        end.finish_reason = message.finish_reason
        yield end
    finally:
        await jobs.stop(job.id)


def _stored(message: Message) -> Progress:
    timings = message.timings or Timings()
    cached = timings.num_cached_tokens or 0
    return Progress(
        text=message.text,
        num_prompt_tokens=cached + (timings.num_computed_tokens or 0),
        num_cached_tokens=cached,
        num_generated_tokens=timings.num_tokens,
        finish_reason=message.finish_reason or ("stop" if message.state == "complete" else None),
        error=None if message.state in ("complete", "running") else message.error or "It was interrupted.",
    )
