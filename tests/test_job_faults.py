"""Jobs whose engine, disk, conversation or server goes away: what was written stays, and the reader is told."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine
from job_helpers import FOUR, ONE, answers, finished, running, until

from localpaged.errors import StoreError
from localpaged.store.message import Message
from localpaged.store.store import Store


def test_an_engine_that_dies_leaves_the_partial_text_and_the_next_message_works(tmp_path: Path) -> None:
    async def run() -> None:
        engine = FakeEngine()
        engine.die_after = 3
        async with running(tmp_path, engine) as (jobs, store):
            conversation = store.conversations.create()
            job = await finished(await jobs.ask(conversation.id, None, "Hi", FOUR))
            assert job.error is not None and job.error["code"] == "engine_dead"
            left = answers(store, conversation.id)
            assert [(message.state, message.text) for message in left] == [("error", "Ans")] * 4
            assert left[0].error is not None and "Send again" in left[0].error
            again = await finished(await jobs.regenerate(job.user.id, ONE))
            assert again.error is None and engine.starts == 2

    asyncio.run(run())


def test_a_model_that_cannot_be_loaded_is_reported_on_the_turn(tmp_path: Path) -> None:
    async def run() -> None:
        engine = FakeEngine(load_s=0.05, load_error="model.gguf is cut off. Download it again.")
        async with running(tmp_path, engine) as (jobs, store):
            conversation = store.conversations.create()
            job = await finished(await jobs.ask(conversation.id, None, "Hi", ONE))
            assert job.error == {"code": "model", "message": "model.gguf is cut off. Download it again."}

    asyncio.run(run())


def test_stopping_while_a_dead_engine_is_started_again_writes_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with running(tmp_path, engine) as (jobs, store):
            await engine.wait_ready()
            engine.state, engine.load_s = "dead", 60
            conversation = store.conversations.create()
            job = await jobs.ask(conversation.id, None, "Hi", ONE)
            await until(lambda: job.phase == "loading")
            await jobs.stop(job.id)
            await finished(job)
            assert engine.prompts == []
            assert job.candidates[0].message.finish_reason == "cancelled"

    asyncio.run(run())


def test_closing_the_server_stores_what_was_written_as_interrupted(tmp_path: Path) -> None:
    async def run() -> int:
        engine = FakeEngine()
        engine.hold = asyncio.Event()
        async with running(tmp_path, engine) as (jobs, store):
            conversation = store.conversations.create()
            job = await jobs.ask(conversation.id, None, "Hi", ONE)
            await until(lambda: bool(job.candidates[0].message.text))
            return conversation.id

    conversation_id = asyncio.run(run())
    with closing(Store(tmp_path / "chats.db")) as store:
        last = store.conversations.branch(conversation_id).turns[-1].message
        assert (last.state, last.text) == ("interrupted", "A")


def test_a_full_disk_is_told_to_the_watcher_and_the_text_is_stored_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with running(tmp_path, FakeEngine()) as (jobs, store):
            conversation = store.conversations.create()
            save, refusals = store.conversations.save_messages, [0]

            def refuse_twice(messages: list[Message]) -> None:
                if messages[0].role == "assistant" and refusals[0] < 1:
                    refusals[0] += 1
                    raise StoreError("The disk is full.")
                save(messages)

            monkeypatch.setattr(store.conversations, "save_messages", refuse_twice)
            job = await finished(await jobs.ask(conversation.id, None, "Hi", ONE))
            assert {"type": "unsaved", "message": "The disk is full."} in job.log
            last = store.conversations.branch(conversation.id).turns[-1].message
            assert (last.state, last.text) == ("complete", "Answer A: it is **paged**.")

    asyncio.run(run())


def test_a_message_that_cannot_be_stored_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with running(tmp_path, engine) as (jobs, store):
            conversation = store.conversations.create()

            def refuse(*_: Any) -> Message:
                raise StoreError("The disk is full.")

            with monkeypatch.context() as patched:
                patched.setattr(store.conversations, "add_user_message", refuse)
                with pytest.raises(StoreError):
                    await jobs.ask(conversation.id, None, "Hi", ONE)
            assert engine.prompts == []
            assert (await finished(await jobs.ask(conversation.id, None, "Hi", ONE))).error is None

    asyncio.run(run())


def test_a_conversation_deleted_during_its_answer_ends_quietly(tmp_path: Path) -> None:
    async def run() -> None:
        engine = FakeEngine()
        engine.hold = asyncio.Event()
        async with running(tmp_path, engine) as (jobs, store):
            conversation = store.conversations.create()
            job = await jobs.ask(conversation.id, None, "Hi", FOUR)
            await until(lambda: job.phase == "decoding")
            store.conversations.delete(conversation.id)
            store.conversations.purge_deleted()
            engine.hold.set()
            await finished(job)
            assert jobs.running_conversations() == []

    asyncio.run(run())
