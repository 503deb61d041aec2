"""What stays of a finished answer: a lease on its blocks, the partly filled last one included.

The next turn of a conversation forks from the lease that has the most in common with its prompt, so that only what
is new is computed; leases give way when running requests need their blocks. Knows block ids and token ids, no
tensors. Of equal content two leases share the blocks, as any two tables do.

Which lease gives way: candidates that were not chosen before those that were, each least recently used first;
pinned conversations and the one used last come after all others. A conversation that comes back after its leases
had to go has a use that is further apart than the pool is large: its new leases go before those of conversations
that were found again, or visiting more conversations than fit in turn would find none of them.
Source of the last rule: bimodal insertion, Qureshi et al., "Adaptive insertion policies for high performance
caching" (doi.org/10.1145/1250662.1250709), section 4.
"""

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from localpaged.engine.block_pool import BlockPool
from localpaged.engine.messages import Residency
from localpaged.engine.sequence import BlockTable, Sequence

# Conversations whose leases had to go are remembered up to this many.
MOST_REMEMBERED = 4096


@dataclass(slots=True)
class Lease:
    """token_ids[:num_computed] have their KV in block_table; the first num_registered_blocks blocks are findable.

    num_prompt_tokens: the tokens that were asked. num_shared_tokens: what it has in common with other answers.
    """

    id: str
    conversation: str
    token_ids: list[int]
    block_table: BlockTable
    num_computed: int
    num_registered_blocks: int
    used: int
    used_at: float
    num_prompt_tokens: int = 0
    num_shared_tokens: int = 0
    chosen: bool = False
    on_probation: bool = False

    def num_common(self, token_ids: list[int]) -> int:
        """How many of the tokens that have KV are the first of these, by value."""
        most = min(self.num_computed, len(token_ids))
        if self.token_ids[:most] == token_ids[:most]:
            return most
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.token_ids[low:middle] == token_ids[low:middle]:
                low = middle
            else:
                high = middle - 1
        return low


