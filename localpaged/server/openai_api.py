"""The OpenAI-compatible API: /v1/models, /v1/chat/completions, /v1/completions.

Source: https://platform.openai.com/docs/api-reference. Streams are server-sent events: the first chunk of
each choice has its role, the last one its finish_reason; usage comes last where it was asked for, then
[DONE]. A client that goes away cancels its request within one step.
"""

import json
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from localpaged.engine.messages import Admitted, Delta, Event, Failed, Finished, PositionLogprobs, TokenLogprob
from localpaged.engine.prompt import Prompt
from localpaged.engine.sampling_params import SamplingParams
from localpaged.models.chat_tokenizer import ChatTokenizer
from localpaged.server.engine_handle import EngineHandle
from localpaged.server.generation import CLIENT_CLOSED, as_error, merge, taken, while_connected
from localpaged.server.openai_schema import ChatBody, CompletionBody, SamplingBody, StreamOptions
from localpaged.server.reasoning import ReasoningSplitter
from localpaged.server.served_model import ServedModel, TokenNames

FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "stop", "error": "stop"}


@dataclass(slots=True)
class Choice:
    """One candidate as it grows."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Usage:
    """Tokens of all prompts and choices; a prompt counts once, however many choices it has. None: not known."""

    prompt: int | None = 0
    cached: int | None = 0
    completion: int | None = 0

    def add(self, event: Finished) -> None:
        self.prompt = plus(self.prompt, event.num_prompt_tokens)
        self.cached = plus(self.cached, event.num_cached_tokens)
        self.completion = plus(self.completion, event.num_generated_tokens)

    def report(self) -> dict[str, Any] | None:
        """None when a remote engine did not tell the tokens."""
        if self.prompt is None or self.completion is None:
            return None
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": None if self.cached is None else {"cached_tokens": self.cached},
        }


def num_tokens_after(delta: Delta, before: int | None) -> int | None:
    """A choice's tokens with those of a delta; an engine without token ids tells the number, or nothing."""
    if delta.num_tokens is not None:
        return delta.num_tokens
    return plus(before, len(delta.token_ids))


def plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def router(
    engine: EngineHandle, tokenizer_provider: Callable[[], ChatTokenizer] | None, served_names: list[str] | None = None
) -> APIRouter:
    """The routes. served_names: what the model is called besides its own name."""
    routes = APIRouter(tags=["openai"])
    started = int(time.time())
    served = ServedModel(engine, tokenizer_provider, served_names)

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [
                {
                    "id": name,
                    "object": "model",
                    "created": started,
                    "owned_by": "localpaged",
                    "max_model_len": engine.info.max_model_len if engine.info else None,
                }
                for name in await served.names()
            ],
        }

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        model = await served.named(body.model)
        params = body.params()
        prompt = await served.chat_prompt([message.as_template_message() for message in body.messages])
        shape = ChatShape(model, await served.token_names(), await served.begins_within(prompt))
        return await answer(engine, request, body, params, [prompt], shape)

    @routes.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        model = await served.named(body.model)
        params = body.params()
        prompts = [await served.plain_prompt(prompt) for prompt in body.prompts()]
        return await answer(engine, request, body, params, prompts, CompletionShape(model, await served.token_names()))

    return routes


class ChatShape:
    """How chat answers are written."""

    prefix = "chatcmpl"
    goes_on = False
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, model: str, tokenizer: TokenNames, thinks: bool = False) -> None:
        """thinks: answers begin within what the model thinks."""
        self.model = model
        self.tokenizer = tokenizer
        self._splitters: defaultdict[int, ReasoningSplitter] = defaultdict(lambda: ReasoningSplitter(thinks))

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        splitter = self._splitters[index]
        reasoning, text = map("".join, zip(splitter.push(choice.text), splitter.finish(), strict=True))
        thought = {"reasoning_content": reasoning} if reasoning else {}
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None} | thought,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "delta": self._delta(*self._splitters[index].push(delta.text)),
            "logprobs": self._logprobs(delta.logprobs or []),
            "finish_reason": None,
        }

    def rest_chunk(self, index: int) -> dict[str, Any] | None:
        """What was held back until the answer's end, if anything."""
        delta = self._delta(*self._splitters[index].finish())
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} if delta else None

    @staticmethod
    def _delta(reasoning: str, text: str) -> dict[str, str]:
        parts = {"reasoning_content": reasoning, "content": text}
        return {name: part for name, part in parts.items() if part}

    def last_chunk(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, positions: list[PositionLogprobs]) -> dict[str, Any] | None:
        if not positions:
            return None
        content = [
            self._token(position.chosen) | {"top_logprobs": [self._token(token) for token in position.top]}
            for position in positions
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: TokenLogprob) -> dict[str, Any]:
        return {
            "token": self.tokenizer.token_text(token.token_id),
            "logprob": token.logprob,
            "bytes": list(self.tokenizer.token_bytes(token.token_id)),
        }


