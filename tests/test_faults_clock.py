"""A system clock that jumps, back or ahead: order, times and what is kept do not follow it."""

import asyncio
import time
from pathlib import Path

import pytest
from fakes import FakeEngine
from job_helpers import FOUR, ONE, answers, finished, running, until

from localpaged.store.conversation_search import search_conversations

REAL = time.time
DAY_S = 86400.0


class Clock:
    """The system's clock, which can be set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offset_s = 0.0
        monkeypatch.setattr(time, "time", lambda: REAL() + self.offset_s)


@pytest.mark.parametrize("jump_s", [-3650 * DAY_S, -90.0, 90.0, 3650 * DAY_S])
def test_a_jump_during_an_answer_changes_neither_its_text_nor_its_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    async def run() -> None:
        clock, engine = Clock(monkeypatch), FakeEngine()
        engine.hold = asyncio.Event()
        async with running(tmp_path, engine, flush_s=0.01) as (jobs, store):
            conversation = store.conversations.create()
            job = await jobs.ask(conversation.id, None, "Hi", FOUR)
            await until(lambda: job.phase == "decoding")
            clock.offset_s = jump_s
            engine.hold.set()
            await finished(job)
            for answer in answers(store, conversation.id):
                assert (answer.state, answer.text[:8]) == ("complete", "Answer " + answer.text[7])
                assert answer.timings is not None and answer.timings.ttft_s is not None
                assert 0 <= answer.timings.ttft_s < 60
                assert answer.timings.tokens_per_s is None or answer.timings.tokens_per_s > 0

    asyncio.run(run())


@pytest.mark.parametrize("jump_s", [-3650 * DAY_S, 3650 * DAY_S])
def test_turns_stay_in_their_order_when_the_clock_jumps_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    async def run() -> None:
        clock = Clock(monkeypatch)
        async with running(tmp_path, FakeEngine()) as (jobs, store):
            conversation = store.conversations.create()
            parent = None
            for turn, offset_s in enumerate((0.0, jump_s, 0.0)):
                clock.offset_s = offset_s
                job = await finished(await jobs.ask(conversation.id, parent, f"turn {turn}", ONE))
                parent = job.candidates[0].message.id
            shown = [turn.message for turn in store.conversations.branch(conversation.id).turns]
            assert [message.text for message in shown[::2]] == ["turn 0", "turn 1", "turn 2"]
            assert [hit.conversation.id for hit in search_conversations(store.conversations)] == [conversation.id]

    asyncio.run(run())


def test_a_clock_that_is_set_back_purges_nothing_and_one_set_ahead_only_what_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        clock = Clock(monkeypatch)
        async with running(tmp_path, FakeEngine()) as (_, store):
            chats = store.conversations
            kept, deleted = chats.create("kept"), chats.create("deleted")
            chats.delete(deleted.id)
            clock.offset_s = -DAY_S
            assert chats.purge_deleted(600) == 0
            assert chats.restore(deleted.id).title == "deleted"
            clock.offset_s = 0.0
            chats.delete(deleted.id)
            # The ten minutes in which it could be brought back are over by this clock.
            clock.offset_s = 3650 * DAY_S
            assert chats.purge_deleted(600) == 1
            assert chats.get(kept.id).title == "kept"

    asyncio.run(run())
