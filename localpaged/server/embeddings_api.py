"""/v1/embeddings: the mean of the chat model's last hidden states over a text's tokens, scaled to length 1.

That is all it is: the model was not trained to put like texts near each other, so an embedding model will search
better. Nothing of a text is cut off. Source: https://platform.openai.com/docs/api-reference/embeddings.
"""

import base64
import uuid
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, Response

from localpaged.engine.client import EngineClient
from localpaged.engine.embedding import unit_length
from localpaged.engine.messages import Event, Failed, Finished, Prefilled
from localpaged.engine.sampling_params import SamplingParams
from localpaged.errors import InvalidRequestError
from localpaged.models.chat_tokenizer import ChatTokenizer
from localpaged.server.generation import CLIENT_CLOSED, as_error, merge, while_connected
from localpaged.server.openai_schema import TokenId
from localpaged.server.served_model import ServedModel

MAX_INPUTS = 2048


class EmbeddingsBody(BaseModel):
    """input: a text, token ids, or a list of either. dimensions can only be what the model has."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input: str | list[str] | list[TokenId] | list[list[TokenId]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None

    def inputs(self) -> list[str | list[int]]:
        """Each input on its own. Raises InvalidRequestError."""
        given: Any = self.input
        inputs = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
        if not inputs or not all(inputs):
            raise InvalidRequestError("input is empty, or has an empty text. Give at least a word.", "input")
        if len(inputs) > MAX_INPUTS:
            raise InvalidRequestError(f"input has {len(inputs):,} texts; {MAX_INPUTS:,} at once are taken.", "input")
        return inputs


def router(
    engine: EngineClient, tokenizer_provider: Callable[[], ChatTokenizer], served_names: list[str] | None = None
) -> APIRouter:
    """The route. served_names: what the model is called besides its own name."""
    routes = APIRouter(tags=["openai"])
    served = ServedModel(engine, tokenizer_provider, served_names)

    @routes.post("/v1/embeddings", response_model=None)
    async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
        """The mean of the chat model's last hidden states, of length 1. No embedding model: see the docs."""
        model = await served.named(body.model)
        tokenizer = await served.tokenizer()
        prompts = [tokenizer.encode_plain(one) if isinstance(one, str) else one for one in body.inputs()]
        request_id, params = f"embed-{uuid.uuid4().hex}", SamplingParams(max_tokens=1)
        events = merge(
            [engine.generate(prompt, params, f"{request_id}-{i}", embeds=True) for i, prompt in enumerate(prompts)]
        )
        found = await while_connected(request, _collect(events, len(prompts)))
        if found is None:
            return Response(status_code=CLIENT_CLOSED)
        vectors, num_tokens = found
        if body.dimensions not in (None, len(vectors[0])):
            raise InvalidRequestError(f"This model's embeddings have {len(vectors[0])} dimensions.", "dimensions")
        written = [_base64(vector) if body.encoding_format == "base64" else vector for vector in vectors]
        data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(written)]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return JSONResponse({"object": "list", "data": data, "model": model, "usage": usage})

    return routes


async def _collect(events: AsyncIterator[tuple[int, Event]], count: int) -> tuple[list[list[float]], int]:
    """Each prompt's embedding, and the tokens of all. Raises what a Failed event stands for."""
    vectors: list[list[float]] = [[]] * count
    num_tokens = 0
    async for prompt, event in events:
        if isinstance(event, Failed):
            raise as_error(event)
        if isinstance(event, Prefilled) and event.embedding is not None:
            vectors[prompt] = unit_length(event.embedding)
        elif isinstance(event, Finished):
            num_tokens += event.num_prompt_tokens or 0
    return vectors, num_tokens


def _base64(vector: list[float]) -> str:
    """Little-endian float32, as the official clients ask for it."""
    packed = array("f", vector)
    return base64.b64encode(packed.tobytes()).decode()
