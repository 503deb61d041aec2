"""Block tables: growth, fork, copy-on-write, prefix reuse."""

from localpaged.engine.block_pool import BlockPool
from localpaged.engine.kv_cache_manager import BlockCopy, KVCacheManager
from localpaged.engine.sampling_params import SamplingParams
from localpaged.engine.sequence import Request, Sequence


def make(num_blocks: int = 8, prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks, 4), prefix_caching)


def sequences(tokens: list[int], count: int = 1) -> list[Sequence]:
    return Request("r", tokens, SamplingParams(n=count), 0, 16).sequences


def compute(manager: KVCacheManager, sequence: Sequence, num_tokens: int) -> list[BlockCopy] | None:
    copies = manager.allocate(sequence, num_tokens)
    if copies is not None:
        manager.commit(sequence, num_tokens)
    return copies


def test_blocks_are_given_one_by_one_as_the_sequence_grows() -> None:
    manager = make()
    (sequence,) = sequences(list(range(9)))
    assert compute(manager, sequence, 4) == []
    assert sequence.block_table == [0]
    compute(manager, sequence, 1)
    assert sequence.block_table == [0, 1]
    compute(manager, sequence, 3)
    assert sequence.block_table == [0, 1]


def test_waste_is_less_than_one_block() -> None:
    manager = make()
    (sequence,) = sequences(list(range(13)))
    compute(manager, sequence, 13)
    assert len(sequence.block_table) * 4 - sequence.num_computed < 4


def test_a_fork_copies_nothing() -> None:
    manager = make()
    parent, child = sequences([1, 2, 3, 4, 5], 2)
    compute(manager, parent, 5)
    manager.fork(parent, child)
    assert child.block_table == parent.block_table == [0, 1]
    assert manager.pool.num_free == 6


def test_the_first_writer_copies_the_partly_filled_block_and_the_last_owner_does_not() -> None:
    manager = make()
    parent, child = sequences([1, 2, 3, 4, 5], 2)
    compute(manager, parent, 5)
    manager.fork(parent, child)
    parent.token_ids.append(6)
    child.token_ids.append(7)
    assert compute(manager, parent, 1) == [BlockCopy(1, 2)]
    assert parent.block_table == [0, 2]
    assert compute(manager, child, 1) == []
    assert child.block_table == [0, 1]


def test_a_full_last_block_is_not_copied() -> None:
    manager = make()
    parent, child = sequences([1, 2, 3, 4], 2)
    compute(manager, parent, 4)
    manager.fork(parent, child)
    parent.token_ids.append(5)
    assert compute(manager, parent, 1) == []
    assert parent.block_table == [0, 1]


def test_allocation_that_fails_changes_nothing() -> None:
    manager = make(num_blocks=2)
    parent, child = sequences([1, 2, 3, 4, 5], 2)
    compute(manager, parent, 5)
    manager.fork(parent, child)
    parent.token_ids.append(6)
    assert manager.allocate(parent, 1) is None
    assert parent.block_table == [0, 1]
    manager.pool.check([parent.block_table, child.block_table])


def test_the_last_token_of_a_cached_prompt_is_left_to_compute() -> None:
    manager = make()
    (first,) = sequences(list(range(8)))
    compute(manager, first, 8)
    assert manager.find_prefix(list(range(8))) == [0]
    assert manager.find_prefix(list(range(9))) == [0, 1]
    assert manager.find_prefix([*range(4), 99, 5, 6, 7, 8]) == [0]
    assert manager.find_prefix([99, *range(1, 8)]) == []


def test_a_prompt_computed_twice_at_once_is_stored_once() -> None:
    manager = make()
    (first,), (second,) = sequences(list(range(8))), sequences(list(range(8)))
    manager.allocate(first, 8)
    manager.allocate(second, 8)
    manager.commit(first, 8)
    manager.commit(second, 8)
    assert first.block_table == second.block_table == [0, 1]
    assert manager.pool.num_free == 6
    manager.pool.check([first.block_table, second.block_table])


def test_answers_are_found_by_the_next_turn() -> None:
    manager = make()
    (sequence,) = sequences([1, 2, 3])
    compute(manager, sequence, 3)
    sequence.token_ids += [4, 5]
    compute(manager, sequence, 2)
    manager.release(sequence)
    assert len(manager.find_prefix([1, 2, 3, 4, 5, 6])) == 1


def test_without_prefix_caching_nothing_is_kept() -> None:
    manager = make(prefix_caching=False)
    (sequence,) = sequences(list(range(8)))
    compute(manager, sequence, 8)
    manager.release(sequence)
    assert manager.pool.num_cached == 0
    assert manager.find_prefix(list(range(9))) == []


def test_a_moved_table_has_one_owner() -> None:
    manager = make()
    first, second = sequences([1, 2, 3, 4, 5], 2)
    compute(manager, first, 5)
    manager.move(first, second)
    assert (first.block_table, second.block_table) == ([], [0, 1])
    assert (first.num_computed, second.num_computed) == (0, 5)
    manager.pool.check([second.block_table])
