"""Puts the server together from the settings and runs it until it is told to stop."""

import asyncio
import errno
import fcntl
import os
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO

from fastapi import FastAPI

from localpaged.config import Settings
from localpaged.engine.client import EngineClient
from localpaged.engine.messages import ModelInfo
from localpaged.errors import ModelError, SettingError
from localpaged.home import home
from localpaged.log import log_to
from localpaged.models.chat_tokenizer import ChatTokenizer, load_tokenizer
from localpaged.models.gguf_header import read_header
from localpaged.models.locate import LocatedModel, locate_model
from localpaged.server import anthropic_api, embeddings_api, metrics, ollama_api, openai_api
from localpaged.server.access import Access, check_bind
from localpaged.server.app import AppSettings, Page, create_app
from localpaged.server.connection import notice_dead_peers
from localpaged.server.engine_handle import RemoteModel
from localpaged.server.graceful_server import GracefulServer
from localpaged.server.limits import RequestLimits
from localpaged.server.remote_config import remote_config
from localpaged.server.users import Users
from localpaged.store.store import Store


def serve(settings: Settings, page: Callable[[], Page], open_browser: bool = False) -> None:
    """Run the server. Raises SettingError, ModelError and StoreError before it listens."""
    key = settings.key()
    users = Users(home() / "users.json")
    check_bind(settings.host, key, users)
    remote = remote_config(settings)
    model = locate_model(settings.model) if remote is None else None
    if model is not None:
        check_model(model.path)
    listener = listen(settings.host, settings.port)
    home().mkdir(parents=True, exist_ok=True)
    log_to(home() / "logs", "server", settings.log_level)
    lock = lock_home(home(), listener.getsockname()[1])
    store = Store(home() / "chats.db")
    access = Access(settings.host, key, frozenset(settings.allowed_host), frozenset(settings.allowed_origin), users)
    # uvicorn stops in good order on SIGTERM and then raises it again: that is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    engine: metrics.MeteredEngine | metrics.MeteredRemote
    if model is not None:
        engine = metrics.MeteredEngine(settings.engine_config(model.path, model.name, keeps_kv=True))
        # The model loads while the page's libraries are imported.
        engine.launch()
    else:
        assert remote is not None
        engine = metrics.MeteredRemote(remote)
    try:
        app = build_app(settings, model, store, access, engine, page())
        address = f"http://{_shown_host(settings.host)}:{listener.getsockname()[1]}"
        server = GracefulServer(
            app,
            lambda: _announce(address, engine, model, open_browser),
            settings.stop_timeout,
            settings.request_timeout,
        )
        server.run(sockets=[listener])
    finally:
        if isinstance(engine, EngineClient):
            engine.kill()
        lock.close()
    if isinstance(engine, EngineClient) and engine.start_error is not None and engine.info is None:
        raise ModelError(engine.start_error)


def build_app(
    settings: Settings,
    model: LocatedModel | None,
    store: Store,
    access: Access,
    engine: metrics.MeteredEngine | metrics.MeteredRemote,
    page: Page | None,
) -> FastAPI:
    """The application with every router; it starts and stops the engine. model: None where another server has it."""
    tokenizer = _tokenizer_of(model) if model is not None else None
    apis = [openai_api, ollama_api, anthropic_api]
    routers = [api.router(engine, tokenizer, settings.served_model_name) for api in apis]
    if isinstance(engine, EngineClient) and tokenizer is not None:
        routers.append(embeddings_api.router(engine, tokenizer, settings.served_model_name))
    routers.append(metrics.router(engine))
    limits = RequestLimits(settings.max_request_bytes or 0, settings.request_timeout, settings.max_requests)
    is_default = model is not None and model.embedded
    app_settings = AppSettings(access, limits, is_default, tuple(settings.served_model_name), home())
    return create_app(engine, store, tokenizer, app_settings, page, routers)


def _tokenizer_of(model: LocatedModel) -> Callable[[], ChatTokenizer]:
    """The tokenizer, loaded beside the engine, so that the first message does not wait for it."""

    @cache
    def tokenizer() -> ChatTokenizer:
        return load_tokenizer(model.path)

    threading.Thread(target=tokenizer, daemon=True).start()
    return tokenizer


def lock_home(folder: Path, port: int) -> IO[str]:
    """Keep other servers out of a folder for as long as the file stays open. Raises SettingError when one is there."""
    file = (folder / "server.lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        other = file.read().strip() or "another process"
        file.close()
        raise SettingError(
            f"{folder} is in use by a localpaged server ({other}). Stop that one, or give this one a folder of its own "
            "with LOCALPAGED_HOME."
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()}, port {port}")
    file.flush()
    return file


def check_model(path: Path) -> None:
    """Refuse at once what can be seen to be no model that runs. Raises ModelError."""
    if path.is_file():
        read_header(path)
    elif not (path / "config.json").exists():
        raise ModelError(f"{path} is neither a GGUF file nor a folder with a config.json.")


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Raises SettingError when it is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    notice_dead_peers(listener)
    try:
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise SettingError(
                f"Port {port} is in use. Is localpaged running already? Stop it, or take another: --port {port + 1}."
            ) from error
        raise SettingError(f"Cannot listen on {host}:{port}: {error.strerror}. Check --host and --port.") from error
    return listener


async def _announce(
    address: str,
    engine: metrics.MeteredEngine | metrics.MeteredRemote,
    model: LocatedModel | None,
    open_browser: bool,
) -> None:
    if model is not None:
        print(f"Loading {model.name} …", flush=True)
    try:
        about = describe_model(await engine.wait_ready())
    except ModelError as error:
        if isinstance(engine, EngineClient):
            raise
        # Another server may come later.
        about = str(error)
    lines = [f"localpaged is ready:  {address}", "", about, "Stop it with Ctrl-C."]
    if model is not None and model.embedded:
        lines[3:3] = [
            "This embedded model is very small: good for trying things out, not for answers to rely on.",
            "A better one:  localpaged pull Qwen/Qwen3-0.6B  then  localpaged serve --model Qwen/Qwen3-0.6B",
        ]
    width = max(map(len, lines))
    print("\n".join(["", "┌" + "─" * (width + 2) + "┐", *(f"│ {line:<{width}} │" for line in lines)]))
    print("└" + "─" * (width + 2) + "┘\n", flush=True)
    if open_browser:
        await asyncio.to_thread(webbrowser.open, address)


def describe_model(info: ModelInfo | RemoteModel) -> str:
    """One line for the person who started it."""
    if isinstance(info, RemoteModel):
        return f"{info.name} on {info.address}"
    tokens = info.num_blocks * info.block_size
    return (
        f"{info.name} on {info.device}, {tokens:,} tokens of KV in {info.num_blocks:,} blocks, "
        f"longest conversation {info.longest_request:,} tokens"
    )


def _shown_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
