"""Asks a server for a work: at its times or as fast as may be, a bounded number at once, and keeps every outcome."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from localpaged.errors import LocalpagedError
from localpaged.load.chat_client import ChatClient, Outcome
from localpaged.load.workload import Chat, Question, words

# Of the two probes that tell how many tokens a word is.
PROBE_WORDS = (50, 250)


@dataclass(frozen=True, slots=True)
class Asking:
    """How a request is made of a question. extra: further fields of the body."""

    model: str | None = None
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    ignore_eos: bool = False
    max_concurrency: int | None = None
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def body(self, messages: list[dict[str, str]], max_tokens: int | None) -> dict[str, Any]:
        limits = [limit for limit in (self.max_tokens, max_tokens) if limit is not None]
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "n": self.n if self.n > 1 else None,
            "max_tokens": min(limits, default=None),
            "temperature": self.temperature,
            "ignore_eos": True if self.ignore_eos else None,
        }
        return {name: value for name, value in fields.items() if value is not None} | self.extra


class Replay:
    """One work on one server. outcomes grows while it runs, in the order in which requests end."""

    def __init__(self, client: ChatClient, asking: Asking, on_outcome: Callable[[Outcome], None]) -> None:
        self.client = client
        self.asking = asking
        self.outcomes: list[Outcome] = []
        self.num_skipped = 0
        self.max_late_s = 0.0
        self.began = 0.0
        self.words_per_token = 1.0
        self.extra_tokens = 0.0
        self._on_outcome = on_outcome
        self._room = asyncio.Semaphore(asking.max_concurrency or 1 << 30)

    async def calibrate(self) -> None:
        """Learn how many tokens a word and the template are, from two short requests.

        They also warm the server up. Raises LocalpagedError when it does not answer.
        """
        counts = []
        for place, count in enumerate(PROBE_WORDS):
            messages = [{"role": "user", "content": words(count, self.asking.seed - 1 - place)}]
            outcome = await self.client.ask({**self.asking.body(messages, 2), "n": 1})
            if outcome.error is not None:
                raise LocalpagedError(
                    f"{self.client.base_url} does not answer: {outcome.error}{_detail(outcome)}. Check --base-url,"
                    " --model and the key."
                )
            counts.append(outcome.prompt_tokens)
        first, second = counts
        if first and second and second > first:
            self.words_per_token = (PROBE_WORDS[1] - PROBE_WORDS[0]) / (second - first)
            self.extra_tokens = first - PROBE_WORDS[0] / self.words_per_token

    async def run(self, chats: list[Chat]) -> None:
        """Ask everything. A conversation goes on when its last answer is there, and ends when one fails."""
        self.began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for place, chat in enumerate(chats):
                if chat.arrival_s is not None:
                    await asyncio.sleep(max(self.began + chat.arrival_s - time.perf_counter(), 0))
                group.create_task(self._converse(chat, self.asking.seed + 1 + place))

    async def _converse(self, chat: Chat, seed: int) -> None:
        messages: list[dict[str, str]] = []
        due = None if chat.arrival_s is None else self.began + chat.arrival_s
        for place, question in enumerate(chat.questions):
            messages.append({"role": "user", "content": self._text(question, seed)})
            async with self._room:
                if place == 0 and due is not None:
                    self.max_late_s = max(self.max_late_s, time.perf_counter() - due)
                outcome = await self.client.ask(self.asking.body(messages, question.max_tokens))
            self.outcomes.append(outcome)
            self._on_outcome(outcome)
            if outcome.error is not None:
                self.num_skipped += len(chat.questions) - place - 1
                return
            messages.append({"role": "assistant", "content": outcome.answers[0].text})

    def _text(self, question: Question, seed: int) -> str:
        if question.text is not None:
            return question.text
        return words(max(round((question.num_tokens - self.extra_tokens) * self.words_per_token), 1), seed)


async def first_model(client: ChatClient) -> str:
    """The first model that a server names. Raises LocalpagedError when it names none."""
    try:
        names = await client.models()
    except httpx.HTTPError as error:
        raise LocalpagedError(
            f"{client.base_url}/models does not answer: {str(error) or type(error).__name__}. Start the server, or"
            " check --base-url and the key."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise LocalpagedError(f"{client.base_url}/models is no list of models. Check --base-url.") from error
    if not names:
        raise LocalpagedError(f"{client.base_url} serves no model. Give --model.")
    return names[0]


def _detail(outcome: Outcome) -> str:
    return f" ({outcome.detail})" if outcome.detail else ""
