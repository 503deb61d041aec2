"""An OpenAI-compatible server that does what a test tells it to, right or wrong."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from api_server import listening
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Body = dict[str, Any]
DONE = "[DONE]"


def word(text: str, index: int = 0, **fields: Any) -> Body:
    """A chunk that brings text to one choice."""
    return {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": None}]} | fields


def end(reason: str = "stop", index: int = 0, **fields: Any) -> Body:
    return {"choices": [{"index": index, "delta": {}, "finish_reason": reason}]} | fields


def usage(prompt: int, completion: int, **fields: Any) -> Body:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"choices": [], "usage": counts | fields}


class Stub:
    """answer(body) gives what a POST is answered with: a Response, or what a stream consists of.

    Of a stream: chunks, other data (such as DONE), bytes as they are, seconds to wait, an exception to break off with.
    """

    def __init__(self) -> None:
        self.models: Any = [{"id": "stub-1", "owned_by": "stub", "max_model_len": 2048}, {"id": "stub-2"}]
        self.answer: Callable[[Body], Any] = lambda body: [word("Hi"), word(" there"), end(), usage(7, 2), DONE]
        self.requests: list[Body] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.num_open = 0
        self.num_left = 0  # streams that their reader left before their end
        self.address = ""

    async def list_models(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        return self.models if isinstance(self.models, Response) else JSONResponse({"data": self.models})

    async def post(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.paths.append(request.url.path)
        self.headers.append(dict(request.headers))
        answer = self.answer(body)
        if isinstance(answer, Response):
            return answer
        return StreamingResponse(self._stream(answer), media_type="text/event-stream")

    async def _stream(self, parts: Any) -> AsyncIterator[str | bytes]:
        self.num_open += 1
        ended = False
        try:
            for part in parts:
                if isinstance(part, float):
                    await asyncio.sleep(part)
                elif isinstance(part, bytes):
                    yield part
                elif isinstance(part, Exception):
                    ended = True
                    raise part
                else:
                    yield f"data: {part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)}\n\n"
            ended = True
        finally:
            self.num_open -= 1
            self.num_left += not ended


def refusal(status: int, message: str, **fields: Any) -> Response:
    return JSONResponse({"error": {"message": message, "type": "error"} | fields}, status)


@contextmanager
def stub_serving(stub: Stub | None = None, port: int = 0) -> Iterator[Stub]:
    """The stub on a port; its address ends in /v1."""
    stub = stub or Stub()
    routes = [
        Route("/v1/models", stub.list_models),
        Route("/v1/chat/completions", stub.post, methods=["POST"]),
        Route("/v1/completions", stub.post, methods=["POST"]),
    ]
    with listening(Starlette(routes=routes), port) as address:
        stub.address = f"{address}/v1"
        yield stub
