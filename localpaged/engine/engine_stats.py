"""What an engine tells of itself: the pool's audit and the counters since the start."""

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localpaged.engine.core import EngineCore

logger = logging.getLogger(__name__)


def engine_stats(core: "EngineCore") -> dict[str, int | float | str | bool]:
    """Counters by name, in blocks, tokens and bytes. consistent: whether the pool's check() holds."""
    try:
        core.check()
        consistent = True
    except AssertionError:
        logger.exception("The block pool does not add up")
        consistent = False
    sequences = [sequence for request in core.scheduler.running for sequence in request.live]
    tables = [(s.num_computed, len(s.block_table)) for s in sequences]
    tokens = sum(computed for computed, _ in tables)
    pool = core.pool
    slots = sum(num_blocks for _, num_blocks in tables) * pool.block_size
    return {
        "block_size": pool.block_size,
        "num_blocks": pool.num_blocks,
        "free": pool.num_free,
        "cached": pool.num_cached,
        "referenced": pool.num_referenced,
        "shared": pool.num_shared,
        "saved": pool.num_saved,
        "evicted": pool.num_evicted,
        "leases": len(core.leases),
        "leased": core.leases.num_reclaimable(),
        "given_up": core.leases.num_given_up,
        **core.sessions.tier_stats(),
        "waste_tokens": slots - tokens,
        "bytes_per_block": core.runner.bytes_per_block,
        "running": sum(len(request.live) for request in core.scheduler.running),
        "waiting": sum(len(request.live) for request in core.scheduler.waiting),
        "preemptions": core.scheduler.num_preemptions,
        "steps": core.num_steps,
        "prompt_tokens": core.num_prompt_tokens,
        "cached_tokens": core.num_cached_tokens,
        "generated_tokens": core.num_generated_tokens,
        "busy_s": round(core.busy_s, 3),
        "max_model_len": core.scheduler.max_model_len,
        "consistent": consistent,
        "pid": os.getpid(),
    }
