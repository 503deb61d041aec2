"""A job manager on a scripted engine, and what tests ask of its jobs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from fakes import FakeEngine, FakeTokenizer

from localpaged.engine.sampling_params import SamplingParams
from localpaged.server.job import Job
from localpaged.server.jobs import JobManager
from localpaged.store.message import Message
from localpaged.store.store import Store

FOUR = SamplingParams(n=4, temperature=0.8, max_tokens=64)
ONE = SamplingParams(n=1, max_tokens=64)


@asynccontextmanager
async def running(path: Path, engine: FakeEngine, **options: Any) -> AsyncIterator[tuple[JobManager, Store]]:
    """A manager on a started engine and an open store."""
    await engine.start()
    with closing(Store(path / "chats.db")) as store:
        jobs = JobManager(engine, store, FakeTokenizer, **options)
        try:
            yield jobs, store
        finally:
            await jobs.close()
            await engine.stop()


async def finished(job: Job) -> Job:
    await asyncio.wait_for(job.done.wait(), 10)
    return job


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("the condition did not come true within 4 s")


def answers(store: Store, conversation_id: int) -> list[Message]:
    return store.conversations.branch(conversation_id).open_candidates


def told(log: list[dict[str, Any]], index: int) -> str:
    """The text that a follower has put together for one candidate."""
    return "".join(part["text"] for event in log for part in event.get("candidates", []) if part["i"] == index)
