"""The Ollama-compatible API: /api/chat, /api/generate, /api/tags, /api/show, /api/ps, /api/version.

Source: https://docs.ollama.com/api. Streams are JSON objects, one a line; the last one has done, done_reason, the
counts and the durations in nanoseconds. Bodies are JSON whatever their Content-Type, since curl's is a form's. A
client that goes away cancels its request within one step. Nothing here pulls, unloads or removes models.
"""

import hashlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse, Response

from localpaged import __version__
from localpaged.engine.messages import Event, ModelInfo
from localpaged.engine.prompt import Prompt
from localpaged.errors import InvalidRequestError, LocalpagedError, ModelNotFoundError
from localpaged.models.chat_tokenizer import ChatTokenizer
from localpaged.server.answer_parser import AnswerParser, Part
from localpaged.server.engine_handle import EngineHandle, RemoteModel
from localpaged.server.generation import CLIENT_CLOSED, Answer, AnswerStream, merge, taken, while_connected, whole
from localpaged.server.ollama_schema import ChatBody, GenerateBody, GenerationBody, Options, ShowBody
from localpaged.server.served_model import ServedModel

Body = TypeVar("Body", bound=BaseModel)
# How an endpoint writes a piece of an answer: "message" or "response".
Piece = Callable[[Part], dict[str, Any]]

DONE_REASONS = {"stop": "stop", "length": "length", "cancelled": "stop", "error": "stop"}
LATEST = ":latest"
# The model stays loaded for as long as the server runs.
NEVER = "9999-12-31T23:59:59Z"


def router(
    engine: EngineHandle, tokenizer_provider: Callable[[], ChatTokenizer] | None, served_names: list[str] | None = None
) -> APIRouter:
    """The routes. served_names: what the model is called besides its own name."""
    routes = APIRouter(tags=["ollama"])
    served = ServedModel(engine, tokenizer_provider, served_names)
    started = now()

    async def loaded(asked: str) -> ModelInfo | RemoteModel:
        """The model, once it is there, if it has that name. Raises ModelNotFoundError."""
        await engine.restart_if_dead()
        info = await engine.wait_ready()
        names = await served.names()
        if asked not in names and asked.removesuffix(LATEST) not in names:
            raise ModelNotFoundError(f"model {asked!r} not found. Served here: {', '.join(names)}.", "model")
        return info

    @routes.post("/api/chat", response_model=None)
    async def chat(request: Request) -> Response:
        begun_at_ns = time.perf_counter_ns()
        body = await read(request, ChatBody)
        info = await loaded(body.model)
        messages = body.prompt_messages()
        if not messages:
            return only_load(body, chat_piece)
        clock = Clock(begun_at_ns)
        prompt = await served.chat_prompt(messages, tools=body.tool_use().for_template(), think=body.thinks)
        thinks = await served.begins_within(prompt)
        tags_calls = await served.tags_tool_calls()
        return await answer(engine, request, body, prompt, info, chat_piece, clock, thinks, tags_calls=tags_calls)

    @routes.post("/api/generate", response_model=None)
    async def generate(request: Request) -> Response:
        begun_at_ns = time.perf_counter_ns()
        body = await read(request, GenerateBody)
        info = await loaded(body.model)
        if not body.prompt:
            return only_load(body, response_piece)
        clock = Clock(begun_at_ns)
        if body.raw:
            prompt, thinks = await served.plain_prompt(body.prompt), False
        else:
            prompt = await served.chat_prompt(body.prompt_messages(), think=body.thinks)
            thinks = await served.begins_within(prompt)
        return await answer(engine, request, body, prompt, info, response_piece, clock, thinks, bool(body.raw))

    @routes.get("/api/tags")
    async def tags() -> dict[str, Any]:
        names = await served.names()
        info = engine.info
        return {"models": [entry(name, info) | {"modified_at": started} for name in names] if info else []}

    @routes.get("/api/ps")
    async def ps() -> dict[str, Any]:
        info = engine.info if engine.state == "ready" else None
        if info is None:
            return {"models": []}
        running: dict[str, Any] = {"context_length": info.max_model_len, "expires_at": NEVER}
        if isinstance(info, ModelInfo):
            size = info.weight_bytes + info.num_blocks * info.bytes_per_block
            running |= {"size": size, "size_vram": 0 if info.device.startswith("cpu") else size}
        return {"models": [entry(name, info) | running for name in await served.names()]}

    @routes.post("/api/show", response_model=None)
    async def show(request: Request) -> dict[str, Any]:
        body = await read(request, ShowBody)
        asked = body.model or body.name
        if not asked:
            raise InvalidRequestError("model is missing: name the model to show.", "model")
        info = await loaded(asked)
        family = family_of(info)
        window = {} if info.max_model_len is None else {f"{family}.context_length": info.max_model_len}
        return {
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": details(info),
            "model_info": {"general.architecture": family, **window},
            "capabilities": ["completion", "tools"],
            "modified_at": started,
        }

    @routes.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    return routes


