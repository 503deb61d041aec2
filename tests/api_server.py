"""A server on a scripted engine, on a port of its own, for tests that speak to it with real HTTP clients."""

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fakes import FakeEngine, FakeTokenizer
from fastapi import FastAPI

from localpaged.engine.client import EngineClient
from localpaged.engine.config import EngineConfig
from localpaged.engine.messages import Delta, Event, Finished
from localpaged.engine.sampling_params import SamplingParams
from localpaged.models.chat_tokenizer import load_tokenizer
from localpaged.server import anthropic_api, embeddings_api, ollama_api, openai_api
from localpaged.server.access import Access
from localpaged.server.app import AppSettings, create_app
from localpaged.server.connection import bounded
from localpaged.server.limits import RequestLimits
from localpaged.store.store import Store

MODEL = "fake-135M"
ANSWER = "Answer A: it is **paged**."


class PlainTokenizer(FakeTokenizer):
    """Begins a plain prompt with a mark, as models do that expect one."""

    def encode_plain(self, text: str) -> list[int]:
        return self.encode("<|im_start|>" + text)


class ApiEngine(FakeEngine):
    """Also stops at stop strings of one character, and keeps what else the APIs tell it and when they close a request.

    closed: how many requests were closed. ended: of these, how many had come to their end.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(tokenizer=PlainTokenizer(), **options)
        self.goes_on: list[bool] = []
        self.closed = 0
        self.ended = 0

    def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None, **leases: Any
    ) -> AsyncIterator[Event]:
        self.goes_on.append(leases.get("goes_on", False))
        return self._stopping(super().generate(prompt_token_ids, params, request_id, **leases), params)

    async def _stopping(self, events: AsyncIterator[Event], params: SamplingParams) -> AsyncIterator[Event]:
        stopped = False
        try:
            async for event in events:
                if isinstance(event, Delta) and event.text in params.stop and not stopped:
                    stopped = True
                    event.text, event.finish_reason, event.stop_reason = "", "stop", params.stop[0]
                    yield event
                elif not stopped or isinstance(event, Finished):
                    yield event
                if isinstance(event, Finished):
                    self.ended += 1
        finally:
            self.closed += 1
            await events.aclose()  # type: ignore[attr-defined]


def application(
    engine: Any,
    store: Store,
    served_names: list[str] | None = None,
    tokenizer: Any = None,
    limits: RequestLimits | None = None,
    data_folder: Path | None = None,
    **access: Any,
) -> FastAPI:
    """The application with its APIs. tokenizer: the engine's, where it is no scripted one."""
    tokenizer = tokenizer or engine.tokenizer
    apis = [openai_api, embeddings_api, ollama_api, anthropic_api]
    routers = [api.router(engine, lambda: tokenizer, served_names) for api in apis]
    settings = AppSettings(Access(**access), limits or RequestLimits(), False, tuple(served_names or []), data_folder)
    return create_app(engine, store, lambda: tokenizer, settings, routers=routers)


@contextmanager
def serving(
    folder: Path,
    engine: Any,
    served_names: list[str] | None = None,
    tokenizer: Any = None,
    limits: RequestLimits | None = None,
    head_timeout_s: float = 30,
    **access: Any,
) -> Iterator[str]:
    """The application with its APIs; yields its address. tokenizer: the engine's, where it is no scripted one."""
    app = application(engine, Store(folder / "chats.db"), served_names, tokenizer, limits, folder, **access)
    with listening(app, head_timeout_s=head_timeout_s) as address:
        yield address


@contextmanager
def listening(app: Any, port: int = 0, head_timeout_s: float = 30) -> Iterator[str]:
    """Any application, in a thread; yields its address."""
    http = bounded(head_timeout_s)
    server = uvicorn.Server(
        uvicorn.Config(app, port=port, http=http, log_level="critical", ws="none", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def serving_default_model(folder: Path, path: Path) -> Iterator[str]:
    """The application on the real engine, with the model of that path as "real"."""
    engine = EngineClient(EngineConfig(model=str(path), name="real", kv_cache_memory=1 << 28))
    with serving(folder, engine, tokenizer=load_tokenizer(path)) as address:
        wait_until(lambda: httpx.get(f"{address}/health").status_code == 200, 240)
        yield address


def wait_for_empty_pool(address: str) -> None:
    """Until no block is in use any more; it must be sound then."""

    def is_empty() -> bool:
        stats = httpx.get(f"{address}/api/kv").json()
        return stats["referenced"] == stats["running"] == 0 and stats["consistent"]

    wait_until(is_empty)


def wait_until(condition: Callable[[], object], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not come true within {timeout_s} s"
        time.sleep(0.005)
