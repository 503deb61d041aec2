"""The application on the real engine and the embedded model: python serve_default_model.py PORT FOLDER."""

import functools
import sys
from pathlib import Path

import uvicorn

from localpaged.engine.client import EngineClient
from localpaged.engine.config import EngineConfig
from localpaged.models.chat_tokenizer import load_tokenizer
from localpaged.models.locate import locate_model
from localpaged.server.app import AppSettings, create_app
from localpaged.store.store import Store
from localpaged.ui.page import page


def main() -> None:
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    model = locate_model(None)
    engine = EngineClient(EngineConfig(model=str(model.path), name=model.name, kv_cache_memory=1 << 30))
    tokenizer = functools.cache(lambda: load_tokenizer(model.path))
    app = create_app(engine, Store(folder / "chats.db"), tokenizer, AppSettings(is_default_model=True), page())
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
