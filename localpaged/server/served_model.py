"""The one model behind the HTTP APIs: the names it answers to, and its prompts in the form that its engine takes."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from localpaged.engine.prompt import ChatPrompt, Prompt
from localpaged.errors import FeatureAbsentError, ModelError, ModelNotFoundError
from localpaged.models.chat_tokenizer import ChatTokenizer
from localpaged.models.tool_prompt import with_tools_as_text
from localpaged.server.engine_handle import EngineHandle
from localpaged.server.reasoning import begins_within
from localpaged.server.remote_engine import RemoteEngine

# Tokens that tell how a prompt ends.
PROMPT_END = 8


class TokenNames(Protocol):
    """What reports of log-probabilities need of a tokenizer."""

    def token_text(self, token_id: int, /) -> str: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


class ServedModel:
    """An engine's model under its names; those of another one are refused, never answered by this one."""

    def __init__(
        self,
        engine: EngineHandle,
        tokenizer_provider: Callable[[], ChatTokenizer] | None,
        served_names: list[str] | None,
    ) -> None:
        """served_names: what the model is called besides its own name. tokenizer_provider: None for a remote engine."""
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
        """Raises FeatureAbsentError where another server keeps it."""
        if self._tokenizer_provider is None:
            raise FeatureAbsentError(
                "This needs the model's tokenizer, which the server that answers does not give to others. Ask it there."
            )
        return await asyncio.to_thread(self._tokenizer_provider)

    async def token_names(self) -> TokenNames:
        """The texts of the tokens that events number."""
        return self._engine.vocabulary if isinstance(self._engine, RemoteEngine) else await self.tokenizer()

    async def begins_within(self, prompt: Prompt) -> bool:
        """Whether an answer to this begins within what the model thinks; a remote does not tell."""
        if not isinstance(prompt, list) or self._tokenizer_provider is None:
            return False
        return begins_within((await self.tokenizer()).decode(prompt[-PROMPT_END:]))

    async def plain_prompt(self, prompt: str | list[int]) -> Prompt:
        """A prompt that no template wraps: token ids are taken as they are."""
        if isinstance(prompt, list) or self._tokenizer_provider is None:
            return prompt
        return (await self.tokenizer()).encode_plain(prompt)

    async def tags_tool_calls(self) -> bool:
        """Whether calls of tools are to be expected between tags, as they are where the tools are told as text."""
        return self._tokenizer_provider is None or (await self.tokenizer()).tags_tool_calls

    async def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        begun: str = "",
        tools: list[dict[str, Any]] | None = None,
        think: bool | None = None,
    ) -> Prompt:
        """A conversation up to its next answer, of which begun is already written: token ids, or for a remote the text.

        tools: what may be called, as chat templates take it; a remote is told in the text. think: whether the
        model is to think first; None is as its template has it. Raises InvalidRequestError when the template refuses.
        """
        if self._tokenizer_provider is None:
            if think is not None:
                raise FeatureAbsentError("The server that answers decides whether its model thinks.", "think")
            return ChatPrompt(with_tools_as_text(messages, tools), begun)
        tokenizer = await self.tokenizer()
        rendered = tokenizer.render_chat(messages, tools=tools, think=think)
        return await asyncio.to_thread(tokenizer.encode, rendered + begun)
