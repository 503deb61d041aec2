"""Leases: what a conversation's next turn finds, what gives way, and random lives against a model of KV memory."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import BLOCK_SIZE, Simulation

from localpaged.engine.leases import Leases
from localpaged.engine.sampling_params import SamplingParams
from localpaged.engine.sequence import Request


class Chats(Simulation):
    """A simulation whose requests belong to conversations."""

    num_answers = 0

    @property
    def leases(self) -> Leases:
        return self.scheduler.manager.leases

    def ask(self, conversation: str, prompt: list[int], n: int = 1, max_tokens: int = 4) -> Request:
        params = SamplingParams(n=n, max_tokens=max_tokens)
        fits = self.scheduler.fit_max_tokens(len(prompt), max_tokens, n)
        names = [f"{conversation}:{self.num_answers + i}" for i in range(n)]
        self.num_answers += n
        request = Request(f"r{len(self.requests)}", prompt, params, 0, fits, frozenset(), conversation, names)
        self.requests.append(request)
        self.scheduler.submit(request)
        return request

    def turn(self, conversation: str, prompt: list[int], n: int = 1, max_tokens: int = 4) -> Request:
        request = self.ask(conversation, prompt, n, max_tokens)
        self.drain()
        return request


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100) for _ in range(count)]


def test_the_next_turn_computes_only_what_is_new() -> None:
    chats = Chats(64)
    first = chats.turn("a", tokens(1, 10), n=4, max_tokens=5)
    chosen = first.sequences[2]
    # 14 tokens have KV, which is no whole number of blocks; the last token drawn never had any.
    history = list(chosen.token_ids)
    second = chats.turn("a", [*history, *tokens(2, 3)])
    assert len(history) == 15
    assert second.num_cached_tokens == 14


def test_adopting_an_answer_copies_nothing_but_the_block_that_is_written() -> None:
    chats = Chats(64)
    chosen = chats.turn("a", tokens(1, 10), n=2, max_tokens=5).sequences[1]
    chats.ask("a", [*chosen.token_ids, 7, 7])
    step = chats.step()
    assert len(step.copies) == 1
    chats.drain()
    chosen = chats.turn("b", tokens(2, 8), max_tokens=5).sequences[0]  # 12 tokens: the blocks are full
    chats.ask("b", [*chosen.token_ids, 7, 7])
    assert chats.step().copies == []


def test_of_the_answers_to_one_question_the_last_one_chosen_is() -> None:
    chats = Chats(64)
    prompt = tokens(1, 10)
    chats.turn("a", prompt, n=3)
    one, two, three = chats.leases
    chats.leases.choose(one.id)
    chats.leases.choose(two.id)
    assert [lease.chosen for lease in (one, two, three)] == [False, True, False]
    chats.turn("a", [*two.token_ids, *tokens(2, 4)])
    chats.turn("b", prompt)
    assert two.chosen  # neither what follows it nor another conversation is an answer to its question
    chats.turn("a", prompt)  # regenerated, as a single answer
    assert not two.chosen


def test_regenerating_and_editing_start_from_the_deepest_lease() -> None:
    chats = Chats(64)
    prompt = tokens(1, 10)
    answer = chats.turn("a", prompt, n=3).sequences[0]
    assert chats.turn("a", prompt, n=2).num_cached_tokens == 9  # all but the token whose logits are needed
    longer = [*answer.token_ids, *tokens(3, 6)]
    chats.turn("a", longer)
    edited = [*answer.token_ids, *longer[len(answer.token_ids) :][:2], 55, 56]
    assert chats.turn("a", edited).num_cached_tokens == len(answer.token_ids) + 2


def test_what_a_branch_takes_the_beginning_of_is_not_written_to() -> None:
    """The block is full and findable, and its only other owner gives it up before the branch writes."""
    chats = Chats(64)
    answer = chats.turn("a", tokens(1, 10), max_tokens=7).sequences[0]
    request = chats.ask("a", [*answer.token_ids[:13], 99, 99])
    chats.scheduler.max_num_batched_tokens = 8
    start = chats.scheduler.manager.find_start(request.prompt_token_ids, "a")
    assert start.num_tokens == 13 and start.num_registered_blocks == 3
    chats.scheduler.manager.adopt(request.sequences[0], start)
    chats.leases.drop_conversation("a")
    sequence = request.sequences[0]
    assert chats.pool.reference_count(sequence.block_table[-1]) == 1
    (copy,) = chats.scheduler.manager.allocate(sequence, 2) or []
    assert copy.source != sequence.block_table[-1]
    chats.scheduler.manager.release(sequence)


def test_another_conversation_starts_from_whole_blocks_only() -> None:
    chats = Chats(64)
    system = tokens(1, 10)
    chats.turn("a", [*system, 1, 2])
    assert chats.turn("b", [*system, 3, 4]).num_cached_tokens == 8


def test_running_requests_take_what_leases_hold() -> None:
    chats = Chats(12)
    for name in "abc":
        chats.turn(name, tokens(ord(name), 10))
    assert len(chats.leases) == 3
    request = chats.turn("d", tokens(9, 30), max_tokens=12)
    assert request.sequences[0].num_generated == 12
    assert request.num_preemptions == 0
    assert len(chats.leases) == 1


def test_candidates_that_were_not_chosen_go_first_and_pinned_conversations_last() -> None:
    chats = Chats(64)
    chats.leases.pin("a", True)
    for name in "abcd":
        chats.turn(name, tokens(ord(name), 10), n=2)
    for lease_id in ("a:0", "b:3", "c:4", "d:6"):
        chats.leases.choose(lease_id)
    order = []
    while (lease := chats.leases.least_valuable()) is not None:
        order.append(lease.id)
        chats.leases.drop([lease.id])
    # "d" was used last, so it goes after the others that are not pinned.
    assert order == ["b:2", "c:5", "b:3", "c:4", "d:7", "d:6", "a:1", "a:0"]


def visit(chats: Chats, num_conversations: int, num_rounds: int) -> list[int]:
    """Visit conversations in turn, each with its own history; hits in each round."""
    histories = [tokens(i, 13) for i in range(num_conversations)]
    hits = []
    for _ in range(num_rounds):
        found = 0
        for i, history in enumerate(histories):
            request = chats.turn(str(i), [*history, 1], max_tokens=1)
            found += (request.num_cached_tokens or 0) >= 12
            histories[i] = history
        hits.append(found)
    return hits


def test_more_conversations_than_fit_are_found_in_proportion() -> None:
    """20 of 50 fit. Least recently used alone would find none, each having gone just before its turn."""
    chats = Chats(20 * 4 + 4, budget=32)
    hits = visit(chats, 50, 6)
    assert hits[0] == 0
    assert min(hits[2:]) >= 15


def test_deleting_gives_every_block_back() -> None:
    chats = Chats(64)
    first = chats.turn("a", tokens(1, 10), n=3)
    chats.turn("b", tokens(2, 10))
    chats.leases.drop([first.lease_ids[1]])
    assert len(chats.leases) == 3
    chats.leases.drop_conversation("a")
    chats.leases.drop_conversation(None)
    assert len(chats.leases) == 0
    assert chats.pool.num_referenced == 0
    chats.check()


def test_residency_tells_shared_from_private() -> None:
    chats = Chats(64, prefix_caching=False)  # with it, answers that happen to be equal are stored once
    chats.turn("a", tokens(1, 10), n=4, max_tokens=5)
    (residency,) = chats.leases.residency()
    assert (residency.conversation, residency.num_leases, residency.num_tokens) == ("a", 4, 14)
    assert residency.num_blocks == 2 + 4 * 2
    assert residency.num_private_blocks == 4 * 2


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_leases_do_without_prefix_caching(prefix_caching: bool) -> None:
    chats = Chats(64, prefix_caching=prefix_caching)
    answer = chats.turn("a", tokens(1, 10)).sequences[0]
    assert chats.turn("a", [*answer.token_ids, 5]).num_cached_tokens == len(answer.token_ids) - 1


@given(seed=st.integers(0, 2**32), num_blocks=st.integers(10, 40), prefix_caching=st.booleans())
@settings(max_examples=60, deadline=None)
def test_random_conversations_never_read_foreign_kv(seed: int, num_blocks: int, prefix_caching: bool) -> None:
    """Turns, branches, edits, choices, deletions, pins and cancellations at once, in a pool that is too small."""
    rng = random.Random(seed)
    chats = Chats(num_blocks, budget=12, prefix_caching=prefix_caching, seed=seed, stop_chance=0.2)
    texts: dict[str, list[list[int]]] = {name: [[]] for name in "abcd"}
    for _ in range(60):
        name = rng.choice("abcd")
        match rng.randrange(10):
            case 0:
                chats.leases.drop_conversation(rng.choice([name, None]))
            case 1:
                chats.leases.pin(name, rng.random() < 0.5)
            case 2:
                chats.leases.choose(f"{name}:{rng.randrange(chats.num_answers + 1)}")
            case 3:
                if chats.scheduler.running:
                    chats.scheduler.cancel(rng.choice(chats.scheduler.running))
            case 4 | 5 | 6:
                base = rng.choice(texts[name])
                prompt = [*base[: rng.randint(0, len(base))], *(rng.randrange(3) for _ in range(rng.randint(1, 6)))]
                n, most = rng.choice([1, 1, 2, 3]), rng.randint(1, 6)
                needed = chats.scheduler.num_blocks_at_most(len(prompt), most, n)
                if needed <= num_blocks and len(prompt) + most <= 64:
                    chats.ask(name, prompt, n, most)
            case _:
                if chats.scheduler.has_work:
                    chats.step()
        for request in chats.requests:
            if request.conversation is not None:
                texts[request.conversation] += [list(s.token_ids) for s in request.sequences if s.finished]
        texts = {key: value[-6:] for key, value in texts.items()}
        chats.check()
    chats.drain()
    chats.leases.drop_conversation(None)
    assert chats.pool.num_referenced == 0


def test_blocks_are_saved_as_the_paper_counts_them() -> None:
    """1 - blocks in use / blocks without sharing, for four answers to a prompt of 10 blocks."""
    chats = Chats(128, budget=64, prefix_caching=False)
    chats.turn("a", tokens(1, 10 * BLOCK_SIZE), n=4, max_tokens=BLOCK_SIZE + 1)
    without = 4 * 11
    assert (chats.pool.num_referenced, chats.pool.num_saved) == (14, without - 14)
