"""The Anthropic-compatible API: /v1/messages, /v1/messages/count_tokens.

Sources: https://platform.claude.com/docs/en/api/messages/create, .../messages/count_tokens and
https://platform.claude.com/docs/en/build-with-claude/streaming. Streams are server-sent events with names. A last
assistant turn is the answer's beginning, and the answer goes on from it. input_tokens leaves out what was found in
the cache. A client that goes away cancels its request within one step.
"""

import json
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from localpaged.engine.messages import Admitted, Event
from localpaged.errors import FeatureAbsentError, LocalpagedError
from localpaged.models.chat_tokenizer import ChatTokenizer
from localpaged.server.anthropic_schema import CountBody, MessagesBody
from localpaged.server.engine_handle import EngineHandle
from localpaged.server.error_response import anthropic_error
from localpaged.server.generation import CLIENT_CLOSED, Answer, AnswerStream, merge, taken, while_connected, whole
from localpaged.server.served_model import ServedModel

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "cancelled": "end_turn", "error": "end_turn"}


def router(
    engine: EngineHandle, tokenizer_provider: Callable[[], ChatTokenizer] | None, served_names: list[str] | None = None
) -> APIRouter:
    """The routes. served_names: what the model is called besides its own name."""
    routes = APIRouter(tags=["anthropic"])
    served = ServedModel(engine, tokenizer_provider, served_names)

    @routes.post("/v1/messages", response_model=None)
    async def messages(body: MessagesBody, request: Request) -> Response:
        model = await served.named(body.model)
        params = body.params()
        turns, begun = body.prompt_messages()
        prompt = await served.chat_prompt(turns, begun)
        message_id = f"msg_{uuid.uuid4().hex}"
        growing = Answer()
        events = merge([engine.generate(prompt, params, message_id, goes_on=bool(begun))])
        if body.stream:
            return AnswerStream(
                stream(await taken(request, events), growing, message_id, model),
                media_type="text/event-stream",
                headers={"X-Accel-Buffering": "no", "Cache-Control": "no-cache"},
            )
        done = await while_connected(request, whole(events, growing))
        if done is None:
            return Response(status_code=CLIENT_CLOSED)
        content = [{"type": "text", "text": done.text}]
        return JSONResponse(message(message_id, model, content, done))

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody) -> dict[str, int]:
        await served.named(body.model)
        prompt = await served.chat_prompt(*body.prompt_messages())
        if not isinstance(prompt, list):
            raise FeatureAbsentError("The model's tokenizer is with the server that answers: nothing is counted here.")
        return {"input_tokens": len(prompt)}

    return routes


def message(message_id: str, model: str, content: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
    """The message object; in a stream's first event without content and end."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        **end(answer),
        "usage": usage(answer),
    }


def end(answer: Answer) -> dict[str, str | None]:
    """Why the answer ended. A token that ends it has a number, a stop sequence its text."""
    if isinstance(answer.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
    reason = STOP_REASONS[answer.finish_reason] if answer.finish_reason is not None else None
    return {"stop_reason": reason, "stop_sequence": None}


def usage(answer: Answer) -> dict[str, int | None]:
    """The tokens so far. A prompt's are input_tokens and cache_read_input_tokens together.

    null where a remote engine has not told them; where it does not tell those in its cache, all are input_tokens.
    """
    prompt = answer.num_prompt_tokens
    return {
        "input_tokens": None if prompt is None else prompt - (answer.num_cached_tokens or 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.num_cached_tokens,
        "output_tokens": answer.num_generated_tokens,
    }


async def stream(
    events: AsyncIterator[tuple[int, Event]], growing: Answer, message_id: str, model: str
) -> AsyncIterator[str]:
    """The events as Anthropic names them; there is one block of text."""
    try:
        async for _, event in events:
            text = growing.take(event)
            if isinstance(event, Admitted):
                yield sse("message_start", message=message(message_id, model, [], growing))
                yield sse("content_block_start", index=0, content_block={"type": "text", "text": ""})
                yield sse("ping")
            if text:
                yield sse("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
    except LocalpagedError as error:
        yield sse(**anthropic_error(500, str(error)))
        return
    yield sse("content_block_stop", index=0)
    yield sse("message_delta", delta=end(growing), usage=usage(growing))
    yield sse("message_stop")


def sse(type: str, **fields: Any) -> str:
    """One event; its data repeats its name."""
    return f"event: {type}\ndata: {json.dumps({'type': type, **fields}, ensure_ascii=False)}\n\n"
