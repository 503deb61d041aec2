"""What the server needs of an engine, be it a process of its own (EngineClient) or another server (RemoteEngine)."""

from collections.abc import AsyncIterator
from typing import Literal, Protocol

import msgspec

from localpaged.engine.features import Features
from localpaged.engine.messages import Event, ModelInfo, Residency
from localpaged.engine.prompt import Prompt
from localpaged.engine.sampling_params import SamplingParams


class RemoteModel(msgspec.Struct, kw_only=True):
    """What another server tells of its model. max_model_len: in tokens; owner: the software that runs it."""

    name: str
    address: str
    max_model_len: int | None = None
    owner: str | None = None


class EngineHandle(Protocol):
    """As in EngineClient, where each method is described. Without KV of our own the methods for it do nothing."""

    @property
    def features(self) -> Features: ...

    @property
    def info(self) -> ModelInfo | RemoteModel | None: ...

    @property
    def state(self) -> Literal["starting", "ready", "dead", "stopped"]: ...

    @property
    def start_error(self) -> str | None: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def restart_if_dead(self) -> None: ...

    async def wait_ready(self) -> ModelInfo | RemoteModel: ...

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        conversation: str | None = None,
        lease_ids: list[str] | None = None,
        goes_on: bool = False,
    ) -> AsyncIterator[Event]: ...

    async def cancel(self, request_id: str, index: int | None = None) -> None: ...

    def choose_lease(self, lease_id: str) -> None: ...

    def pin(self, conversation: str, pinned: bool) -> None: ...

    def drop_leases(self, conversation: str | None = None, lease_ids: list[str] | None = None) -> None: ...

    def warm(self, conversation: str, token_ids: list[int]) -> None: ...

    async def residency(self) -> list[Residency]: ...

    async def stats(self) -> dict[str, int | float | str | bool]: ...
