"""Gives sequences their blocks: prefix reuse, growth, fork, copy-on-write, release.

The only code that changes a block table. Knows nothing of tensors: a copy is a pair of block ids
that the runner carries out before it writes. Who owns which tokens of a sequence:

    |<------- computed ------->|<- to be computed this step ->|
    | shared   | ours          | ours                         |
    0        shared         computed                      allocated

    [0, shared)             read only: these blocks are in other tables too, or cached prefixes
    [shared, computed)      ours alone, filled
    [computed, allocated)   ours alone, garbage until the step has run

Only a partly filled last block, or one of which a lease's branch takes the beginning, can be shared and then
written: it is copied first, unless we are its last owner and nobody can find it.
"""

from dataclasses import dataclass

from localpaged.engine.block_pool import BlockPool
from localpaged.engine.leases import Lease, Leases
from localpaged.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the KV of every layer of one block to another, before anything is written."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Start:
    """Blocks that hold a proper prefix of a prompt: its first num_tokens tokens. lease: where they are from."""

    blocks: list[int]
    num_tokens: int
    num_registered_blocks: int
    lease: Lease | None = None

    def whole_blocks(self, block_size: int) -> "Start":
        """Without the block that is filled in part."""
        count = self.num_tokens // block_size
        return Start(self.blocks[:count], count * block_size, min(self.num_registered_blocks, count), self.lease)


class KVCacheManager:
    """Block tables over one pool. prefix_caching False neither finds nor keeps prefixes; leases stay all the same."""

    def __init__(self, pool: BlockPool, prefix_caching: bool = True) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self.prefix_caching = prefix_caching
        self.leases = Leases(pool)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, token_ids: list[int]) -> list[int]:
        """The longest run of cached blocks that holds a proper prefix of these tokens.

        At least one token is left out, because the last one must be computed to have logits.
        """
        blocks: list[int] = []
        if not self.prefix_caching:
            return blocks
        parent = None
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            block = self.pool.find(parent, tuple(token_ids[start : start + self.block_size]))
            if block is None:
                break
            blocks.append(block)
            parent = block
        return blocks

    def find_start(self, token_ids: list[int], conversation: str | None) -> Start:
        """The most of a prompt that is there: in a lease of its conversation, or as whole blocks of any text."""
        blocks = self.find_prefix(token_ids)
        start = Start(blocks, len(blocks) * self.block_size, len(blocks))
        found = self.leases.find(token_ids, conversation) if conversation is not None else None
        if found is None:
            return start
        lease, num_common = found
        # The last token must be computed to have logits.
        num_tokens = min(num_common, len(token_ids) - 1)
        if num_tokens < start.num_tokens:
            return start
        registered = min(lease.num_registered_blocks, num_tokens // self.block_size)
        return Start(lease.block_table[: self.num_blocks_for(num_tokens)], num_tokens, registered, lease)

    def adopt(self, sequence: Sequence, start: Start) -> None:
        """Begin an empty sequence with what find_start() found. Copies nothing."""
        assert not sequence.block_table and sequence.num_computed == 0
        self.pool.share(start.blocks)
        sequence.block_table = list(start.blocks)
        sequence.num_computed = start.num_tokens
        sequence.num_registered_blocks = start.num_registered_blocks
        if start.lease is not None:
            self.leases.touch(start.lease)

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that allocate() would take to compute the next num_tokens of the sequence."""
        missing = self.num_blocks_for(sequence.num_computed + num_tokens) - len(sequence.block_table)
        return max(missing, 0) + (num_tokens > 0 and self._writes_shared_block(sequence))

    def allocate(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        """Make room for the next num_tokens tokens, all of it ours to write.

        Leases give way as far as it takes. Returns the copies to make first (one at most). None, and no table of a
        running sequence changed, when the pool cannot give enough blocks.
        """
        while self.pool.num_available < self.num_missing_blocks(sequence, num_tokens) and self.leases.give_way():
            pass
        blocks = self.pool.allocate(self.num_missing_blocks(sequence, num_tokens))
        if blocks is None:
            return None
        copies = []
        if num_tokens > 0 and self._writes_shared_block(sequence):
            position = sequence.num_computed // self.block_size
            source, destination = sequence.block_table[position], blocks.pop()
            sequence.block_table[position] = destination
            self.pool.release([source])
            copies.append(BlockCopy(source, destination))
        sequence.block_table += blocks
        return copies

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that the next num_tokens tokens have their KV; full blocks become findable.

        A full block whose prefix another block holds already is given back, and the table points to the
        other one: what is computed twice at the same time is still stored once.
        """
        sequence.num_computed += num_tokens
        assert sequence.num_computed <= len(sequence.block_table) * self.block_size
        if not self.prefix_caching:
            return
        table = sequence.block_table
        for position in range(sequence.num_registered_blocks, sequence.num_computed // self.block_size):
            start = position * self.block_size
            token_ids = tuple(sequence.token_ids[start : start + self.block_size])
            block = table[position]
            known = self.pool.register(block, table[position - 1] if position else None, token_ids)
            if known != block:
                self.pool.share([known])
                table[position] = known
                self.pool.release([block])
            sequence.num_registered_blocks = position + 1

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give the child all of the parent's blocks, the partly filled last one included. Copies nothing."""
        assert not child.block_table
        self.pool.share(parent.block_table)
        child.block_table = list(parent.block_table)
        child.num_computed = parent.num_computed
        child.num_registered_blocks = parent.num_registered_blocks

    def move(self, source: Sequence, destination: Sequence) -> None:
        """Hand the source's blocks over to the destination, which has none. Copies nothing."""
        assert not destination.block_table
        destination.block_table, source.block_table = source.block_table, []
        destination.num_computed, source.num_computed = source.num_computed, 0
        destination.num_registered_blocks, source.num_registered_blocks = source.num_registered_blocks, 0

    def release(self, sequence: Sequence) -> None:
        """Give all of the sequence's blocks back; full ones stay findable until they are evicted."""
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0
        sequence.num_registered_blocks = 0

    def end(self, sequence: Sequence) -> None:
        """Keep a finished sequence's blocks as the lease that its request asks for, or give them back."""
        request = sequence.request
        if request.lease_ids and request.conversation is not None and sequence.num_computed > 0:
            self.leases.keep(sequence, request.lease_ids[sequence.index], request.conversation)
        else:
            self.release(sequence)

    def _writes_shared_block(self, sequence: Sequence) -> bool:
        position, offset = divmod(sequence.num_computed, self.block_size)
        if offset == 0:
            return False
        block = sequence.block_table[position]
        return self.pool.reference_count(block) > 1 or self.pool.is_findable(block)
