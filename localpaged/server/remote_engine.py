"""Another server in the engine's place: any that speaks OpenAI's API (vLLM, SGLang, Ray Serve, another localpaged).

Keeps watch on whether that server is there. Knows no tokens: prompts are messages or text, and what the server does
not count is not known.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from typing import Literal

from localpaged.engine.features import Features
from localpaged.engine.messages import Event, Failed, Residency
from localpaged.engine.prompt import ChatPrompt, Prompt
from localpaged.engine.sampling_params import SamplingParams
from localpaged.errors import (
    EngineDeadError,
    FeatureAbsentError,
    LocalpagedError,
    ModelError,
    RemoteAwayError,
    RemoteError,
)
from localpaged.server.engine_handle import RemoteModel
from localpaged.server.remote_body import Quirks, check_params
from localpaged.server.remote_client import RemoteClient
from localpaged.server.remote_config import RemoteConfig
from localpaged.server.remote_request import RemoteRequest
from localpaged.server.remote_vocabulary import RemoteVocabulary

logger = logging.getLogger(__name__)

READY_EVERY_S = 15.0
AWAY_EVERY_S = 2.0
# Whose servers go on from an answer that has begun (continue_final_message).
CONTINUERS = frozenset({"vllm"})


class RemoteEngine:
    """As EngineClient where the server uses it. All methods belong to the event loop that called start()."""

    def __init__(self, config: RemoteConfig, away_every_s: float = AWAY_EVERY_S) -> None:
        self.address = config.base_url
        self.info: RemoteModel | None = None
        self.state: Literal["starting", "ready", "dead", "stopped"] = "stopped"
        self.start_error: str | None = None
        self.vocabulary = RemoteVocabulary()
        self.quirks = Quirks()
        self._config = config
        self._away_every_s = away_every_s
        self._client: RemoteClient | None = None
        self._watching: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._looking = asyncio.Lock()
        self._requests: dict[str, RemoteRequest] = {}
        self._ids = itertools.count()
        self._counters = {"prompt_tokens": 0, "cached_tokens": 0, "generated_tokens": 0}

    @property
    def features(self) -> Features:
        continues = self.info is not None and self.info.owner in CONTINUERS
        return Features(kv=False, token_count=False, continue_answer=continues)

    async def start(self) -> None:
        """Begin to look for the server; returns at once."""
        if self._watching is None:
            self.state, self.start_error = "starting", None
            self._client = RemoteClient(self._config)
            self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Close what runs."""
        self.state = "stopped"
        self._settled.set()
        for request in list(self._requests.values()):
            request.cancel()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        if self._client is not None:
            await self._client.close()

    async def restart_if_dead(self) -> None:
        """Look once more for a server that was not there."""
        if self.state == "dead":
            await self._look()

    async def wait_ready(self) -> RemoteModel:
        """Wait until the server was asked for its models. Raises ModelError with what was wrong with it."""
        await self._settled.wait()
        if self.info is None or self.state != "ready":
            raise ModelError(self.start_error or "The server is stopped.")
        return self.info

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        conversation: str | None = None,
        lease_ids: list[str] | None = None,
        goes_on: bool = False,
    ) -> AsyncIterator[Event]:
        """Submit one request and yield its events until Finished or Failed. Closing the iterator early cancels it."""
        request_id = request_id or f"request-{next(self._ids)}"
        try:
            await self.restart_if_dead()
            model = (await self.wait_ready()).name
            check_params(params)
            if isinstance(prompt, ChatPrompt) and prompt.begun and not self.features.continue_answer:
                raise FeatureAbsentError(
                    f"The server at {self.address} is not known to go on from an answer that has begun. Ask for more "
                    "in a message.",
                    "messages",
                )
        except LocalpagedError as error:
            param = getattr(error, "param", None)
            yield Failed(request_id=request_id, code=error.code, message=str(error), param=param)
            return
        assert self._client is not None
        request = RemoteRequest(self._client, self.quirks, self.vocabulary, model, prompt, params, request_id)
        self._requests[request_id] = request
        events = request.events()
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()  # type: ignore[attr-defined]
            self._requests.pop(request_id, None)
            self._note(request)

    async def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its candidates; what the server does then is in RemoteRequest."""
        if request_id in self._requests:
            self._requests[request_id].cancel(index)

    async def stats(self) -> dict[str, int | float | str | bool]:
        """What the server has counted for us. Raises EngineDeadError when it is not there."""
        if self.state != "ready":
            raise EngineDeadError(self.start_error or f"The server is {self.state}.")
        return {"running": sum(request.num_running for request in self._requests.values()), **self._counters}

    # The server keeps its KV as it likes.

    def choose_lease(self, lease_id: str) -> None: ...

    def pin(self, conversation: str, pinned: bool) -> None: ...

    def drop_leases(self, conversation: str | None = None, lease_ids: list[str] | None = None) -> None: ...

    def warm(self, conversation: str, token_ids: list[int]) -> None: ...

    async def residency(self) -> list[Residency]:
        return []

    def _note(self, request: RemoteRequest) -> None:
        """Add up what was counted; a server that could not be reached is away."""
        counts = (request.num_prompt_tokens, request.num_cached_tokens, request.num_generated_tokens)
        for name, count in zip(self._counters, counts, strict=True):
            self._counters[name] += count or 0
        if isinstance(request.error, RemoteAwayError) and self.state == "ready":
            self._lost(str(request.error))

    async def _watch(self) -> None:
        while True:
            # Who is answering is there, and may be slow with other things.
            if not self._requests:
                await self._look()
            await asyncio.sleep(READY_EVERY_S if self.state == "ready" else self._away_every_s)

    async def _look(self) -> None:
        """Ask the server for its models, and go by what it says."""
        async with self._looking:
            try:
                self.info = await self._find_model()
            except LocalpagedError as error:
                self._lost(str(error))
            except Exception:
                logger.exception("asking the server at %s for its models failed", self.address)
                self._lost(f"Asking the server at {self.address} for its models failed; the log says why.")
            else:
                if self.state == "dead":
                    logger.info("the server at %s is there", self.address)
                if self.state != "stopped":
                    self.state, self.start_error = "ready", None
            self._settled.set()

    def _lost(self, why: str) -> None:
        if self.state != "stopped":
            if self.start_error != why:
                logger.warning("%s", why)
            self.state, self.start_error = "dead", why

    async def _find_model(self) -> RemoteModel:
        assert self._client is not None
        listed = {model["id"]: model for model in await self._client.models()}
        wanted = self._config.model
        if not listed:
            raise RemoteError(f"The server at {self.address} lists no model. It may still be loading one.")
        if wanted is not None and wanted not in listed:
            raise RemoteError(
                f"The server at {self.address} does not serve {wanted!r}. Give one of these as --model: "
                f"{', '.join(list(listed)[:8])}."
            )
        model = listed[wanted] if wanted is not None else next(iter(listed.values()))
        window, owner = model.get("max_model_len"), model.get("owned_by")
        return RemoteModel(
            name=model["id"],
            address=self.address,
            max_model_len=window if isinstance(window, int) else None,
            owner=owner if isinstance(owner, str) else None,
        )