class CompletionShape:
    """How plain completions are written."""

    prefix = "cmpl"
    goes_on = True  # where the prompt ends, perhaps within a line
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, model: str, tokenizer: TokenNames) -> None:
        self.model = model
        self.tokenizer = tokenizer

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "text": choice.text,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        return None

    def rest_chunk(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.logprobs or []),
            "finish_reason": None,
        }

    def last_chunk(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}

    def _logprobs(self, positions: list[PositionLogprobs]) -> dict[str, Any] | None:
        if not positions:
            return None
        text = self.tokenizer.token_text
        tokens = [text(position.chosen.token_id) for position in positions]
        offsets = [0]
        for token in tokens[:-1]:
            offsets.append(offsets[-1] + len(token))
        return {
            "tokens": tokens,
            "token_logprobs": [position.chosen.logprob for position in positions],
            "top_logprobs": [{text(t.token_id): t.logprob for t in position.top} for position in positions],
            "text_offset": offsets,
        }


Shape = ChatShape | CompletionShape


async def answer(
    engine: EngineHandle,
    request: Request,
    body: SamplingBody,
    params: SamplingParams,
    prompts: list[Prompt],
    shape: Shape,
) -> Response:
    """Run the prompts side by side and answer at once or as a stream; choice p * n + i is prompt p's i."""
    answer_id = f"{shape.prefix}-{uuid.uuid4().hex}"
    head = {"id": answer_id, "created": int(time.time()), "model": shape.model}
    events = merge(
        [engine.generate(prompt, params, f"{answer_id}-{i}", goes_on=shape.goes_on) for i, prompt in enumerate(prompts)]
    )
    if body.stream:
        options = body.stream_options or StreamOptions()
        running_usage = options.include_usage and options.continuous_usage_stats
        chunks = stream(await taken(events), head, params.n, shape, options.include_usage, running_usage)
        return StreamingResponse(
            chunks,
            media_type="text/event-stream",
            headers={"X-Accel-Buffering": "no", "Cache-Control": "no-cache"},
        )
    choices = [Choice() for _ in range(params.n * len(prompts))]
    usage = await while_connected(request, collect(events, params.n, choices))
    if usage is None:
        return Response(status_code=CLIENT_CLOSED)
    written = [shape.choice(index, choice) for index, choice in enumerate(choices)]
    return JSONResponse(head | {"object": shape.object, "choices": written, "usage": usage.report()})


async def collect(events: AsyncIterator[tuple[int, Event]], n: int, choices: list[Choice]) -> Usage:
    """Read all events into choices. Raises what a Failed one stands for."""
    usage = Usage()
    async for prompt, event in events:
        if isinstance(event, Failed):
            raise as_error(event)
        if isinstance(event, Finished):
            usage.add(event)
        elif isinstance(event, Delta):
            choice = choices[prompt * n + event.index]
            choice.text += event.text
            choice.token_ids += event.token_ids
            choice.logprobs += event.logprobs or []
            if event.finish_reason is not None:
                choice.finish_reason = FINISH_REASONS[event.finish_reason]
    return usage


async def stream(
    events: AsyncIterator[tuple[int, Event]],
    head: dict[str, Any],
    n: int,
    shape: Shape,
    include_usage: bool,
    running_usage: bool = False,
) -> AsyncIterator[str]:
    """The events as server-sent chunks of all choices, interleaved as they come; usage comes last, or running too."""
    head = head | {"object": shape.chunk_object}
    usage_field: dict[str, Any] = {"usage": None} if include_usage else {}
    usage = Usage()
    so_far: defaultdict[int, Usage] = defaultdict(Usage)  # by choice

    def line(choice: dict[str, Any]) -> str:
        told = {"usage": so_far[choice["index"]].report()} if running_usage else usage_field
        return sse(head | {"choices": [choice]} | told)

    async for prompt, event in events:
        if isinstance(event, Admitted):
            for index in range(n):
                so_far[prompt * n + index] = Usage(event.num_prompt_tokens, event.num_cached_tokens)
                first = shape.first_chunk(prompt * n + index)
                if first is not None:
                    yield line(first)
        elif isinstance(event, Delta):
            index = prompt * n + event.index
            so_far[index].completion = num_tokens_after(event, so_far[index].completion)
            if event.text or event.logprobs:
                chunk = shape.chunk(index, event)
                if chunk.get("delta", True) or chunk["logprobs"]:
                    yield line(chunk)
            if event.finish_reason is not None:
                if (rest := shape.rest_chunk(index)) is not None:
                    yield line(rest)
                yield line(shape.last_chunk(index, FINISH_REASONS[event.finish_reason]))
        elif isinstance(event, Finished):
            usage.add(event)
        elif isinstance(event, Failed):
            error = {"message": event.message, "type": "server_error", "param": event.param, "code": event.code}
            yield sse({"error": error})
            return
    if include_usage:
        yield sse(head | {"choices": [], "usage": usage.report()})
    yield "data: [DONE]\n\n"


def sse(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
