"""The one model behind the HTTP APIs: the names it answers to and its tokenizer."""

import asyncio
from collections.abc import Callable
from typing import Any

from localpaged.engine.client import EngineClient
from localpaged.errors import ModelError, ModelNotFoundError
from localpaged.models.chat_tokenizer import ChatTokenizer


class ServedModel:
    """An engine's model under its names; those of another one are refused, never answered by this one."""

    def __init__(
        self, engine: EngineClient, tokenizer_provider: Callable[[], ChatTokenizer], served_names: list[str] | None
    ) -> None:
        """served_names: what the model is called besides its own name."""
        self._engine = engine
        self._tokenizer_provider = tokenizer_provider
        self._served_names = served_names or []

    async def names(self) -> list[str]:
        """All its names, once it is loaded. Raises ModelError when it cannot be."""
        if self._engine.state != "dead":
            await self._engine.wait_ready()
        own = [self._engine.info.name] if self._engine.info is not None else []
        names = list(dict.fromkeys([*self._served_names, *own]))
        if not names:
            raise ModelError(self._engine.start_error or "No model is loaded.")
        return names

    async def named(self, asked: str | None) -> str:
        """The name for the answer to a request that asked for one, or for any. Raises ModelNotFoundError."""
        known = await self.names()
        if asked is not None and asked not in known:
            raise ModelNotFoundError(f"The model {asked!r} is not served here. Served: {', '.join(known)}.", "model")
        return asked or known[0]

    async def tokenizer(self) -> ChatTokenizer:
        return await asyncio.to_thread(self._tokenizer_provider)

    async def chat_prompt(
        self, messages: list[dict[str, Any]], begun: str = "", tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """The token ids of a conversation up to its next answer, of which begun is already written.

        tools: what may be called, as chat templates take it. Raises InvalidRequestError when the model's template
        refuses the messages.
        """
        tokenizer = await self.tokenizer()
        return await asyncio.to_thread(tokenizer.encode, tokenizer.render_chat(messages, tools=tools) + begun)
