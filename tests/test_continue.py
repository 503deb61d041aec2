"""Answers that were cut off or stopped and go on in their own message."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from fakes import END, FakeEngine
from job_helpers import FOUR, ONE, finished, running, told

from localpaged.engine.sampling_params import SamplingParams
from localpaged.errors import InvalidRequestError


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
