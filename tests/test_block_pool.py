"""The block pool: exact ids, reference counts, eviction order, and the audit that finds what is wrong."""

import pytest

from localpaged.engine.block_pool import BlockPool


def filled(pool: BlockPool, *token_blocks: tuple[int, ...]) -> list[int]:
    """A table whose blocks are registered with these tokens."""
    table = pool.allocate(len(token_blocks))
    assert table is not None
    parent = None
    for block, tokens in zip(table, token_blocks, strict=True):
        parent = pool.register(block, parent, tokens)
    return table


def test_blocks_come_in_order_and_return_to_the_end() -> None:
    pool = BlockPool(4, 2)
    assert pool.allocate(2) == [0, 1]
    pool.release([0, 1])
    assert pool.allocate(4) == [2, 3, 1, 0]


def test_too_many_blocks_take_none() -> None:
    pool = BlockPool(3, 2)
    assert pool.allocate(4) is None
    assert pool.num_free == 3


def test_a_negative_count_raises() -> None:
    with pytest.raises(ValueError, match="-1"):
        BlockPool(3, 2).allocate(-1)


def test_a_block_returns_only_with_its_last_reference() -> None:
    pool = BlockPool(2, 2)
    table = pool.allocate(1)
    assert table is not None
    pool.share(table)
    pool.release(table)
    assert (pool.num_free, pool.num_referenced) == (1, 1)
    pool.release(table)
    assert (pool.num_free, pool.num_referenced) == (2, 0)


def test_a_released_prefix_stays_findable() -> None:
    pool = BlockPool(4, 2)
    table = filled(pool, (1, 2), (3, 4))
    pool.release(table)
    assert pool.num_cached == 2
    assert pool.find(None, (1, 2)) == 0
    assert pool.find(0, (3, 4)) == 1


def test_equal_tokens_after_another_prefix_are_not_found() -> None:
    pool = BlockPool(4, 2)
    filled(pool, (1, 2), (3, 4))
    assert pool.find(None, (3, 4)) is None


def test_eviction_takes_the_oldest_leaf_first() -> None:
    pool = BlockPool(4, 2)
    old, new = filled(pool, (1, 2), (3, 4)), filled(pool, (5, 6), (7, 8))
    pool.release(old)
    pool.release(new)
    order = [pool.allocate(1) for _ in range(4)]
    assert order == [[old[1]], [old[0]], [new[1]], [new[0]]]
    assert pool.num_evicted == 4


def test_a_prefix_that_was_used_again_outlives_an_older_one() -> None:
    pool = BlockPool(4, 2)
    first, second = filled(pool, (1, 2)), filled(pool, (3, 4))
    pool.release(first)
    pool.release(second)
    pool.share(first)
    pool.release(first)
    pool.allocate(2)
    assert pool.allocate(1) == second


def test_an_evicted_block_keeps_no_prefix() -> None:
    pool = BlockPool(1, 2)
    pool.release(filled(pool, (1, 2)))
    pool.allocate(1)
    assert pool.find(None, (1, 2)) is None
    pool.check([[0]])


def test_registering_a_known_prefix_returns_the_block_that_has_it() -> None:
    pool = BlockPool(4, 2)
    filled(pool, (1, 2))
    twin = pool.allocate(1)
    assert twin == [1]
    assert pool.register(1, None, (1, 2)) == 0
    pool.check([[0], [1]])


def test_a_double_release_is_caught() -> None:
    pool = BlockPool(2, 2)
    table = pool.allocate(1)
    assert table is not None
    pool.release(table)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(table)


@pytest.mark.parametrize("tables", [[], [[0, 1], [1]], [[0, 1, 2]], [[0, 0, 1]]])
def test_check_finds_tables_that_do_not_add_up(tables: list[list[int]]) -> None:
    pool = BlockPool(4, 2)
    pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.check(tables)


def test_check_finds_a_free_block_that_is_in_use() -> None:
    pool = BlockPool(2, 2)
    pool.allocate(1)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="block 0"):
        pool.check([[0]])


def test_shared_and_saved_count_blocks_and_references() -> None:
    pool = BlockPool(4, 2)
    table = pool.allocate(3)
    assert table is not None
    for _ in range(3):
        pool.share(table[:2])
    assert (pool.num_shared, pool.num_saved) == (2, 6)
