"""The scheduler: order, budget, preemption, cancellation, and random lives against a model of KV memory."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localpaged.engine.block_pool import BlockPool
from localpaged.engine.kv_cache_manager import KVCacheManager
from localpaged.engine.sampling_params import SamplingParams
from localpaged.engine.scheduler import Scheduler, Step
from localpaged.engine.sequence import Phase, Request
from localpaged.errors import PromptTooLongError

BLOCK_SIZE = 4


class Simulation:
    """A scheduler over a memory in which each slot holds the tokens up to and including its own.

    So what a sequence would read through its table can be compared with what it must read: exactly
    its own tokens. A wrong copy, a block that was given out twice, a stale prefix: each shows.
    """

    def __init__(
        self,
        num_blocks: int,
        max_num_seqs: int = 8,
        budget: int = 16,
        prefix_caching: bool = True,
        seed: int = 0,
        stop_chance: float = 0.0,
    ) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(KVCacheManager(self.pool, prefix_caching), max_num_seqs, budget, 64)
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}
        self.requests: list[Request] = []
        self.rng = random.Random(seed)
        self.stop_chance = stop_chance

    def submit(self, prompt: list[int], n: int = 1, max_tokens: int = 8) -> Request:
        params = SamplingParams(n=n, max_tokens=max_tokens)
        fits = self.scheduler.fit_max_tokens(len(prompt), max_tokens, n)
        request = Request(f"r{len(self.requests)}", prompt, params, 0, fits)
        self.requests.append(request)
        self.scheduler.submit(request)
        return request

    def step(self) -> Step:
        step = self.scheduler.schedule()
        self._compute(step)
        self.scheduler.commit(step)
        for chunk in step.chunks:
            request = chunk.sequence.request
            if not chunk.samples:
                continue
            for sequence in request.live if chunk.sequence.num_generated == 0 else [chunk.sequence]:
                sequence.token_ids.append(self.rng.randrange(3))
                if sequence.num_generated >= request.max_tokens or self.rng.random() < self.stop_chance:
                    self.scheduler.finish(sequence, "stop")
            self.scheduler.retire(request)
        self.check()
        return step

    def _compute(self, step: Step) -> None:
        assert step.num_tokens <= self.scheduler.max_num_batched_tokens
        before = dict(self.memory)
        for copy in step.copies:
            for offset in range(BLOCK_SIZE):
                self.memory[copy.destination, offset] = before.get((copy.source, offset), ())
        for chunk in step.chunks:
            sequence = chunk.sequence
            for position in range(sequence.num_computed, sequence.num_computed + chunk.num_tokens):
                block, offset = divmod(position, BLOCK_SIZE)
                self.memory[sequence.block_table[block], offset] = tuple(sequence.token_ids[: position + 1])
        for chunk in step.chunks:
            sequence = chunk.sequence
            for position in range(sequence.num_computed + chunk.num_tokens):
                block, offset = divmod(position, BLOCK_SIZE)
                read = self.memory[sequence.block_table[block], offset]
                assert read == tuple(sequence.token_ids[: position + 1]), "a sequence read another's KV"

    def check(self) -> None:
        self.pool.check(list(self.scheduler.tables()))
        running = sum(len(request.live) for request in self.scheduler.running)
        assert running <= self.scheduler.max_num_seqs
        for request in self.requests:
            if request.phase is Phase.FINISHED:
                assert all(not sequence.block_table for sequence in request.sequences)
                assert all(sequence.finished for sequence in request.sequences)
            if request.phase is Phase.WAITING:
                assert all(not sequence.block_table for sequence in request.sequences)

    def drain(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            step = self.step()
            assert step.chunks, "there is work and nothing is scheduled"
        raise AssertionError("the requests do not come to an end")


def tokens(step: Step) -> list[tuple[str, int]]:
    return [(chunk.sequence.request.request_id, chunk.num_tokens) for chunk in step.chunks]


def test_requests_start_in_the_order_they_came() -> None:
    sim = Simulation(32, budget=8)
    sim.submit([1] * 6)
    sim.submit([2] * 6)
    assert tokens(sim.step()) == [("r0", 6), ("r1", 2)]


def test_decoding_goes_before_prompts_and_they_share_a_step() -> None:
    sim = Simulation(32, budget=8)
    sim.submit([1] * 3)
    sim.step()
    sim.submit([2] * 20)
    assert tokens(sim.step()) == [("r0", 1), ("r1", 7)]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    sim = Simulation(32, budget=8)
    sim.submit([1] * 20)
    assert [tokens(sim.step()) for _ in range(3)] == [[("r0", 8)], [("r0", 8)], [("r0", 4)]]


def test_candidates_share_one_prefill() -> None:
    sim = Simulation(32)
    request = sim.submit([1] * 10, n=4)
    assert tokens(sim.step()) == [("r0", 10)]
    assert [sequence.block_table for sequence in request.live] == [[0, 1, 2]] * len(request.live)
    assert sim.pool.num_referenced == 3


def test_the_latest_request_gives_way_and_comes_back() -> None:
    sim = Simulation(8, budget=32)
    first, second = sim.submit([1] * 15, max_tokens=12), sim.submit([2] * 14, max_tokens=12)
    for _ in range(8):
        sim.step()
    assert second.num_preemptions == 1
    assert first.num_preemptions == 0
    assert second.phase is Phase.WAITING
    sim.drain()


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler = Simulation(8).scheduler
    with pytest.raises(PromptTooLongError, match="70 tokens and the model's window is 64"):
        scheduler.fit_max_tokens(70, 4, 1)
    with pytest.raises(PromptTooLongError, match="9 candidates.*8 at once"):
        scheduler.fit_max_tokens(4, 4, 9)
    with pytest.raises(PromptTooLongError, match="needs 30 blocks and the pool has 8.*at most 5 tokens"):
        scheduler.fit_max_tokens(8, 28, 4)


def test_an_open_length_takes_what_the_pool_has() -> None:
    scheduler = Simulation(8).scheduler
    assert scheduler.fit_max_tokens(8, None, 1) == 25
    assert scheduler.fit_max_tokens(8, None, 4) == 5
    assert scheduler.fit_max_tokens(8, None, 2) == 13


@pytest.mark.parametrize("num_prompt_tokens", range(1, 12))
@pytest.mark.parametrize("num_sequences", [1, 2, 3, 5])
def test_what_is_accepted_fits_and_one_token_more_does_not(num_prompt_tokens: int, num_sequences: int) -> None:
    scheduler = Simulation(16, max_num_seqs=5).scheduler
    fits = scheduler.fit_max_tokens(num_prompt_tokens, None, num_sequences)
    assert scheduler.num_blocks_at_most(num_prompt_tokens, fits, num_sequences) <= 16
    if num_prompt_tokens + fits < scheduler.max_model_len:
        assert scheduler.num_blocks_at_most(num_prompt_tokens, fits + 1, num_sequences) > 16


def test_cancel_in_every_phase_returns_every_block() -> None:
    sim = Simulation(32, budget=8)
    decoding, prefilling, waiting = sim.submit([1] * 5, n=3), sim.submit([2] * 20, n=2), sim.submit([3] * 40)
    sim.step()
    sim.step()
    for request in (prefilling, waiting, decoding):
        sim.scheduler.cancel(request)
        sim.check()
    assert not sim.scheduler.has_work
    assert sim.pool.num_referenced == 0


def test_cancelling_the_candidate_that_prefills_hands_its_blocks_to_the_next() -> None:
    sim = Simulation(32, budget=8)
    request = sim.submit([1] * 20, n=3)
    sim.step()
    sim.scheduler.cancel(request, 0)
    sim.check()
    assert request.leader.index == 1
    assert request.leader.num_computed == 8
    sim.drain()


def test_a_cached_prompt_is_not_computed_again() -> None:
    sim = Simulation(32)
    sim.submit([1] * 10)
    sim.drain()
    again = sim.submit([1] * 10)
    assert tokens(sim.step()) == [("r1", 2)]
    assert again.num_cached_tokens == 8


def test_prompt_logprobs_compute_the_whole_prompt_despite_the_cache() -> None:
    sim = Simulation(32)
    sim.submit([1] * 10)
    sim.drain()
    request = Request("r1", [1] * 10, SamplingParams(prompt_logprobs=1), 0, 4)
    sim.scheduler.submit(request)
    assert tokens(sim.scheduler.schedule()) == [("r1", 10)]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(4, 40),
    budget=st.integers(8, 24),
    prefix_caching=st.booleans(),
)
def test_random_lives_never_read_foreign_kv_and_always_end(
    seed: int, num_blocks: int, budget: int, prefix_caching: bool
) -> None:
    sim = Simulation(num_blocks, budget=budget, prefix_caching=prefix_caching, seed=seed, stop_chance=0.05)
    rng = random.Random(seed)
    for _ in range(120):
        action = rng.random()
        if action < 0.3:
            # Few different tokens, so that prefixes are shared and parted all the time.
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
            try:
                sim.submit(prompt, n=rng.choice([1, 1, 2, 4, 8]), max_tokens=rng.randint(1, 20))
            except PromptTooLongError:
                continue
        elif action < 0.4 and sim.requests:
            request = rng.choice(sim.requests)
            if request.phase is not Phase.FINISHED:
                sim.scheduler.cancel(request, rng.choice([None, rng.randrange(8)]))
                sim.check()
        elif action < 0.42:
            sim.pool.forget_cached()
        else:
            sim.step()
    sim.drain()
    assert sim.pool.num_referenced == 0


def test_the_random_lives_include_preemption_copies_and_hits() -> None:
    sim = Simulation(12, seed=7)
    copies = 0
    rng = random.Random(7)
    for _ in range(3000):
        if len(sim.scheduler.waiting) < 3:
            sim.submit([rng.randrange(2) for _ in range(rng.randint(1, 12))], n=rng.choice([1, 3]), max_tokens=10)
        copies += len(sim.step().copies)
    assert copies > 100
    assert sim.scheduler.num_preemptions > 100
    assert sum(request.num_cached_tokens or 0 for request in sim.requests) > 100
