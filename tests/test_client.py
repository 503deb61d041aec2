"""The engine in a process of its own: streams, cancels, dies, and is started again."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tiny_models import save_model

from localpaged.engine.client import EngineClient
from localpaged.engine.config import EngineConfig
from localpaged.engine.messages import Admitted, Delta, DropLeases, Event, Failed, Finished, ModelInfo, Ready
from localpaged.engine.sampling_params import SamplingParams
from localpaged.errors import EngineDeadError, ModelError

pytestmark = pytest.mark.slow
Work = Callable[[EngineClient], Awaitable[None]]
PROMPT = [5, 6, 7, 8] * 5


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("tiny")
    save_model("llama", folder)
    vocabulary = ", ".join(f'"t{i}": {i}' for i in range(320))
    (folder / "tokenizer.json").write_text(
        '{"version": "1.0", "added_tokens": [], "decoder": null, "model": {"type": "WordLevel", "vocab": {'
        + vocabulary
        + '}, "unk_token": "t0"}}'
    )
    return EngineConfig(model=str(folder), name="tiny", kv_cache_memory=1 << 22, max_num_seqs=8)


def with_client(config: EngineConfig, work: Work) -> None:
    async def run() -> None:
        client = EngineClient(config)
        await client.start()
        try:
            await work(client)
        finally:
            await client.stop()

    asyncio.run(run())


@pytest.fixture(scope="module")
def on_shared_client(config: EngineConfig) -> Iterator[Callable[[Work], None]]:
    """Run work on one client whose engine is ready and goes on from test to test; each leaves it empty and sound."""
    with asyncio.Runner() as runner:
        client = EngineClient(config)
        runner.run(client.start())
        runner.run(client.wait_ready())

        async def check(work: Work) -> None:
            await work(client)
            stats = await client.stats()
            assert (stats["running"], stats["referenced"], stats["consistent"]) == (0, 0, True)
            assert (client.state, client.num_restarts) == ("ready", 0)

        try:
            yield lambda work: runner.run(check(work))
        finally:
            runner.run(client.stop())


async def read(events: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in events]


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(400):
        if await condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it never came to that")


def test_candidates_stream_to_their_end(on_shared_client: Callable[[Work], None]) -> None:
    async def work(client: EngineClient) -> None:
        info = await client.wait_ready()
        assert (info.name, info.architecture, info.block_size) == ("tiny", "llama", 16)
        events = await read(client.generate(PROMPT, SamplingParams(n=3, max_tokens=5, ignore_eos=True)))
        assert isinstance(events[0], Admitted)
        assert isinstance(events[-1], Finished)
        assert events[-1].num_generated_tokens == 15
        ends = {event.index for event in events if isinstance(event, Delta) and event.finish_reason == "length"}
        assert ends == {0, 1, 2}
        stats = await client.stats()
        assert (stats["referenced"], stats["consistent"]) == (0, True)

    on_shared_client(work)


def test_a_killed_engine_fails_what_ran_and_the_next_message_works(config: EngineConfig) -> None:
    async def work(client: EngineClient) -> None:
        client.pin("chat", True)
        await client.wait_ready()
        params = SamplingParams(n=2, max_tokens=400, ignore_eos=True)
        running = [asyncio.create_task(read(client.generate(PROMPT, params))) for _ in range(2)]
        await asyncio.sleep(0.3)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        for task in running:
            last = (await task)[-1]
            assert isinstance(last, Failed)
            assert last.code == "engine_dead"
            assert "send the message again" in last.message
        assert client.state == "dead"
        with pytest.raises(EngineDeadError):
            await client.stats()
        events = await read(client.generate(PROMPT, SamplingParams(max_tokens=3), None, "chat", ["1"]))
        assert isinstance(events[-1], Finished)
        assert client.num_restarts == 1
        (one,) = await client.residency()
        assert one.conversation == "chat" and one.pinned

    with_client(config, work)


def test_what_is_dropped_while_no_engine_is_there_is_dropped_by_the_next(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, sent = EngineClient(config), []  # type: ignore[var-annotated]
    monkeypatch.setattr(client, "_send", sent.append)
    client.drop_leases(conversation="7")
    assert sent == []
    info = ModelInfo(
        name="tiny",
        architecture="llama",
        dtype="float32",
        device="cpu",
        block_size=16,
        num_blocks=4,
        bytes_per_block=1,
        max_model_len=64,
        longest_request=64,
        weight_bytes=1,
        load_s=0,
    )
    client._deliver(Ready(info))
    client._deliver(Ready(info))
    assert sent == [DropLeases(conversation="7", lease_ids=None)]


def test_closing_the_stream_cancels_and_returns_every_block(on_shared_client: Callable[[Work], None]) -> None:
    async def work(client: EngineClient) -> None:
        before = int((await client.stats())["generated_tokens"])
        events = client.generate(PROMPT, SamplingParams(n=4, max_tokens=400, ignore_eos=True))
        async for event in events:
            if isinstance(event, Delta):
                break
        await events.aclose()  # type: ignore[attr-defined]

        async def empty() -> bool:
            return (await client.stats())["referenced"] == 0

        await wait_until(empty)
        # Not because they came to their end.
        assert int((await client.stats())["generated_tokens"]) - before < 4 * 400

    on_shared_client(work)


def test_cancelling_one_candidate_ends_it_and_not_the_others(on_shared_client: Callable[[Work], None]) -> None:
    async def work(client: EngineClient) -> None:
        await client.wait_ready()
        ends = {}
        events = client.generate(PROMPT, SamplingParams(n=3, max_tokens=60, ignore_eos=True), "r")
        cancelled = False
        async for event in events:
            if isinstance(event, Delta) and not cancelled:
                cancelled = True
                await client.cancel("r", 1)
                await client.cancel("nobody")
            if isinstance(event, Delta) and event.finish_reason is not None:
                ends[event.index] = event.finish_reason
        assert ends == {0: "length", 1: "cancelled", 2: "length"}

    on_shared_client(work)


def test_a_bad_request_is_refused_and_the_engine_goes_on(on_shared_client: Callable[[Work], None]) -> None:
    async def work(client: EngineClient) -> None:
        await client.wait_ready()
        (refused,) = await read(client.generate([1] * 600, SamplingParams()))
        assert isinstance(refused, Failed)
        assert refused.code == "context_length_exceeded"
        assert isinstance((await read(client.generate(PROMPT, SamplingParams(max_tokens=2))))[-1], Finished)

    on_shared_client(work)


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        with pytest.raises(ModelError, match="config.json"):
            await client.wait_ready()
        (failed,) = await read(client.generate(PROMPT, SamplingParams()))
        assert isinstance(failed, Failed)
        assert "config.json" in failed.message

    with_client(EngineConfig(model=str(tmp_path)), work)


def test_the_engine_ends_when_its_parent_is_killed(config: EngineConfig) -> None:
    program = f"""
import asyncio
from localpaged.engine.client import EngineClient
from localpaged.engine.config import EngineConfig
async def main():
    client = EngineClient(EngineConfig(model={config.model!r}, kv_cache_memory=1 << 22))
    await client.start()
    await client.wait_ready()
    print(client.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert psutil.pid_exists(child)
        parent.kill()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(child)