class Clock:
    """When a request came, and when its model was there."""

    def __init__(self, begun_at_ns: int) -> None:
        self.begun_at_ns = begun_at_ns
        self.loaded_at_ns = time.perf_counter_ns()

    def report(self, answer: Answer) -> dict[str, int]:
        """The final object's counts and durations. The wait for a free place counts as the prompt's time.

        Counts that a remote engine was not told are left out.
        """
        ended = answer.ended_at_ns or time.perf_counter_ns()
        prefilled = answer.prefilled_at_ns or ended
        counts = {
            "total_duration": ended - self.begun_at_ns,
            "load_duration": self.loaded_at_ns - self.begun_at_ns,
            "prompt_eval_count": answer.num_prompt_tokens,
            "prompt_eval_duration": prefilled - answer.begun_at_ns,
            "eval_count": answer.num_generated_tokens,
            "eval_duration": ended - prefilled,
        }
        return {name: count for name, count in counts.items() if count is not None}


def chat_piece(part: Part) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": part.text}
    if part.reasoning:
        message["thinking"] = part.reasoning
    if part.calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for call in part.calls
        ]
    return {"message": message}


def response_piece(part: Part) -> dict[str, Any]:
    thinking = {"thinking": part.reasoning} if part.reasoning else {}
    return {"response": part.text} | thinking


async def answer(
    engine: EngineHandle,
    request: Request,
    body: ChatBody | GenerateBody,
    prompt: Prompt,
    info: ModelInfo | RemoteModel,
    piece: Piece,
    clock: Clock,
    thinks: bool,
    goes_on: bool = False,
    tags_calls: bool = True,
) -> Response:
    """Run the prompt and answer as a stream or at once. thinks: the answer begins within what the model thinks."""
    tools = body.tool_use()
    options, structured = body.options or Options(), tools.guide(body.structured_outputs(), tags_calls)
    num_tokens = len(prompt) if isinstance(prompt, list) else None
    params = options.sampling_params(num_tokens, info.max_model_len, structured)
    growing, parser = Answer(), AnswerParser(tools, thinks)
    events = merge([engine.generate(prompt, params, f"ollama-{uuid.uuid4().hex}", goes_on=goes_on)])
    if body.streams:
        lines = stream(await taken(request, events), growing, parser, body.model, piece, clock)
        return AnswerStream(
            lines,
            media_type="application/x-ndjson",
            headers={"X-Accel-Buffering": "no", "Cache-Control": "no-cache"},
        )
    done = await while_connected(request, whole(events, growing))
    if done is None:
        return Response(status_code=CLIENT_CLOSED)
    return JSONResponse(head(body.model) | piece(parser.take(done.text, ended=True)) | end(done, clock))


async def stream(
    events: AsyncIterator[tuple[int, Event]],
    growing: Answer,
    parser: AnswerParser,
    model: str,
    piece: Piece,
    clock: Clock,
) -> AsyncIterator[str]:
    """The events as lines of JSON."""
    try:
        async for _, event in events:
            if part := parser.take(growing.take(event), ended=False):
                yield line(head(model) | piece(part) | {"done": False})
    except LocalpagedError as error:
        yield line({"error": str(error)})
        return
    if part := parser.take("", ended=True):
        yield line(head(model) | piece(part) | {"done": False})
    yield line(head(model) | piece(Part()) | end(growing, clock))


def only_load(body: GenerationBody, piece: Piece) -> Response:
    """The answer to a request without a prompt, which asks that the model be there."""
    return JSONResponse(head(body.model) | piece(Part()) | {"done": True, "done_reason": "load"})


def head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": now()}


def end(answer: Answer, clock: Clock) -> dict[str, Any]:
    reason = DONE_REASONS[answer.finish_reason or "stop"]
    return {"done": True, "done_reason": reason} | clock.report(answer)


def line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


async def read(request: Request, kind: type[Body]) -> Body:
    """The request's body. Raises RequestValidationError that names the field."""
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


def entry(name: str, info: ModelInfo | RemoteModel) -> dict[str, Any]:
    """The model in a list. Its digest tells models apart; it is not that of their files. No remote tells its size."""
    if isinstance(info, RemoteModel):
        digest = hashlib.sha256(f"{info.address} {info.name}".encode()).hexdigest()
        return {"name": name, "model": name, "digest": digest, "details": details(info)}
    digest = hashlib.sha256(f"{info.name} {info.architecture} {info.weight_bytes}".encode()).hexdigest()
    return {"name": name, "model": name, "size": info.weight_bytes, "digest": digest, "details": details(info)}


def details(info: ModelInfo | RemoteModel) -> dict[str, Any]:
    family = family_of(info)
    return {
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": info.dtype if isinstance(info, ModelInfo) else "",
    }


def family_of(info: ModelInfo | RemoteModel) -> str:
    """What Ollama calls the architecture: LlamaForCausalLM is llama. A remote does not tell."""
    if isinstance(info, RemoteModel):
        return "unknown"
    return info.architecture.removesuffix("ForCausalLM").lower()
