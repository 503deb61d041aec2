"""The web server's application: health, the pool's audit, the chat's API, the page, and their guard."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.staticfiles import StaticFiles

from localpaged import __version__
from localpaged.engine.client import EngineClient
from localpaged.errors import (
    EngineDeadError,
    FeatureAbsentError,
    InvalidRequestError,
    LocalpagedError,
    ModelError,
    ModelNotFoundError,
    RemoteAwayError,
    RemoteBusyError,
    RemoteError,
    StoreError,
)
from localpaged.server import chat_api, kv_api, login, no_kv_api, responses_api, transfer_api, tree_api
from localpaged.server.access import Access
from localpaged.server.engine_handle import EngineHandle
from localpaged.server.error_response import error_response
from localpaged.server.generation import CLIENT_CLOSED, ClientGoneError
from localpaged.server.history import Tokenizer
from localpaged.server.jobs import ConversationBusyError, JobManager
from localpaged.server.limits import Gate, LimitsMiddleware, RequestLimits
from localpaged.server.linger import LingerMiddleware
from localpaged.server.remote_engine import RemoteEngine
from localpaged.server.request_log import RequestLogMiddleware
from localpaged.server.security import SecurityMiddleware
from localpaged.store.message import NotFoundError
from localpaged.store.store import Store

STATUSES: list[tuple[type[LocalpagedError], int]] = [
    (NotFoundError, 404),
    (ModelNotFoundError, 404),
    (FeatureAbsentError, 404),
    (ConversationBusyError, 409),
    (InvalidRequestError, 400),
    (StoreError, 503),
    (EngineDeadError, 503),
    (ModelError, 503),
    (RemoteAwayError, 503),
    (RemoteBusyError, 429),
    (RemoteError, 502),
]
HEALTH: dict[str, Any] = {
    "summary": "Whether the model is loaded",
    "response_description": "It is.",
    "responses": {503: {"description": "It is being loaded, or its process ended: status says which."}},
}


@dataclass(frozen=True)
class Page:
    """What localpaged.ui brings: files, markup for the page's head and body, and how to mount the rest."""

    static_folder: Path
    head: str
    body: str
    mount: Callable[[FastAPI], None]


@dataclass(frozen=True)
class AppSettings:
    """What the application needs to know of the configuration."""

    access: Access = field(default_factory=Access)
    limits: RequestLimits = field(default_factory=RequestLimits)
    is_default_model: bool = False
    served_names: tuple[str, ...] = ()
    data_folder: Path | None = None


def create_app(
    engine: EngineHandle,
    store: Store,
    tokenizer_provider: Callable[[], Tokenizer] | None,
    settings: AppSettings | None = None,
    page: Page | None = None,
    routers: Sequence[APIRouter] = (),
) -> FastAPI:
    """The application. It starts the engine when it starts; at its end it stops it and closes the store.

    page is localpaged.ui.page.page(); without it there is the API alone. routers come
    before it, since the page answers for every other path. app.state.jobs is the JobManager, app.state.gate the Gate.
    tokenizer_provider: None where another server answers.
    """
    settings = settings or AppSettings()
    jobs = JobManager(engine, store, tokenizer_provider)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for conversation in await store.do(store.conversations.with_pinned_kv):
            engine.pin(str(conversation), True)
        await engine.start()
        try:
            yield
        finally:
            await jobs.close()
            await engine.stop()
            store.close()

    app = FastAPI(title="localpaged", version=__version__, lifespan=lifespan, redoc_url=None, docs_url=None)
    app.state.jobs = jobs
    app.state.gate = Gate()
    app.state.store = store
    app.add_exception_handler(LocalpagedError, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(ClientGoneError, lambda *_: Response(status_code=CLIENT_CLOSED))
    origins = sorted(settings.access.allowed_origins)
    # Within the guard, so that who may not come in is not counted; within CORS, so that pages can read the refusal.
    app.add_middleware(LimitsMiddleware, limits=settings.limits, gate=app.state.gate)
    app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(
        SecurityMiddleware,
        access=settings.access,
        page_head=page.head if page else "",
        page_body=page.body if page else "",
    )
    app.add_middleware(RequestLogMiddleware)
    app.add_middleware(LingerMiddleware)

    @app.get("/health", **HEALTH)
    async def health() -> JSONResponse:
        if engine.state == "ready":
            return JSONResponse({"status": "ok", "model": engine.info.name if engine.info else None})
        if engine.state == "dead":
            detail = engine.start_error or "The engine process ended. The next message starts it again."
            return JSONResponse({"status": "dead", "detail": detail}, status_code=503)
        return JSONResponse({"status": "loading"}, status_code=503)

    app.include_router(login.router(settings.access))
    about = (settings.is_default_model, settings.access, settings.data_folder)
    app.include_router(chat_api.router(engine, store, jobs, tokenizer_provider, *about))
    app.include_router(tree_api.router(store))
    app.include_router(transfer_api.router(engine, store))
    if isinstance(engine, EngineClient):
        app.include_router(kv_api.router(engine, store))
    elif isinstance(engine, RemoteEngine):
        app.include_router(no_kv_api.router(engine.address))
    app.include_router(responses_api.router(engine, store, jobs, tokenizer_provider, list(settings.served_names)))
    for router in routers:
        app.include_router(router)
    if page is not None:
        app.mount("/static/localpaged", PageFiles(directory=page.static_folder))
        page.mount(app)
    return app


class PageFiles(StaticFiles):
    """The page's own files, asked for again after every update."""

    def file_response(self, *args: Any, **kwargs: Any) -> Any:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, LocalpagedError)
    status = next((status for kind, status in STATUSES if isinstance(error, kind)), 500)
    return error_response(request.url.path, status, error.code, str(error), getattr(error, "param", None))


async def _answer_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    message = f"{where or 'body'}: {first['msg']}."
    if not where and "json" not in request.headers.get("content-type", "json"):
        message = "The body is not taken for JSON. Send it with the header Content-Type: application/json."
    return error_response(request.url.path, 400, "invalid_request", message, where or None)
