"""One streamed chat completion, measured: when each answer's pieces came, what it used, and how it failed.

Source: https://platform.openai.com/docs/api-reference/chat/create (streaming, stream_options, n).
"""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(slots=True)
class AnswerTimes:
    """One of the answers to a request: its text, and when each piece of it came."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds of the same clock; error is its kind, None when all went well.

    prompt_tokens, cached_tokens and completion_tokens are the server's own count where it gives one.
    """

    begin: float
    end: float = 0.0
    answers: list[AnswerTimes] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None
    detail: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Until every answer has begun that has any text."""
        firsts = [answer.times[0] for answer in self.answers if answer.times]
        return max(firsts) - self.begin if firsts else None

    @property
    def num_tokens(self) -> int:
        """The server's count, else the pieces."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        return sum(len(answer.times) for answer in self.answers)

    def tokens_of(self, answer: AnswerTimes) -> float:
        """An answer's part of the tokens: usage is told for all answers together, so by its part of the pieces."""
        num_pieces = sum(len(one.times) for one in self.answers)
        return self.num_tokens * len(answer.times) / num_pieces if num_pieces else 0.0

    def time_per_token_s(self) -> list[float]:
        """Of each answer with two tokens or more, the mean time from one to the next."""
        found = []
        for answer in self.answers:
            count = self.tokens_of(answer)
            if len(answer.times) > 1 and count > 1:
                found.append((answer.times[-1] - answer.times[0]) / (count - 1))
        return found


class ChatClient:
    """A server's chat completions. base_url ends with /v1 or what stands for it."""

    def __init__(self, base_url: str, key: str | None, timeout_s: float) -> None:
        self.base_url = base_url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        host = httpx.URL(self.base_url).host
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=10),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            # A proxy for the world is none for this machine.
            trust_env=host not in ("127.0.0.1", "localhost", "::1"),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """The ids of what is served. Raises httpx.HTTPError, ValueError or KeyError."""
        answer = await self._http.get(f"{self.base_url}/models")
        answer.raise_for_status()
        return [str(model["id"]) for model in answer.json()["data"]]

    async def ask(self, body: dict[str, Any]) -> Outcome:
        """Send a request and read its stream to the end. What goes wrong is in the outcome, never raised."""
        wanted = int(body.get("n") or 1)
        outcome = Outcome(time.perf_counter(), answers=[AnswerTimes() for _ in range(wanted)])
        try:
            async with self._http.stream("POST", f"{self.base_url}/chat/completions", json=body) as response:
                if response.status_code != 200:
                    outcome.error = f"http {response.status_code}"
                    outcome.detail = _said(await response.aread())
                elif not response.headers.get("content-type", "").startswith("text/event-stream"):
                    outcome.error, outcome.detail = "no stream", _said(await response.aread())
                else:
                    await _follow(response, outcome)
        except httpx.TimeoutException as error:
            outcome.error, outcome.detail = "timeout", type(error).__name__
        except httpx.ConnectError as error:
            outcome.error, outcome.detail = "no connection", str(error)
        except httpx.TransportError as error:
            outcome.error, outcome.detail = "connection lost", str(error) or type(error).__name__
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            outcome.error, outcome.detail = "malformed stream", repr(error)
        outcome.end = time.perf_counter()
        return outcome


async def _follow(response: httpx.Response, outcome: Outcome) -> None:
    """Take every event of the stream; an end without a reason, or fewer answers than asked for, is an error."""
    async for data in _events(response):
        now = time.perf_counter()
        if data == b"[DONE]":
            break
        event = json.loads(data)
        if event.get("error"):
            outcome.error, outcome.detail = "error in the stream", _said(data)
            return
        if usage := event.get("usage"):
            outcome.prompt_tokens = usage.get("prompt_tokens")
            outcome.completion_tokens = usage.get("completion_tokens")
            outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        for choice in event.get("choices") or []:
            answer = outcome.answers[choice["index"]]
            delta = choice.get("delta") or {}
            piece = (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")
            if piece:
                answer.text += delta.get("content") or ""
                answer.times.append(now)
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    num_ended = sum(answer.finish_reason is not None for answer in outcome.answers)
    if num_ended == 0:
        outcome.error = "cut off"
    elif num_ended < len(outcome.answers):
        outcome.error, outcome.detail = "too few answers", f"{num_ended} of {len(outcome.answers)}"
    elif any(answer.finish_reason in ("error", "cancelled") for answer in outcome.answers):
        outcome.error = "answer failed"


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each server-sent event. Lines end with \\n alone: text may hold every other kind of line end."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def _said(body: bytes) -> str:
    """What an error answer says, in whatever form."""
    try:
        error = json.loads(body).get("error")
        return str(error.get("message") if isinstance(error, dict) else error)[:300]
    except (ValueError, AttributeError):
        return body[:300].decode(errors="replace")
