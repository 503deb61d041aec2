"""HTTP to an OpenAI-compatible server: its models, its streams, and what its refusals mean.

Follows no redirect, uses no proxy of the environment, verifies certificates by the machine's store. The key is in a
header alone and in no message.
Source: https://platform.openai.com/docs/api-reference.
"""

import json
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx

from localpaged.errors import InvalidRequestError, LocalpagedError, RemoteAwayError, RemoteBusyError, RemoteError
from localpaged.server.remote_config import RemoteConfig
from localpaged.server.sse_reader import read_events

CONNECT_TIMEOUT_S = 10.0
MAX_BODY_BYTES = 4 << 20
MAX_SAID_CHARS = 600


class RefusedError(InvalidRequestError):
    """The server does not take a request as it is (400, 422). code: the server's own, where it has one."""


class RemoteClient:
    """One server. Belongs to the event loop that first uses it."""

    def __init__(self, config: RemoteConfig) -> None:
        self.address = config.base_url
        self._silence_s = config.timeout_s
        headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        self._http = httpx.AsyncClient(
            headers={"User-Agent": "localpaged", **headers},
            verify=ssl.create_default_context(),
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(config.timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=16, keepalive_expiry=2.0),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def models(self) -> list[dict[str, Any]]:
        """What /models lists. Raises RemoteError and its kinds."""
        with self._explaining(f"{CONNECT_TIMEOUT_S:g} s"):
            request = self._http.stream("GET", f"{self.address}/models", timeout=CONNECT_TIMEOUT_S)
            async with request as response:
                body = await _read(response)
                if response.status_code != 200:
                    raise self._refusal(response.status_code, body)
        try:
            listed = json.loads(body)["data"]
            return [model for model in listed if isinstance(model["id"], str)]
        except (ValueError, KeyError, TypeError) as error:
            raise RemoteError(
                f"{self.address}/models answers with something else than a list of models. Check --base-url."
            ) from error

    @asynccontextmanager
    async def answering(self, path: str, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Post a request; within, the chunks of its stream, up to [DONE] or its end. Leaving closes the connection.

        Raises RefusedError, or RemoteError and its kinds.
        """
        with self._explaining(f"--remote-timeout {self._silence_s:g}"):
            async with self._http.stream("POST", f"{self.address}{path}", json=body) as response:
                if response.status_code != 200:
                    raise self._refusal(response.status_code, await _read(response))
                kind = response.headers.get("content-type", "")
                if not kind.startswith("text/event-stream"):
                    raise RemoteError(
                        f"The server at {self.address} answers with {kind or 'no type'}, not with a stream."
                    )
                yield self._chunks(response)

    async def _chunks(self, response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        try:
            async for data in read_events(response.aiter_bytes()):
                if data.strip() == "[DONE]":
                    return
                chunk = json.loads(data)
                if not isinstance(chunk, dict):
                    raise ValueError("a chunk that is no object")
                if chunk.get("error"):
                    raise RemoteError(f"The server at {self.address} failed while it answered: {_said(chunk)}")
                yield chunk
        except ValueError as error:
            raise RemoteError(f"The server at {self.address} sent what is no chunk of an answer: {error}.") from error

    @contextmanager
    def _explaining(self, silence: str) -> Iterator[None]:
        """What goes wrong on the way, as an error that can be shown. silence: how long is too long."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            reason = str(error) or "no answer"
            raise RemoteAwayError(
                f"The server at {self.address} cannot be reached ({reason}). It is asked again by itself."
            ) from error
        except httpx.TimeoutException as error:
            raise RemoteError(
                f"The server at {self.address} was silent for too long ({silence}). What came is kept; send again."
            ) from error
        except httpx.HTTPError as error:
            raise RemoteError(
                f"The connection to {self.address} broke off ({str(error) or type(error).__name__}). What came is "
                "kept; send again."
            ) from error

    def _refusal(self, status: int, body: bytes) -> LocalpagedError:
        try:
            said = json.loads(body)
        except ValueError:
            said = body.decode(errors="replace")
        what, where = _said(said), self.address
        if status in (400, 422):
            return _refused(said, what)
        if status in (401, 403):
            return RemoteError(f"The server at {where} refuses the key ({status}). Check --remote-api-key-file.")
        if status == 404:
            return RemoteError(f"The server at {where} does not know this (404: {what}). Check --base-url and --model.")
        if status == 413:
            return InvalidRequestError(f"The request is too large for the server at {where} (413). Send less.")
        if status == 429:
            return RemoteBusyError(f"The server at {where} has too much to do (429: {what}). Try again later.")
        if 300 <= status < 400:
            return RemoteError(
                f"The server at {where} sends us elsewhere ({status}), where we do not go. Give the address itself as "
                "--base-url."
            )
        return RemoteError(f"The server at {where} failed ({status}: {what}). Its log may say why; try again.")


def _refused(said: Any, what: str) -> RefusedError:
    error = said.get("error", said) if isinstance(said, dict) else {}
    error = error if isinstance(error, dict) else {}
    param, code = error.get("param"), error.get("code")
    refused = RefusedError(what, param if isinstance(param, str) else None)
    refused.code = code if isinstance(code, str) else InvalidRequestError.code
    return refused


def _said(said: Any) -> str:
    """The message in an error's body: OpenAI's form, vLLM's older one, FastAPI's, or none."""
    if isinstance(said, dict):
        error = said.get("error", said)
        if isinstance(error, dict):
            detail = error.get("message") or error.get("detail") or error
            if isinstance(detail, list) and detail and isinstance(detail[0], dict):
                place = ".".join(str(part) for part in detail[0].get("loc", []) if part != "body")
                detail = f"{place}: {detail[0].get('msg')}"
        else:
            detail = error
    else:
        detail = said
    text = " ".join(str(detail).split())
    if text.startswith("<"):
        return "a page of HTML"
    return text if len(text) <= MAX_SAID_CHARS else text[: MAX_SAID_CHARS - 1] + "…"


async def _read(response: httpx.Response) -> bytes:
    """The body, up to a size that no honest one has."""
    body = b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            break
    return body
