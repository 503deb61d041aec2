"""Jobs: owned by the server, followed from anywhere, stored as they go."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes import END, FakeEngine, FakeTokenizer

from localpaged.engine.sampling_params import SamplingParams
from localpaged.errors import InvalidRequestError, StoreError
from localpaged.server.history import branch_token_ids
from localpaged.server.job import Job
from localpaged.server.jobs import ConversationBusyError, JobManager
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


def test_a_model_that_cannot_be_loaded_is_reported_on_the_turn(tmp_path: Path) -> None:
    async def run() -> None:
        engine = FakeEngine(load_s=0.05, load_error="model.gguf is cut off. Download it again.")
        async with running(tmp_path, engine) as (jobs, store):
            conversation = store.conversations.create()
            job = await finished(await jobs.ask(conversation.id, None, "Hi", ONE))
            assert job.error == {"code": "model", "message": "model.gguf is cut off. Download it again."}

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


def test_an_answer_that_was_cut_off_goes_on_in_its_own_message(tmp_path: Path) -> None:
    async def run() -> None:
        engine = FakeEngine(lambda prompt, index: " and more" if prompt.endswith("Øre") else "Øre and more")
        async with running(tmp_path, engine) as (jobs, store):
            conversation = store.conversations.create()
            # Cut off within a letter of two bytes, which then is written anew.
            job = await finished(await jobs.ask(conversation.id, None, "Hi", FOUR))
            third = job.candidates[2].message
            third.token_ids, third.text, third.finish_reason = [*"Øre".encode(), "é".encode()[0]], "Øre", "length"
            store.conversations.save_messages([third])
            job = await jobs.continue_answer(third.id, FOUR)
            await finished(job)
            assert engine.prompts[1] == [*engine.prompts[0], *"Øre".encode()]
            assert engine.params[1].n == 1
            assert told(job.log, 0) == " and more"
            shown = store.conversations.branch(conversation.id).turns[-1].message
            assert (shown.id, shown.text, shown.finish_reason) == (third.id, "Øre and more", "stop")
            assert shown.token_ids == [*"Øre and more".encode(), END]
            assert shown.timings is not None and shown.timings.num_tokens == len(shown.token_ids)
            assert len(store.conversations.branch(conversation.id).turns[-1].sibling_ids) == 4

    asyncio.run(run())


def test_answers_that_cannot_go_on_are_left_as_they_are(tmp_path: Path) -> None:
    async def run() -> None:
        engine = FakeEngine(max_model_len=80)
        async with running(tmp_path, engine) as (jobs, store):
            conversation = store.conversations.create()
            job = await finished(await jobs.ask(conversation.id, None, "Hi", SamplingParams(max_tokens=5)))
            user, answer = job.user.id, job.candidates[0].message
            with pytest.raises(InvalidRequestError, match="Only an answer"):
                await jobs.continue_answer(user, ONE)
            full = [*answer.token_ids, *[1] * 80]
            store.conversations.save_messages([msgspec.structs.replace(answer, token_ids=full)])
            with pytest.raises(InvalidRequestError, match="fills the model's window of 80 tokens"):
                await jobs.continue_answer(answer.id, ONE)
            store.conversations.save_messages([msgspec.structs.replace(answer, finish_reason="stop")])
            with pytest.raises(InvalidRequestError, match="complete"):
                await jobs.continue_answer(answer.id, ONE)
            store.conversations.save_messages([answer])
            await finished(await jobs.ask(conversation.id, answer.id, "More", SamplingParams(max_tokens=5)))
            with pytest.raises(InvalidRequestError, match="follow"):
                await jobs.continue_answer(answer.id, ONE)
            assert store.conversations.message(answer.id).text == answer.text
            assert jobs.running_conversations() == []

    asyncio.run(run())


def test_an_answer_of_another_model_goes_on_from_its_text(tmp_path: Path) -> None:
    async def run() -> None:
        engine = FakeEngine(lambda prompt, index: "!" if prompt.endswith("Nine boats") else "Nine boats")
        async with running(tmp_path, engine) as (jobs, store):
            conversation = store.conversations.create()
            job = await finished(await jobs.ask(conversation.id, None, "Hi", ONE))
            answer = job.candidates[0].message
            answer.token_ids, answer.finish_reason = [1, 2, 3], "length"
            store.conversations.save_messages([answer])
            job = await finished(await jobs.continue_answer(answer.id, ONE))
            assert engine.prompts[1] == [*engine.prompts[0], *b"Nine boats"]
            assert job.candidates[0].message.text == "Nine boats!"

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


def test_a_long_first_message_becomes_a_short_title(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, FakeEngine()) as (jobs, store):
            conversation = store.conversations.create()
            text = "We are opening a small museum\n\nin a lighthouse, what should we call it, please?"
            await finished(await jobs.ask(conversation.id, None, text, ONE))
            title = store.conversations.get(conversation.id).title
            assert title == "We are opening a small museum in a lighthouse, what should…"

    asyncio.run(run())
