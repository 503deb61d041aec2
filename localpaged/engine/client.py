"""The server's handle on one engine process: start, generate, cancel, audit; it starts a dead one again."""

from collections.abc import AsyncIterator
from typing import Literal

from localpaged.engine.messages import Event, ModelInfo
from localpaged.engine.sampling_params import SamplingParams


class EngineClient:
    """One engine process. All methods belong to the event loop that called start()."""

    info: ModelInfo | None = None
    state: Literal["starting", "ready", "dead", "stopped"] = "stopped"
    start_error: str | None = None

    async def start(self) -> None:
        """Launch the process; returns at once. wait_ready() tells when the model is loaded."""
        raise NotImplementedError

    async def wait_ready(self) -> ModelInfo:
        """Wait for the model. Raises ModelError with the child's message when it cannot be loaded."""
        raise NotImplementedError

    def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[Event]:
        """Submit one request and yield its events until Finished or Failed.

        Restarts a dead process first. When the process dies under the request the last event is
        Failed with code "engine_dead". Closing the iterator early cancels the request.
        """
        raise NotImplementedError

    async def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its candidates, within one step. Unknown ids are ignored."""
        raise NotImplementedError

    async def stats(self) -> dict[str, int | float | str | bool]:
        """The pool's audit: block_size, num_blocks, free, cached, referenced, shared, waste_tokens, ..."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End the process and wait for it."""
        raise NotImplementedError
