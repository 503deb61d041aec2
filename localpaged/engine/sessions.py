"""What conversations keep between turns, in the pool and below it, as the engine's loop uses it.

Brings leases and the tier below the pool together with the scheduler; without a tier there is the pool alone.
"""

from localpaged.engine.kv_tier import KvTier
from localpaged.engine.leases import Lease
from localpaged.engine.messages import Estimate, Residency
from localpaged.engine.rates import Rates
from localpaged.engine.scheduler import Scheduler
from localpaged.engine.sequence import Request

# How long a step waits for KV on its way in, when there is nothing else to do.
LOAD_WAIT_S = 0.02


class Sessions:
    """The conversations of one engine."""

    def __init__(self, scheduler: Scheduler, rates: Rates) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.manager
        self._rates = rates
        self.leases = scheduler.manager.leases
        self.leases.on_give_way = self._move_down
        # Where leases go that the pool has no room for; set once by what builds the engine.
        self.tier: KvTier | None = None

    @property
    def loading(self) -> bool:
        """Whether KV is on its way in."""
        return self.tier is not None and self.tier.loading

    def begin_load(self, request: Request) -> None:
        """Hold a new request for what is below the pool of its prompt, where reading that pays."""
        if self.tier is not None and request.conversation is not None and not request.reads_every_row:
            request.held = self.tier.begin_load(request.prompt_token_ids, request.conversation, request)

    def install(self) -> None:
        """Put what has been read into the pool, and let go who waited for it."""
        if self.tier is not None and self.tier.loading:
            for request in self.tier.install(0 if self._scheduler.running else LOAD_WAIT_S):
                request.held = False

    def cancelled(self, request: Request) -> None:
        """Let a request of which nothing runs any more wait for nothing; keep what it leaves."""
        if self.tier is not None and request.held and not request.live:
            self.tier.cancel(request)
        self.save_fresh()

    def _move_down(self, lease: Lease) -> None:
        if self.tier is not None:
            self.tier.move_down(lease)

    def save_fresh(self) -> None:
        """Write the answers that were kept since the last time."""
        for lease in self.leases.fresh:
            if self.tier is not None:
                self.tier.save(lease)
        self.leases.fresh.clear()

    def tier_stats(self) -> dict[str, int]:
        """Bytes below the pool, and tokens that were read from there since the start."""
        host, disk = (self.tier.host, self.tier.disk) if self.tier is not None else (None, None)
        return {
            "host_bytes": host.num_bytes if host is not None else 0,
            "disk_bytes": disk.num_bytes if disk is not None else 0,
            "loaded_tokens": self.tier.num_loaded_tokens if self.tier is not None else 0,
        }

    def choose(self, lease_id: str) -> None:
        """Note which answer a conversation goes on from; it is worth keeping."""
        lease = self.leases.choose(lease_id)
        if lease is not None and self.tier is not None:
            self.tier.save(lease)

    def warm(self, conversation: str, token_ids: list[int]) -> None:
        """Bring in what is below the pool of a conversation that was opened."""
        if self.tier is not None and token_ids:
            self.tier.begin_load(token_ids, conversation, None)

    def drop(self, conversation: str | None = None, lease_ids: list[str] | None = None) -> None:
        """Forget the KV of some answers, of a conversation, or with neither of all, wherever it is."""
        if lease_ids is None:
            self.leases.drop_conversation(conversation)
            if self.tier is not None:
                self.tier.drop(conversation)
        else:
            self.leases.drop(lease_ids)
            if self.tier is not None:
                self.tier.drop_leases(lease_ids)

    def residency(self) -> list[Residency]:
        """What is there of each conversation's KV, the latest used first."""
        found = {one.conversation: one for one in self.leases.residency()}
        tier = self.tier
        kept = [(store, span) for store in (tier.stores if tier is not None else []) for span in store.spans()]
        for store, span in kept:
            if not span.conversation:
                continue  # Left by one that was deleted to those that share its beginning.
            pinned = self.leases.is_pinned(span.conversation)
            nothing = Residency(
                conversation=span.conversation,
                num_leases=0,
                num_tokens=0,
                num_blocks=0,
                num_private_blocks=0,
                used_at=span.used,
                pinned=pinned,
            )
            one = found.setdefault(span.conversation, nothing)
            if tier is not None and store is tier.disk:
                one.num_disk_tokens += len(span.token_ids)
                one.num_disk_bytes += span.num_bytes
            else:
                one.num_host_tokens += len(span.token_ids)
                one.num_host_bytes += span.num_bytes
            one.used_at = max(one.used_at, span.used)
        return sorted(found.values(), key=lambda one: -one.used_at)

    def estimate(self, token_ids: list[int], conversation: str | None, n: int, max_tokens: int | None) -> Estimate:
        """The price of a turn, by what is where and by the rates measured so far."""
        pool, manager = self._manager.pool, self._manager
        room = max(self._scheduler.max_model_len - len(token_ids), 0)
        longest = min(max_tokens or room, room)
        start = manager.find_start(token_ids, conversation)
        num_loaded = 0
        read_s = 0.0
        if self.tier is not None:
            num_loaded, read_s = self.tier.price(token_ids, start.num_tokens)
        computed = len(token_ids) - start.num_tokens - num_loaded
        num_blocks = self._scheduler.num_blocks_at_most(len(token_ids), max(longest, 1), n)
        num_blocks -= start.num_tokens // pool.block_size
        first_s = read_s + computed / self._rates.prefill_tokens_s
        return Estimate(
            num_prompt_tokens=len(token_ids),
            num_cached_tokens=start.num_tokens,
            num_loaded_tokens=num_loaded,
            num_blocks=num_blocks,
            num_moved_blocks=max(0, num_blocks - pool.num_available),
            max_tokens=longest,
            first_token_s=first_s,
            total_s=first_s + max(longest - 1, 0) * self._rates.step_s(n),
            fits=longest > 0
            and n <= self._scheduler.max_num_seqs
            and self._scheduler.num_blocks_at_most(len(token_ids), max(longest, 1), n) <= pool.num_blocks,
        )

    def close(self) -> None:
        """Finish what is being written."""
        self.save_fresh()
        if self.tier is not None:
            self.tier.flush()
