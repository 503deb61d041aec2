"""Jobs: owned by the server, followed from anywhere, stored as they go."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fakes import END, FakeEngine, FakeTokenizer
from job_helpers import FOUR, ONE, answers, finished, running, told, until

from localpaged.engine.sampling_params import SamplingParams
from localpaged.errors import InvalidRequestError
from localpaged.server.history import branch_token_ids
from localpaged.server.job import Job
from localpaged.server.jobs import ConversationBusyError


def test_four_answers_are_stored_as_siblings_with_ids_ends_and_timings(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, FakeEngine()) as (jobs, store):
            conversation = store.conversations.create()
            job = await finished(await jobs.ask(conversation.id, None, "What is paging?", FOUR))
            branch = store.conversations.branch(conversation.id)
            (turn,) = branch.turns
            assert turn.message.text == "What is paging?"
            assert [message.text[:8] for message in branch.open_candidates] == [
                "Answer A",
                "Answer B",
                "Answer C",
                "Answer D",
            ]
            for message in branch.open_candidates:
                assert message.token_ids == [*FakeTokenizer().encode(message.text), END]
                assert (message.state, message.finish_reason) == ("complete", "stop")
                assert message.model == "fake-135M"
                assert message.sampling is not None and message.sampling["temperature"] == 0.8
                timings = message.timings
                assert timings is not None and timings.num_tokens == len(message.token_ids)
                assert timings.ttft_s is not None and timings.tokens_per_s
                assert timings.num_cached_tokens == 0 and timings.num_computed_tokens == 34
            assert told(job.log, 2) == branch.open_candidates[2].text
            assert store.conversations.get(conversation.id).title == "What is paging?"

    asyncio.run(run())


def test_the_second_turn_is_built_on_the_exact_ids_of_the_chosen_answer(tmp_path: Path) -> None:
    async def run() -> None:
        engine = FakeEngine(lambda prompt, index: "crab")  # written c r a b, one token each
        async with running(tmp_path, engine) as (jobs, store):
            conversation = store.conversations.create()
            await finished(await jobs.ask(conversation.id, None, "Hi", FOUR))
            chosen = answers(store, conversation.id)[2]
            store.conversations.choose(chosen.id)
            await finished(await jobs.ask(conversation.id, chosen.id, "More", ONE))
            assert engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]
            assert engine.prompts[1][len(engine.prompts[0]) :][:5] == [*b"crab", END]
            path = [turn.message for turn in store.conversations.branch(conversation.id).turns]
            assert branch_token_ids(path[:-1]) == engine.prompts[1]
            last = path[-1].timings
            assert last is not None and last.num_cached_tokens == 16

    asyncio.run(run())


def test_the_user_message_is_stored_before_the_engine_sees_anything(tmp_path: Path) -> None:
    async def run() -> None:
        engine = FakeEngine(load_s=60)
        async with running(tmp_path, engine) as (jobs, store):
            conversation = store.conversations.create()
            job = await jobs.ask(conversation.id, None, "Hi", FOUR)
            assert [message.state for message in answers(store, conversation.id)] == ["running"] * 4
            assert store.conversations.branch(conversation.id).turns[0].message.text == "Hi"
            await until(lambda: job.phase == "loading")
            await jobs.stop(job.id)
            await finished(job)
            assert engine.prompts == []
            ends = {(message.state, message.finish_reason) for message in answers(store, conversation.id)}
            assert ends == {("complete", "cancelled")}

    asyncio.run(run())


def test_stopping_one_candidate_lets_the_others_finish(tmp_path: Path) -> None:
    async def run() -> None:
        engine = FakeEngine()
        engine.hold = asyncio.Event()
        async with running(tmp_path, engine) as (jobs, store):
            conversation = store.conversations.create()
            job = await jobs.ask(conversation.id, None, "Hi", FOUR)
            await until(lambda: job.phase == "decoding")
            await jobs.stop(job.id, [1])
            await until(lambda: not job.candidates[1].running)
            engine.hold.set()
            await finished(job)
            ends = [message.finish_reason for message in answers(store, conversation.id)]
            assert ends == ["stop", "cancelled", "stop", "stop"]

    asyncio.run(run())


def test_stopping_all_keeps_the_text_so_far_and_the_next_message_works(tmp_path: Path) -> None:
    async def run() -> None:
        engine = FakeEngine()
        engine.hold = asyncio.Event()
        async with running(tmp_path, engine) as (jobs, store):
            conversation = store.conversations.create()
            job = await jobs.ask(conversation.id, None, "Hi", FOUR)
            await until(lambda: all(candidate.message.text for candidate in job.candidates))
            await jobs.stop(job.id)
            await finished(job)
            stopped = answers(store, conversation.id)
            assert {message.finish_reason for message in stopped} == {"cancelled"}
            assert all(message.text and message.state == "complete" for message in stopped)
            engine.hold = None
            again = await finished(await jobs.ask(conversation.id, stopped[0].id, "Go on", ONE))
            assert again.error is None

    asyncio.run(run())


def test_a_candidate_stopped_before_the_request_is_sent_stays_stopped(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, FakeEngine(load_s=0.05)) as (jobs, store):
            conversation = store.conversations.create()
            job = await jobs.ask(conversation.id, None, "Hi", FOUR)
            await jobs.stop(job.id, [0])
            await finished(job)
            ends = [(message.finish_reason, bool(message.text)) for message in answers(store, conversation.id)]
            assert ends == [("cancelled", False), ("stop", True), ("stop", True), ("stop", True)]

    asyncio.run(run())


def test_a_second_start_in_a_busy_conversation_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        engine = FakeEngine()
        engine.hold = asyncio.Event()
        async with running(tmp_path, engine) as (jobs, store):
            conversation, other = store.conversations.create(), store.conversations.create()
            first, second = await asyncio.gather(
                jobs.ask(conversation.id, None, "one", ONE),
                jobs.ask(conversation.id, None, "two", ONE),
                return_exceptions=True,
            )
            assert isinstance(first, Job) and isinstance(second, ConversationBusyError)
            assert len(store.conversations.branch(conversation.id).turns[0].sibling_ids) == 1
            await jobs.ask(other.id, None, "elsewhere", ONE)
            engine.hold.set()
            await finished(first)
            await finished(await jobs.ask(conversation.id, None, "three", ONE))

    asyncio.run(run())


def test_partial_answers_are_stored_while_they_are_written(tmp_path: Path) -> None:
    async def run() -> None:
        engine = FakeEngine(lambda prompt, index: "x" * 40, token_s=0.02)
        async with running(tmp_path, engine, flush_s=0.1) as (jobs, store):
            conversation = store.conversations.create()
            job = await jobs.ask(conversation.id, None, "Hi", FOUR)
            lengths: set[int] = set()
            while not job.done.is_set():
                rows = await store.do(store.conversations.branch, conversation.id)
                partial = [message for message in rows.open_candidates if message.state == "running"]
                assert all(message.token_ids == list(message.text.encode()) for message in partial)
                lengths |= {len(message.text) for message in partial}
                await asyncio.sleep(0.02)
            assert len(lengths) >= 3

    asyncio.run(run())


def test_a_prompt_that_is_too_long_keeps_the_message_and_says_the_numbers_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, FakeEngine(max_model_len=100)) as (jobs, store):
            conversation = store.conversations.create()
            await finished(await jobs.ask(conversation.id, None, "word " * 40, FOUR))
            user, failed = store.conversations.branch(conversation.id).turns
            assert user.message.text == "word " * 40
            assert failed.message.state == "error" and failed.sibling_ids == [failed.message.id]
            assert "window is 100" in str(failed.message.error)

    asyncio.run(run())


def test_an_answer_is_limited_to_the_room_that_the_window_leaves(tmp_path: Path) -> None:
    async def run() -> None:
        engine = FakeEngine(lambda prompt, index: "x" * 500, max_model_len=100)
        async with running(tmp_path, engine) as (jobs, store):
            conversation = store.conversations.create()
            await finished(await jobs.ask(conversation.id, None, "Hi", SamplingParams(n=1, max_tokens=90)))
            await finished(await jobs.ask(conversation.id, None, "Hello", SamplingParams(n=1, max_tokens=None)))
            assert [
                params.max_tokens == 100 - len(prompt)
                for params, prompt in zip(engine.params, engine.prompts, strict=True)
            ] == [True, True]

    asyncio.run(run())


def test_followers_join_at_any_cursor_and_end_up_with_the_same_text(tmp_path: Path) -> None:
    async def run() -> None:
        engine = FakeEngine(lambda prompt, index: f"{index}: " + "word " * 40, token_s=0.002)
        async with running(tmp_path, engine) as (jobs, store):
            conversation = store.conversations.create()
            job = await jobs.ask(conversation.id, None, "Hi", SamplingParams(n=3, max_tokens=None))

            async def follow(cursor: int | None) -> list[dict[str, Any]]:
                return [event async for _, event in job.follow(cursor) if event]

            early = asyncio.create_task(follow(0))
            await until(lambda: len(job.log) > 5)
            late = asyncio.create_task(follow(None))
            leaver = job.follow(None)
            await leaver.__anext__()
            await leaver.aclose()  # type: ignore[attr-defined]
            await finished(job)
            whole = [message.text for message in answers(store, conversation.id)]
            for log in (await early, await late, await follow(0), await follow(None)):
                assert [told(log, index) for index in range(3)] == whole
                assert log[-1]["type"] in ("done", "snapshot")
            resumed = await follow(4)
            assert resumed == job.log[4:]

    asyncio.run(run())


def test_tokens_are_gathered_to_about_fifteen_events_a_second(tmp_path: Path) -> None:
    async def run() -> None:
        engine = FakeEngine(lambda prompt, index: "x" * 200, token_s=0.0005)
        async with running(tmp_path, engine) as (jobs, store):
            conversation = store.conversations.create()
            begun = asyncio.get_running_loop().time()
            job = await finished(await jobs.ask(conversation.id, None, "Hi", FOUR))
            elapsed_s = asyncio.get_running_loop().time() - begun
            progress = [event for event in job.log if event["type"] == "tokens"]
            assert len(progress) <= 15 * elapsed_s + 4

    asyncio.run(run())


def test_a_quiet_job_sends_heartbeats(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, FakeEngine(load_s=60)) as (jobs, store):
            conversation = store.conversations.create()
            job = await jobs.ask(conversation.id, None, "Hi", ONE)
            await until(lambda: job.phase == "loading")
            events = job.follow(len(job.log), heartbeat_s=0.01)
            assert await events.__anext__() == (len(job.log), None)
            await events.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())


@pytest.mark.parametrize("text", ["", "  \n "])
def test_an_empty_message_is_refused(tmp_path: Path, text: str) -> None:
    async def run() -> None:
        async with running(tmp_path, FakeEngine()) as (jobs, store):
            conversation = store.conversations.create()
            with pytest.raises(InvalidRequestError, match="empty"):
                await jobs.ask(conversation.id, None, text, ONE)
            assert jobs.running_conversations() == []

    asyncio.run(run())


def test_only_user_messages_can_be_regenerated(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, FakeEngine()) as (jobs, store):
            conversation = store.conversations.create()
            job = await finished(await jobs.ask(conversation.id, None, "Hi", ONE))
            with pytest.raises(InvalidRequestError, match="user message"):
                await jobs.regenerate(job.candidates[0].message.id, ONE)

    asyncio.run(run())


def test_a_long_first_message_becomes_a_short_title(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, FakeEngine()) as (jobs, store):
            conversation = store.conversations.create()
            text = "We are opening a small museum\n\nin a lighthouse, what should we call it, please?"
            await finished(await jobs.ask(conversation.id, None, text, ONE))
            title = store.conversations.get(conversation.id).title
            assert title == "We are opening a small museum in a lighthouse, what should…"

    asyncio.run(run())
