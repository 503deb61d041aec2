"""The OpenAI-compatible API: /v1/models, /v1/chat/completions, /v1/completions.

Source: https://platform.openai.com/docs/api-reference. Streams are server-sent events: the first chunk of
each choice has its role, the last one its finish_reason; usage comes last where it was asked for, then
[DONE]. A client that goes away cancels its request within one step.
"""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from localpaged.engine.messages import Admitted, Delta, Event, Failed, Finished
from localpaged.engine.prompt import Prompt
from localpaged.engine.sampling_params import SamplingParams
from localpaged.models.chat_tokenizer import ChatTokenizer
from localpaged.server.engine_handle import EngineHandle
from localpaged.server.generation import CLIENT_CLOSED, AnswerStream, as_error, gathered, merge, taken, while_connected
from localpaged.server.openai_choice import ChatChoice, CompletionChoice, Usage
from localpaged.server.openai_schema import ChatBody, CompletionBody, SamplingBody, StreamOptions
from localpaged.server.served_model import ServedModel, TokenNames
from localpaged.server.tools import Tools


def router(
    engine: EngineHandle, tokenizer_provider: Callable[[], ChatTokenizer] | None, served_names: list[str] | None = None
) -> APIRouter:
    """The routes. served_names: what the model is called besides its own name."""
    routes = APIRouter(tags=["openai"])
    started = int(time.time())
    served = ServedModel(engine, tokenizer_provider, served_names)

    def described(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "localpaged",
            "max_model_len": engine.info.max_model_len if engine.info else None,
        }

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described(name) for name in await served.names()]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return described(await served.named(name))

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        model = await served.named(body.model)
        tools = body.tool_use()
        params = body.params(tools, await served.tags_tool_calls())
        prompt = await served.chat_prompt(body.template_messages(), "", tools.for_template(), body.think)
        shape = chat_shape(await served.token_names(), tools, await served.begins_within(prompt))
        return await answer(engine, request, body, model, params, [prompt], shape)

    @routes.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        model = await served.named(body.model)
        params = body.params()
        prompts = [await served.plain_prompt(prompt) for prompt in body.prompts()]
        shape = completion_shape(await served.token_names())
        return await answer(engine, request, body, model, params, prompts, shape)

    return routes


@dataclass(frozen=True, slots=True)
class Shape:
    """How an API writes its answers. goes_on: they begin where the prompt ends, perhaps within a line."""

    prefix: str
    object: str
    chunk_object: str
    goes_on: bool
    new_choice: Callable[[int], ChatChoice | CompletionChoice]


def chat_shape(tokenizer: TokenNames, tools: Tools, thinks: bool) -> Shape:
    """thinks: answers begin within what the model thinks."""

    def new_choice(index: int) -> ChatChoice:
        return ChatChoice(index, tokenizer, tools, thinks)

    return Shape("chatcmpl", "chat.completion", "chat.completion.chunk", False, new_choice)


def completion_shape(tokenizer: TokenNames) -> Shape:
    return Shape("cmpl", "text_completion", "text_completion", True, lambda index: CompletionChoice(index, tokenizer))


async def answer(
    engine: EngineHandle,
    request: Request,
    body: SamplingBody,
    model: str,
    params: SamplingParams,
    prompts: list[Prompt],
    shape: Shape,
) -> Response:
    """Run the prompts side by side and answer at once or as a stream; choice p * n + i is prompt p's i."""
    answer_id = f"{shape.prefix}-{uuid.uuid4().hex}"
    head = {"id": answer_id, "created": int(time.time()), "model": model}
    choices: Any = [shape.new_choice(index) for index in range(params.n * len(prompts))]
    events = merge(
        [engine.generate(prompt, params, f"{answer_id}-{i}", goes_on=shape.goes_on) for i, prompt in enumerate(prompts)]
    )
    if body.stream:
        options = body.stream_options or StreamOptions()
        head["object"] = shape.chunk_object
        chunks = stream(await taken(request, events), head, params.n, choices, options)
        return AnswerStream(
            gathered(chunks),
            media_type="text/event-stream",
            headers={"X-Accel-Buffering": "no", "Cache-Control": "no-cache"},
        )
    usage = await while_connected(request, collect(events, params.n, choices))
    if usage is None:
        return Response(status_code=CLIENT_CLOSED)
    written = [choice.written() for choice in choices]
    return JSONResponse(head | {"object": shape.object, "choices": written, "usage": usage.report(choices)})


async def collect(events: AsyncIterator[tuple[int, Event]], n: int, choices: list[ChatChoice]) -> Usage:
    """Read all events into choices. Raises what a Failed one stands for."""
    usage = Usage()
    async for prompt, event in events:
        if isinstance(event, Failed):
            raise as_error(event)
        if isinstance(event, Finished):
            usage.add(event)
        elif isinstance(event, Delta):
            choices[prompt * n + event.index].take(event)
    return usage


async def stream(
    events: AsyncIterator[tuple[int, Event]],
    head: dict[str, Any],
    n: int,
    choices: list[ChatChoice],
    options: StreamOptions,
) -> AsyncGenerator[bytes, None]:
    """The events as server-sent chunks of all choices, interleaved as they come; usage comes last, or running too."""
    usage_field: dict[str, Any] = {"usage": None} if options.include_usage else {}
    usage = Usage()
    prompts: dict[int, Admitted] = {}

    def line(choice: ChatChoice, chunk: dict[str, Any]) -> bytes:
        told = usage_field
        if options.include_usage and options.continuous_usage_stats:
            admitted = prompts[choice.index // n]
            so_far = Usage(admitted.num_prompt_tokens, admitted.num_cached_tokens, choice.num_tokens)
            told = {"usage": so_far.report([choice])}
        return sse(head | {"choices": [chunk]} | told)

    async for prompt, event in events:
        if isinstance(event, Admitted):
            # A request that was put aside for others is admitted again.
            again = prompt in prompts
            prompts.setdefault(prompt, event)
            for choice in choices[prompt * n : (prompt + 1) * n]:
                if not again and (first := choice.first_chunk()) is not None:
                    yield line(choice, first)
        elif isinstance(event, Delta):
            choice = choices[prompt * n + event.index]
            if (chunk := choice.chunk(event)) is not None:
                yield line(choice, chunk)
            if choice.finish_reason is not None:
                yield line(choice, choice.last_chunk())
        elif isinstance(event, Finished):
            usage.add(event)
        elif isinstance(event, Failed):
            error = {"message": event.message, "type": "server_error", "param": event.param, "code": event.code}
            yield sse({"error": error})
            return
    if options.include_usage:
        yield sse(head | {"choices": [], "usage": usage.report(choices)})
    yield b"data: [DONE]\n\n"


def sse(value: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % msgspec.json.encode(value)
