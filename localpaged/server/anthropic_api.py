"""The Anthropic-compatible API: /v1/messages, /v1/messages/count_tokens.

Sources: https://platform.claude.com/docs/en/api/messages/create, .../messages/count_tokens and
https://platform.claude.com/docs/en/build-with-claude/streaming. Streams are server-sent events with names. A last
assistant turn is the answer's beginning, and the answer goes on from it. input_tokens leaves out what was found in
the cache. A client that goes away cancels its request within one step.
"""

import uuid
from collections.abc import AsyncIterator, Callable

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from localpaged.engine.messages import Admitted, Event
from localpaged.errors import FeatureAbsentError, LocalpagedError
from localpaged.models.chat_tokenizer import ChatTokenizer
from localpaged.server.answer_parser import AnswerParser
from localpaged.server.anthropic_schema import CountBody, MessagesBody
from localpaged.server.engine_handle import EngineHandle
from localpaged.server.error_response import anthropic_error
from localpaged.server.generation import CLIENT_CLOSED, AnswerStream, merge, taken, while_connected, whole
from localpaged.server.message_writer import MessageWriter, sse
from localpaged.server.served_model import ServedModel


def router(
    engine: EngineHandle, tokenizer_provider: Callable[[], ChatTokenizer] | None, served_names: list[str] | None = None
) -> APIRouter:
    """The routes. served_names: what the model is called besides its own name."""
    routes = APIRouter(tags=["anthropic"])
    served = ServedModel(engine, tokenizer_provider, served_names)

    @routes.post("/v1/messages", response_model=None)
    async def messages(body: MessagesBody, request: Request) -> Response:
        model = await served.named(body.model)
        tools = body.tool_use()
        params = body.params(tools.guide(None, await served.tags_tool_calls()))
        turns, begun = body.prompt_messages()
        prompt = await served.chat_prompt(turns, begun, tools.for_template())
        thinks = not begun and await served.begins_within(prompt)
        writer = MessageWriter(f"msg_{uuid.uuid4().hex}", model, AnswerParser(tools, thinks))
        events = merge([engine.generate(prompt, params, writer.id, goes_on=bool(begun))])
        if body.stream:
            return AnswerStream(
                stream(await taken(request, events), writer),
                media_type="text/event-stream",
                headers={"X-Accel-Buffering": "no", "Cache-Control": "no-cache"},
            )
        done = await while_connected(request, whole(events, writer.answer))
        if done is None:
            return Response(status_code=CLIENT_CLOSED)
        return JSONResponse(writer.whole())

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody) -> dict[str, int]:
        await served.named(body.model)
        prompt = await served.chat_prompt(*body.prompt_messages(), body.tool_use().for_template())
        if not isinstance(prompt, list):
            raise FeatureAbsentError("The model's tokenizer is with the server that answers: nothing is counted here.")
        return {"input_tokens": len(prompt)}

    return routes


async def stream(events: AsyncIterator[tuple[int, Event]], writer: MessageWriter) -> AsyncIterator[str]:
    """The events as Anthropic names them."""
    try:
        async for _, event in events:
            text = writer.answer.take(event)
            if isinstance(event, Admitted):
                yield writer.begin()
            for written in writer.take(text):
                yield written
    except LocalpagedError as error:
        yield sse(**anthropic_error(500, str(error)))
        return
    for written in writer.finish():
        yield written
