"""A crowd of clients that use every API of one server at random, leave at random and send what is wrong.

Each client is a loop with random numbers of its own; what came of each request is kept as an Outcome. Knows nothing of
the server's process.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from load_requests import COLOUR, JSON_HEADERS, SYSTEM, TOOL, WORDS, bad_requests


@dataclass(slots=True)
class Outcome:
    """One request. began: seconds since the crowd's beginning. first_s: until the first text of an answer.

    left: the client went away before the end. fault: what was not as it should be.
    """

    kind: str
    client: int
    began: float
    took_s: float = 0.0
    status: int = 0
    first_s: float | None = None
    left: bool = False
    fault: str | None = None


class _LeftError(Exception):
    """The client goes away here, as it meant to."""


class Crowd:
    """num_clients clients. length: (fewest, most) tokens of an answer. long_words: of a long prompt."""

    def __init__(
        self,
        base_url: str,
        model: str,
        num_clients: int,
        seed: int,
        length: tuple[int, int] = (4, 40),
        long_words: int = 900,
    ) -> None:
        self.base_url = base_url
        self.model = model
        self.num_clients = num_clients
        self.seed = seed
        self.length = length
        self.long_words = long_words
        self.outcomes: list[Outcome] = []
        self.begun_at = 0.0
        self.stopping = False

    async def run(self, seconds: float) -> None:
        """Let all of them ask until the time is over, and what then runs come to its end."""
        self.begun_at = time.perf_counter()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.num_clients)
        async with httpx.AsyncClient(base_url=self.base_url, timeout=600, limits=limits, trust_env=False) as http:
            clients = [asyncio.create_task(self._client(http, number)) for number in range(self.num_clients)]
            await asyncio.wait(clients, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            self.stopping = True
            await asyncio.gather(*clients)

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        one = Client(self, http, number)
        while not self.stopping:
            await one.do_something()
            await asyncio.sleep(one.random.random() * 0.2)


class Client:
    """One of the crowd."""

    def __init__(self, crowd: Crowd, http: httpx.AsyncClient, number: int) -> None:
        self.crowd = crowd
        self.http = http
        self.number = number
        self.random = random.Random(crowd.seed * 1000 + number)

    async def do_something(self) -> None:
        """One request of a random kind, or a conversation of several."""
        kinds: list[tuple[Callable[[], Any], int]] = [
            (self.chat, 24),
            (self.completion, 8),
            (self.response, 8),
            (self.message, 8),
            (self.ollama, 8),
            (self.conversation, 12),
            (self.bad_request, 20),
            (self.vanish, 6),
            (self.look_around, 6),
        ]
        (act,) = self.random.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
        await act()

    @contextmanager
    def request(self, kind: str) -> Iterator[Outcome]:
        """The outcome of what is done within."""
        start = time.perf_counter()
        outcome = Outcome(kind, self.number, start - self.crowd.begun_at)
        self.crowd.outcomes.append(outcome)
        try:
            yield outcome
        except (_LeftError, TimeoutError):
            outcome.left = True
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
            outcome.fault = repr(error)
        finally:
            outcome.took_s = time.perf_counter() - start

    def text(self) -> str:
        """Mostly short; now and then as another client's, or long."""
        kind = self.random.random()
        if kind < 0.1:
            return "What does the keeper do at night?"
        count = self.random.randint(self.crowd.long_words // 2, self.crowd.long_words) if kind > 0.95 else 40
        return " ".join(self.random.choices(WORDS, k=self.random.randint(1, count) if count == 40 else count)) + "?"

    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": SYSTEM}] if self.random.random() < 0.5 else []
        return [*system, {"role": "user", "content": self.text()}]

    def num_tokens(self) -> int:
        return self.random.randint(*self.crowd.length)

    def n(self) -> int:
        return self.random.choice([1, 1, 1, 2, 3, 4, 5, 8])

    async def chat(self) -> None:
        n = self.n()
        body: dict[str, Any] = {"model": self.crowd.model, "messages": self.messages(), "n": n}
        body |= {"max_tokens": self.num_tokens(), "temperature": self.random.choice([0, 0.7, 1.3])}
        special, kind = self.random.random(), "chat"
        if special < 0.12:
            kind = "chat, schema"
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR}}
        elif special < 0.24:
            kind = "chat, tools"
            body |= {"tools": [TOOL], "tool_choice": self.random.choice(["auto", "required"])}
        elif special < 0.34:
            body |= {"logprobs": True, "top_logprobs": 2}
        elif special < 0.44:
            body |= {"seed": 7, "stop": ["."], "presence_penalty": 0.5}
        await self.ask_openai(kind, "/v1/chat/completions", body, n)

    async def completion(self) -> None:
        n, prompts = self.n(), [self.text() for _ in range(self.random.choice([1, 1, 2]))]
        body = {"model": self.crowd.model, "prompt": prompts, "n": n, "max_tokens": self.num_tokens()}
        await self.ask_openai("completion", "/v1/completions", body, n * len(prompts))

    async def ask_openai(self, kind: str, path: str, body: dict[str, Any], num_choices: int) -> None:
        if self.random.random() < 0.35:
            await self.whole(kind, path, body, lambda answer: len(answer["choices"]) == num_choices)
            return
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        ends: set[int] = set()

        def take(data: str) -> tuple[bool, bool]:
            if data == "[DONE]":
                return False, len(ends) == num_choices
            event = json.loads(data)
            if "error" in event:
                raise ValueError(f"an error in the stream: {event['error']}")
            text = False
            for choice in event["choices"]:
                delta = choice.get("delta") or choice
                text |= bool(delta.get("content") or delta.get("text") or delta.get("tool_calls"))
                if choice["finish_reason"] is not None:
                    ends.add(choice["index"])
            return text, False

        await self.stream(f"{kind}, streamed", path, body, take)

    async def response(self) -> None:
        body: dict[str, Any] = {"input": self.text(), "max_output_tokens": self.num_tokens()}
        body["store"] = self.random.random() < 0.4
        kind = "response, kept" if body["store"] else "response"
        if self.random.random() < 0.4:
            await self.whole(kind, "/v1/responses", body, lambda answer: len(answer["output"]) == 1)
            return

        def take(data: str) -> tuple[bool, bool]:
            event = json.loads(data)
            if event["type"] in ("error", "response.failed"):
                raise ValueError(f"an error in the stream: {data}")
            return event["type"].endswith("delta"), event["type"] in ("response.completed", "response.incomplete")

        await self.stream(f"{kind}, streamed", "/v1/responses", body | {"stream": True}, take)

    async def message(self) -> None:
        body: dict[str, Any] = {"model": self.crowd.model, "max_tokens": self.num_tokens()}
        body["messages"] = [{"role": "user", "content": self.text()}]
        if self.random.random() < 0.4:
            await self.whole("message", "/v1/messages", body, lambda answer: answer["stop_reason"] is not None)
            return

        def take(data: str) -> tuple[bool, bool]:
            event = json.loads(data)
            if event["type"] == "error":
                raise ValueError(f"an error in the stream: {data}")
            return event["type"] == "content_block_delta", event["type"] == "message_stop"

        await self.stream("message, streamed", "/v1/messages", body | {"stream": True}, take)

    async def ollama(self) -> None:
        body: dict[str, Any] = {"model": self.crowd.model, "messages": self.messages()}
        body["options"] = {"num_predict": self.num_tokens()}
        if self.random.random() < 0.4:
            await self.whole("ollama", "/api/chat", body | {"stream": False}, lambda answer: answer["done"])
            return

        def take(data: str) -> tuple[bool, bool]:
            event = json.loads(data)
            if "error" in event:
                raise ValueError(f"an error in the stream: {data}")
            return bool(event["message"]["content"]), event["done"]

        await self.stream("ollama, streamed", "/api/chat", body, take)

    async def whole(self, kind: str, path: str, body: dict[str, Any], is_right: Callable[[Any], Any]) -> None:
        """A request that is answered at once; one of ten does not wait for it."""
        patience_s = self.random.random() * 3 if self.random.random() < 0.1 else None
        with self.request(kind) as outcome:
            answer = await asyncio.wait_for(self.http.post(path, json=body), patience_s)
            outcome.status = answer.status_code
            if answer.status_code != 200:
                raise ValueError(f"{answer.status_code}: {answer.text[:300]}")
            if not is_right(answer.json()):
                raise ValueError(f"a wrong answer: {answer.text[:300]}")

    async def stream(
        self, kind: str, path: str, body: dict[str, Any], take: Callable[[str], tuple[bool, bool]]
    ) -> None:
        """A streamed request; two of ten leave in the middle. take(data) -> (is it text, is it the end)."""
        pieces_until_left = self.random.choice([0, 1, 2, 5, 20]) if self.random.random() < 0.2 else None
        with self.request(kind) as outcome:
            if pieces_until_left == 0:
                # Most likely before anything came.
                await asyncio.wait_for(self.http.post(path, json=body), self.random.random())
                return
            start = time.perf_counter()
            async with self.http.stream("POST", path, json=body) as response:
                outcome.status = response.status_code
                if response.status_code != 200:
                    raise ValueError(f"{response.status_code}: {(await response.aread())[:300]!r}")
                ended, count = False, 0
                async for data in pieces_of(response):
                    count += 1
                    if count == pieces_until_left:
                        raise _LeftError
                    is_text, ended = take(data)
                    if is_text and outcome.first_s is None:
                        outcome.first_s = time.perf_counter() - start
                if not ended:
                    raise ValueError(f"cut off after {count} pieces")

    async def call(
        self, kind: str, method: str, path: str, body: Any = None, expected: tuple[int, ...] = (200,)
    ) -> Any:
        """A call that is answered at once; its JSON, or None where it was refused."""
        with self.request(kind) as outcome:
            answer = await self.http.request(method, path, json=body)
            outcome.status = answer.status_code
            if answer.status_code not in expected:
                raise ValueError(f"{answer.status_code}: {answer.text[:300]}")
            return answer.json() if answer.status_code < 300 else None

    async def conversation(self) -> None:
        """As the page does it: ask, watch, stop some, choose, go on, regenerate, continue, delete."""
        made = await self.call("page", "POST", "/api/conversations", {"system_prompt": SYSTEM}, (201,))
        if made is None:
            return
        here = f"/api/conversations/{made['conversation']['id']}"
        parent = None
        for _ in range(self.random.randint(1, 3)):
            parent = await self.turn(here, parent)
            if parent is None or self.crowd.stopping:
                break
        await self.call("page", "DELETE", here)

    async def turn(self, here: str, parent: int | None) -> int | None:
        """One turn of a conversation; the answer to go on from, or None."""
        sampling = {"n": self.n(), "max_tokens": self.num_tokens(), "temperature": 0.9}
        body = {"parent": parent, "text": self.text(), "sampling": sampling}
        job = await self.call("page", "POST", f"{here}/messages", body, (202,))
        if job is None or not await self.watch(job["job"], sampling["n"]):
            return None
        view = await self.call("page", "GET", here)
        if view and view["open_candidates"]:
            chosen = self.random.choice(view["open_candidates"])["id"]
            view = await self.call("page", "POST", f"/api/messages/{chosen}/choose", {})
        if not view or not view["turns"] or view["turns"][-1]["message"]["role"] != "assistant":
            return None
        answer = view["turns"][-1]["message"]["id"]
        more = self.random.random()
        if more < 0.2:
            # Refused where the answer is complete.
            again = {"sampling": {"max_tokens": self.num_tokens()}}
            job = await self.call("page", "POST", f"/api/messages/{answer}/continue", again, (202, 400))
        elif more < 0.4:
            again = {"sampling": {"n": 2, "max_tokens": self.num_tokens()}}
            user = view["turns"][-2]["message"]["id"]
            job = await self.call("page", "POST", f"/api/messages/{user}/regenerate", again, (202,))
        else:
            return int(answer)
        return int(answer) if job is None or await self.watch(job["job"], 1) else None

    async def watch(self, job: str, n: int) -> bool:
        """Follow a job's events, reconnect, stop some answers or all; False when the client leaves it running."""
        cursor, ended, num_events = 0, False, 0
        act_at = self.random.randint(1, 12)
        act = self.random.choice(["stop one", "stop all", "reconnect", "leave", "", "", "", ""])
        with self.request("page, events") as outcome:
            start = time.perf_counter()
            while not ended:
                headers = {"Last-Event-ID": str(cursor)} if cursor else {}
                async with self.http.stream("GET", f"/api/jobs/{job}/events", headers=headers) as response:
                    outcome.status = response.status_code
                    if response.status_code == 204:
                        break
                    async for line in response.aiter_lines():
                        if line.startswith("id: "):
                            cursor = int(line[4:])
                        if not line.startswith("data: "):
                            continue
                        event = json.loads(line[6:])
                        if event["type"] == "tokens" and outcome.first_s is None:
                            outcome.first_s = time.perf_counter() - start
                        error = event.get("error") if event["type"] == "done" else None
                        # A conversation may come to fill the pool.
                        if event["type"] == "unsaved" or (error and error["code"] != "context_length_exceeded"):
                            raise ValueError(line)
                        ended |= event["type"] == "done"
                        num_events += 1
                        if num_events == act_at and act == "leave":
                            raise _LeftError
                        if num_events == act_at and act == "reconnect":
                            break
                        if num_events == act_at and act.startswith("stop"):
                            some = [self.random.randrange(n)] if act == "stop one" else None
                            await self.call("page, stop", "POST", f"/api/jobs/{job}/stop", {"candidates": some})
            return True
        return False

    async def bad_request(self) -> None:
        """What is refused, with the status that it must get."""
        method, path, content, expected = self.random.choice(bad_requests(self.crowd.model))
        with self.request("bad request") as outcome:
            answer = await self.http.request(method, path, content=content, headers=JSON_HEADERS)
            outcome.status = answer.status_code
            if answer.status_code != expected:
                raise ValueError(f"{answer.status_code} in place of {expected} for {method} {path} {content[-150:]!r}")

    async def vanish(self) -> None:
        """A connection that ends at a random byte of a request, in good order or not."""
        url = httpx.URL(self.crowd.base_url)
        content = json.dumps({"model": self.crowd.model, "messages": self.messages(), "n": 3, "stream": True}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nContent-Type: application/json\r\n"
        )
        request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        with self.request("vanish"):
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(request[: self.random.choice([self.random.randrange(len(request)), len(request)])])
            await asyncio.sleep(self.random.random())
            if self.random.random() < 0.5:
                writer.transport.abort()
            else:
                writer.close()
            raise _LeftError

    async def look_around(self) -> None:
        for path in ("/health", "/api/kv", "/api/conversations", "/v1/models", "/metrics", "/api/state"):
            with self.request("look") as outcome:
                outcome.status = (await self.http.get(path)).status_code
                if outcome.status != 200:
                    raise ValueError(f"{outcome.status} for {path}")


async def pieces_of(response: httpx.Response) -> AsyncIterator[str]:
    """The data of server-sent events, or lines of JSON."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line[6:]
        elif line.startswith("{"):
            yield line
