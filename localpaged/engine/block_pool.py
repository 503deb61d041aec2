"""Which blocks are free, which are in use by how many tables, and which hold a prefix worth keeping.

Knows block ids and token ids; knows nothing of tensors, sequences or requests. Blocks and
reference counts follow PagedAttention (arXiv:2309.06180, section 4). Every block is in exactly
one state:

    free         no content that anyone may read
    referenced   in at least one block table (or lease)
    cached       in no table, but full and findable by its prefix until it is evicted

A cached prefix is a path in a tree: the key of a block is (its parent block, its token ids), so a
hit compares the token ids themselves and two prefixes can never be mistaken for each other. A
parent is evicted only after its children, so a block id in a key never outlives its content.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import pairwise
from typing import TypeAlias

from localpaged.engine.sequence import BlockTable

PrefixKey: TypeAlias = tuple[int | None, tuple[int, ...]]


class BlockPool:
    """num_blocks equal blocks of block_size token slots."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and slots, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Blocks leave only from the left and come only to the right, so a deque is enough.
        self._free: deque[int] = deque(range(num_blocks))
        self._reference_counts = [0] * num_blocks
        # Cached blocks, least recently released first. A table is released from its end, and a table
        # that holds a block holds its parent: so a parent always stands behind all its children here,
        # and taking from the front is leaf first without looking.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._block_by_key: dict[PrefixKey, int] = {}
        self._key_by_block: dict[int, PrefixKey] = {}
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        """Blocks with no content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks in no table that still hold a findable prefix."""
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """Blocks that allocate() can give: free ones and cached ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_shared(self) -> int:
        """Blocks in more than one table."""
        return sum(count > 1 for count in self._reference_counts)

    @property
    def num_saved(self) -> int:
        """How many more blocks the same tables would take if none were shared."""
        return sum(count - 1 for count in self._reference_counts if count > 1)

    def reference_count(self, block: int) -> int:
        return self._reference_counts[block]

    def allocate(self, count: int) -> list[int] | None:
        """Take count blocks: free ones, least recently freed first, then cached ones, leaf first.

        They arrive with one reference and no content. None, and nothing taken, when fewer are available.
        Raises ValueError if count < 0.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            block = self._free.popleft() if self._free else self._evict()
            self._reference_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, which must be referenced or cached."""
        for block in blocks:
            if self._reference_counts[block] == 0:
                # A free block has no key: KeyError here is our own bug showing itself.
                del self._evictable[block]
            self._reference_counts[block] += 1

    def release(self, blocks: BlockTable) -> None:
        """Drop one reference from each block of a table, from its end, so that leaves are evicted first."""
        for block in reversed(blocks):
            count = self._reference_counts[block]
            assert count > 0, f"block {block} is released more often than it was taken"
            self._reference_counts[block] = count - 1
            if count > 1:
                continue
            if block in self._key_by_block:
                self._evictable[block] = None
            else:
                self._free.append(block)

    def is_findable(self, block: int) -> bool:
        """Whether the block holds a prefix that find() may return, so that nothing may be written to it."""
        return block in self._key_by_block

    def find(self, parent: int | None, token_ids: tuple[int, ...]) -> int | None:
        """The block that holds exactly these block_size tokens after parent's prefix, if one is known."""
        return self._block_by_key.get((parent, token_ids))

    def register(self, block: int, parent: int | None, token_ids: tuple[int, ...]) -> int:
        """Make a full referenced block findable; returns the block that holds this prefix.

        That is another one when the same prefix was registered before: the caller points its table there.
        """
        assert len(token_ids) == self.block_size and self._reference_counts[block] > 0
        assert parent is None or parent in self._key_by_block, "a prefix is registered from its root"
        key = (parent, token_ids)
        known = self._block_by_key.setdefault(key, block)
        if known == block:
            self._key_by_block[block] = key
        return known

    def forget_cached(self) -> int:
        """Evict every cached block; returns how many."""
        count = len(self._evictable)
        for _ in range(count):
            self._free.append(self._evict())
        return count

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        del self._block_by_key[self._key_by_block.pop(block)]
        self.num_evicted += 1
        return block

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Prove that every block is in one state and every count equals the tables that point there.

        Raises AssertionError with the first block that does not add up.
        """
        counts = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            for block in table:
                counts[block] += 1
        for block, count in enumerate(counts):
            assert count == self._reference_counts[block], (
                f"block {block} has {self._reference_counts[block]} references and {count} tables"
            )
        free, cached = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert not free & cached, f"free and cached at once: {free & cached}"
        for block in range(self.num_blocks):
            unused = block in free or block in cached
            assert unused == (counts[block] == 0), f"block {block} is lost or given out while in use"
            assert not (block in free and block in self._key_by_block), f"free block {block} keeps its prefix"
        assert set(self._block_by_key.values()) == set(self._key_by_block), "prefix index and blocks differ"
        age = {block: position for position, block in enumerate(self._evictable)}
        for block, (parent, _) in self._key_by_block.items():
            if parent is None:
                continue
            assert parent in self._key_by_block, f"block {block} outlives its parent {parent}"
            if block not in cached:
                assert parent not in cached, f"block {block} is in use and its parent {parent} could be evicted"
            elif parent in cached:
                assert age[block] < age[parent], f"parent {parent} would be evicted before its child {block}"
        for table in tables:
            for parent, block in pairwise(table):
                key = self._key_by_block.get(block)
                assert key is None or key[0] == parent, f"block {block} follows {parent}, not its parent {key}"