class Leases:
    """All leases of one pool, by conversation."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_conversation: dict[str, dict[str, Lease]] = {}
        self._lost: OrderedDict[str, None] = OrderedDict()
        self._pinned: set[str] = set()
        self._clock = itertools.count()
        self._current: str | None = None
        self.num_given_up = 0
        # Told of a lease before it gives way, while its blocks are what they were.
        self.on_give_way: Callable[[Lease], None] | None = None
        # Chosen answers that were kept since someone last took note of them.
        self.fresh: list[Lease] = []

    def __len__(self) -> int:
        return sum(map(len, self._by_conversation.values()))

    def __iter__(self) -> Iterator[Lease]:
        return itertools.chain.from_iterable(leases.values() for leases in self._by_conversation.values())

    def tables(self) -> Iterable[BlockTable]:
        """The block tables that hold references."""
        return (lease.block_table for lease in self)

    def keep(self, sequence: Sequence, lease_id: str, conversation: str) -> Lease:
        """Take over the blocks of a finished sequence, which has none afterwards."""
        before = self.get(lease_id)
        self.drop([lease_id])
        # An answer that goes on is still one to the question that it was first.
        num_prompt = before.num_prompt_tokens if before is not None else sequence.num_prompt_tokens
        lease = Lease(
            lease_id,
            conversation,
            sequence.token_ids,
            sequence.block_table,
            sequence.num_computed,
            sequence.num_registered_blocks,
            next(self._clock),
            time.time(),
            num_prompt,
            sequence.num_prompt_tokens if len(sequence.request.sequences) > 1 else 0,
            # A single answer is chosen without being pressed.
            chosen=len(sequence.request.sequences) == 1,
            on_probation=conversation in self._lost,
        )
        sequence.block_table, sequence.num_computed, sequence.num_registered_blocks = [], 0, 0
        self._by_conversation.setdefault(conversation, {})[lease_id] = lease
        self._current = conversation
        if lease.chosen:
            self._prefer(lease)
            self.fresh.append(lease)
        return lease

    def get(self, lease_id: str) -> Lease | None:
        """The lease of this name."""
        return next((lease for lease in self if lease.id == lease_id), None)

    def find(self, token_ids: list[int], conversation: str) -> tuple[Lease, int] | None:
        """The lease of a conversation with the most tokens in common with these, and how many; None for none."""
        best: tuple[Lease, int] | None = None
        for lease in self._by_conversation.get(conversation, {}).values():
            common = lease.num_common(token_ids)
            if common > (best[1] if best else 0):
                best = (lease, common)
        return best

    def touch(self, lease: Lease) -> None:
        """Note a use: the conversation was found again."""
        self._lost.pop(lease.conversation, None)
        self._current = lease.conversation
        now = time.time()
        for other in self._by_conversation[lease.conversation].values():
            other.on_probation = False
        lease.used, lease.used_at = next(self._clock), now

    def choose(self, lease_id: str) -> Lease | None:
        """Mark an answer as the one that its conversation goes on from; None for one that is not here."""
        lease = self.get(lease_id)
        if lease is not None:
            self._prefer(lease)
        return lease

    def _prefer(self, chosen: Lease) -> None:
        """Let an answer be the chosen one of those to the same question."""
        num_prompt = chosen.num_prompt_tokens
        for other in self._by_conversation[chosen.conversation].values():
            if other.num_prompt_tokens == num_prompt and other.num_common(chosen.token_ids) >= num_prompt:
                other.chosen = other is chosen

    def pin(self, conversation: str, pinned: bool) -> None:
        """Let a conversation's leases go after those of all others, or no longer."""
        (self._pinned.add if pinned else self._pinned.discard)(conversation)

    def is_pinned(self, conversation: str) -> bool:
        return conversation in self._pinned

    def drop(self, lease_ids: Iterable[str]) -> None:
        """Give leases back. Unknown ids are ignored."""
        for lease_id in lease_ids:
            for leases in self._by_conversation.values():
                if lease_id in leases:
                    self._release(leases[lease_id])
                    break

    def drop_conversation(self, conversation: str | None) -> None:
        """Give back all leases of a conversation, or of all of them."""
        conversations = list(self._by_conversation) if conversation is None else [conversation]
        for name in conversations:
            for lease in list(self._by_conversation.get(name, {}).values()):
                self._release(lease)

    def num_reclaimable(self, besides: Iterable[int] = ()) -> int:
        """Blocks that only leases hold, leaving out some."""
        counts = Counter(itertools.chain.from_iterable(self.tables()))
        kept = set(besides)
        return sum(self._pool.reference_count(block) == n for block, n in counts.items() if block not in kept)

    def least_valuable(self) -> Lease | None:
        """The lease that gives way next."""
        return min(
            self,
            default=None,
            key=lambda lease: (
                lease.conversation in self._pinned,
                lease.conversation == self._current,
                lease.chosen,
                not lease.on_probation,
                lease.used,
            ),
        )

    def give_way(self) -> bool:
        """Give up the least valuable lease; False when there is none."""
        lease = self.least_valuable()
        if lease is None:
            return False
        if self.on_give_way is not None:
            self.on_give_way(lease)
        self._release(lease)
        self.num_given_up += 1
        if lease.conversation not in self._by_conversation:
            self._lost[lease.conversation] = None
            self._lost.move_to_end(lease.conversation)
            if len(self._lost) > MOST_REMEMBERED:
                self._lost.popitem(last=False)
        return True

    def residency(self) -> list[Residency]:
        """What each conversation holds: the latest used first."""
        found = []
        for conversation, leases in self._by_conversation.items():
            counts = Counter(itertools.chain.from_iterable(lease.block_table for lease in leases.values()))
            private = sum(self._pool.reference_count(block) == 1 for block in counts)
            found.append(
                Residency(
                    conversation=conversation,
                    num_leases=len(leases),
                    num_tokens=max(lease.num_computed for lease in leases.values()),
                    num_blocks=len(counts),
                    num_private_blocks=private,
                    used_at=max(lease.used_at for lease in leases.values()),
                    pinned=conversation in self._pinned,
                )
            )
        return sorted(found, key=lambda one: -one.used_at)

    def _release(self, lease: Lease) -> None:
        self._pool.release(lease.block_table)
        self.fresh = [one for one in self.fresh if one is not lease]
        leases = self._by_conversation[lease.conversation]
        del leases[lease.id]
        if not leases:
            del self._by_conversation[lease.conversation]
