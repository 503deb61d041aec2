"""A client that goes away ends its request in every state, whatever it asked for, and every block comes back."""

import asyncio
import json
import queue
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from api_server import MODEL, ApiEngine, serving, wait_until
from byte_model import BLOCK_SIZE, BYTES_PER_BLOCK, prompt

from localpaged import LLM, SamplingParams
from localpaged.engine.messages import Cancel, Delta, Event, Finished, Generate, Prefilled, Shutdown
from localpaged.engine.process import serve
from localpaged.engine.sampling_params import SamplingParams as Params
from localpaged.engine.sequence import Phase

CHAT: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/messages": {"model": MODEL, "messages": CHAT, "max_tokens": 40},
    "/api/chat": {"model": MODEL, "messages": CHAT},
    "/api/generate": {"model": MODEL, "prompt": "hi"},
}
WITH_N = ("/v1/chat/completions", "/v1/completions")


class StagedEngine(ApiEngine):
    """Requests stay at `stage`: "queued", "prefill" or "decode". arrived and left: how many came there and went."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = "queued"
        self.arrived = self.left = 0

    async def _stopping(self, events: AsyncIterator[Event], params: Params) -> AsyncIterator[Event]:
        try:
            if self.stage == "queued":
                await self._stay()
            async for event in super()._stopping(events, params):
                if self.stage == "prefill" and isinstance(event, Prefilled):
                    await self._stay()
                yield event
                if self.stage == "decode" and isinstance(event, Delta):
                    await self._stay()
        finally:
            self.left += 1

    async def _stay(self) -> None:
        self.arrived += 1
        await asyncio.Event().wait()


@pytest.fixture(scope="module")
def engine() -> StagedEngine:
    return StagedEngine()


@pytest.fixture(scope="module")
def server(engine: StagedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("cancel"), engine) as address:
        yield address


def begin(server: str, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection with a request on it."""
    host, port = server.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def reset(connection: socket.socket) -> None:
    """Go away without a word: the peer gets RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()


@pytest.mark.parametrize("stage", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", [socket.socket.close, reset])
def test_leaving_closes_the_request_in_every_state_of_every_api(
    server: str, engine: StagedEngine, stage: str, stream: bool, leave: Any
) -> None:
    engine.stage = stage
    wanted = [(path, body | {"stream": stream}) for path, body in BODIES.items()]
    wanted += [(path, BODIES[path] | {"stream": stream, "n": n}) for path in WITH_N for n in (2, 8)]
    before = engine.arrived
    connections = [begin(server, path, body) for path, body in wanted]
    wait_until(lambda: engine.arrived == before + len(wanted))
    ended = engine.ended
    for place, connection in enumerate(connections):
        leave(connection)
        # Its request and no other.
        wait_until(lambda place=place: engine.left >= engine.arrived - len(wanted) + place + 1)
        assert still_open(engine) == len(wanted) - place - 1
    assert engine.ended == ended


def still_open(engine: StagedEngine) -> int:
    return engine.arrived - engine.left


@pytest.fixture(scope="module")
def llm(byte_model: Path) -> LLM:
    """Room for one long request beside a short one; prompts are computed 16 tokens at a time."""
    settings: dict[str, Any] = {"block_size": BLOCK_SIZE, "dtype": "float32", "max_num_seqs": 9}
    return LLM(str(byte_model), kv_cache_memory=80 * BYTES_PER_BLOCK, max_num_batched_tokens=16, **settings)


def asked(name: str, length: int, salt: int = 0, **params: Any) -> Generate:
    settings = SamplingParams(max_tokens=30, ignore_eos="beam_width" not in params, **params)
    return Generate(request_id=name, params=settings, **prompt(length, salt))


@pytest.mark.parametrize("kind", [{"n": n} for n in range(1, 9)] + [{"best_of": 5, "n": 2}, {"beam_width": 4, "n": 4}])
@pytest.mark.parametrize("state", ["queued", "prefill", "last chunk", "decode"])
def test_cancelling_returns_every_block_at_once_and_leaves_the_neighbour_alone(
    llm: LLM, kind: dict[str, int], state: str
) -> None:
    core = llm._engine.core
    core.pool.forget_cached()
    core.submit(asked("neighbour", 9, salt=1))
    core.step()
    alone = core.pool.num_referenced
    core.submit(asked("r", 60, **kind))
    request = core.jobs["r"].request
    if state != "queued":
        core.step()
        assert request.phase is Phase.PREFILL and 0 < request.leader.num_computed < 60
    while state in ("last chunk", "decode") and request.phase is not Phase.DECODE:
        core.step()
    if state == "decode":
        core.step()
        core.step()
    events = core.cancel("r")
    ends = {event.index for event in events if isinstance(event, Delta) and event.finish_reason == "cancelled"}
    assert ends == set(range(kind["n"])) and isinstance(events[-1], Finished)
    assert len(core.jobs["neighbour"].request.leader.block_table) == core.pool.num_referenced <= alone + 2
    core.check()
    assert {event.request_id for event in core.step()} == {"neighbour"}
    core.cancel("neighbour")
    assert core.pool.num_referenced == 0 and not core.has_work
    core.check()


@pytest.mark.parametrize("at_step", [1, 2, 6])
def test_what_is_cancelled_during_a_step_is_in_no_further_one(
    llm: LLM, at_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = llm._engine.core
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    commands.put(asked("r", 60, n=3))
    step, num_steps = core.step, 0

    def counted() -> list[Event]:
        nonlocal num_steps
        num_steps += 1
        if num_steps == at_step:
            # As when it arrives while the model computes.
            commands.put(Cancel("r"))
            commands.put(Shutdown())
        return step()

    monkeypatch.setattr(core, "step", counted)
    monkeypatch.setattr(core.sessions, "close", lambda: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        serve(SimpleNamespace(core=core), commands, theirs)  # type: ignore[arg-type]
    assert num_steps == at_step
    assert core.pool.num_referenced == 0 and not core.has_work
    core.check()
