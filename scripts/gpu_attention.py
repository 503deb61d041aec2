"""Times decode attention and shared prefixes on a GPU, beside what else there is, and sweeps their tile sizes."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import gpu_timing as timing
import numpy as np
import torch
import torch.nn.functional as F
from gpu_cases import BLOCK_SIZE, DEVICE, DTYPE, KINDS, host_step, make_geometry, random_tables
from torch import Tensor

from localpaged.engine.input_buffer import InputBuffer
from localpaged.kernels import tile_config
from localpaged.kernels.paged_kv import LayerKV, PagedKV
from localpaged.kernels.planned_attention import planned_attention
from localpaged.kernels.tile_config import TileConfig


def timed(run: Callable[[], Any]) -> float:
    return timing.seconds(timing.graphed(run))


def decode_attention(batch: int, context: int) -> dict[str, dict[str, Any]]:
    """Seconds and GB/s of one layer's decode attention in the shape of Llama-3.1-8B: ours, and what else there is."""
    heads, kv_heads, head_dim = 32, 8, 128
    lens = [context] * batch
    tables, num_blocks = random_tables(lens, [])
    kv = PagedKV(1, num_blocks, kv_heads, BLOCK_SIZE, head_dim, KINDS[DTYPE], DEVICE).layers[0]
    kv.k.normal_(), kv.v.normal_()
    _, planned_batch, _ = InputBuffer(DEVICE).fill(
        host_step(make_geometry(heads, kv_heads, head_dim, DTYPE), lens, tables)
    )
    q = torch.randn(batch, heads, head_dim, device=DEVICE, dtype=DTYPE)
    read = batch * context * kv_heads * head_dim * 2 * DTYPE.itemsize
    scale = head_dim**-0.5
    ours = planned_attention(q, kv, planned_batch, scale=scale)
    index = torch.from_numpy(tables.astype(np.int64)).to(DEVICE)

    def gathered(cache: Tensor) -> Tensor:
        return cache[index].permute(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, head_dim)[:, :, :context]

    k, v = gathered(kv.k), gathered(kv.v)
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, seconds: float, out: Tensor | None = None) -> None:
        found[name] = {"us": seconds * 1e6, "gb_s": read / seconds / 1e9}
        if out is not None:
            found[name]["differs"] = float((out.reshape(ours.shape).float() - ours.float()).abs().max())

    add("localpaged", timed(lambda: planned_attention(q, kv, planned_batch, scale=scale)))

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(q[:, :, None], k, v, scale=scale, enable_gqa=True)

    add("SDPA, gathered before", timed(sdpa), sdpa())
    for name, make in (("FlexAttention, paged", flex_attention), ("FlashInfer", flashinfer_attention)):
        try:
            run = make(q, kv, index, context)
            if run is not None:
                out = run()
                add(name, timed(run), out)
        # What others need to run here is theirs; the rest is measured all the same.
        except Exception as error:
            print(f"{name} could not run: {error!r}"[:300])
    return found


FLEX_PAGE = 128


def flex_attention(q: Tensor, kv: LayerKV, tables: Tensor, context: int) -> Callable[[], Tensor] | None:
    """FlexAttention over a pool of pages of its own block's size in random order, with a mask of who owns each."""
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as attend

    batch, head_dim, kv_heads = q.shape[0], q.shape[2], kv.k.shape[1]
    if context % FLEX_PAGE or batch * context > 1 << 20:
        return None  # The mask, made whole first, takes 128 bytes a row and slot.
    pages = batch * context // FLEX_PAGE
    order = torch.randperm(pages, device=DEVICE)
    owner = torch.empty(pages, dtype=torch.int32, device=DEVICE)
    owner[order] = torch.arange(pages, dtype=torch.int32, device=DEVICE) // (context // FLEX_PAGE)

    def pool(cache: Tensor) -> Tensor:
        # [batch, blocks, Hkv, slots, Dh] as pages of 128 tokens of one row, then each at its place.
        rows = cache[tables].transpose(2, 3).reshape(pages, FLEX_PAGE, kv_heads, head_dim)
        placed = torch.empty_like(rows)
        placed[order] = rows
        return placed.permute(2, 0, 1, 3).reshape(1, kv_heads, -1, head_dim)

    k, v = pool(kv.k), pool(kv.v)
    mask = create_block_mask(
        lambda b, h, i, slot: owner[slot // FLEX_PAGE] == b, batch, None, 1, pages * FLEX_PAGE, device="cuda"
    )
    compiled = torch.compile(attend)
    return lambda: compiled(q[:, :, None], k, v, block_mask=mask, scale=head_dim**-0.5, enable_gqa=True)


def flashinfer_attention(q: Tensor, kv: LayerKV, tables: Tensor, context: int) -> Callable[[], Tensor] | None:
    """FlashInfer's paged decode, where it is installed."""
    try:
        import flashinfer
    except ImportError:
        return None
    batch, (kv_heads, _, head_dim) = q.shape[0], kv.k.shape[1:]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE), "HND", use_tensor_cores=True
    )
    pages = tables.shape[1]
    indptr = torch.arange(0, batch * pages + 1, pages, dtype=torch.int32, device=DEVICE)
    last = torch.full((batch,), (context - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=DEVICE)
    wrapper.plan(indptr, tables.flatten().int(), last, q.shape[1], kv_heads, head_dim, BLOCK_SIZE, q_data_type=DTYPE)
    return lambda: wrapper.run(q, (kv.k, kv.v))


def shared_attention(n: int, prefix: int, share: bool) -> float:
    """Microseconds of one layer for n candidates with 64 tokens of their own after a prefix."""
    heads, kv_heads, head_dim = 32, 8, 128
    lens = [prefix + 64] * n
    tables, num_blocks = random_tables(lens, [(n, prefix // BLOCK_SIZE)])
    kv = PagedKV(1, num_blocks, kv_heads, BLOCK_SIZE, head_dim, KINDS[DTYPE], DEVICE).layers[0]
    kv.k.normal_(), kv.v.normal_()
    host = host_step(
        make_geometry(heads, kv_heads, head_dim, DTYPE),
        lens,
        tables,
        groups=[(n, prefix // BLOCK_SIZE)] if share else None,
        share_min_keys=1,
    )
    _, batch, _ = InputBuffer(DEVICE).fill(host)
    q = torch.randn(n, heads, head_dim, device=DEVICE, dtype=DTYPE)
    return timed(lambda: planned_attention(q, kv, batch, scale=head_dim**-0.5)) * 1e6


def tune() -> Iterator[dict[str, Any]]:
    """Times of the attention kernels by tile sizes, the best first for each kind of work."""
    works: dict[str, tuple[Callable[[], float], list[int]]] = {
        "decode, batch 8, context 8k": (lambda: decode_attention_us(8, 8192), [16]),
        "shared, n 8, prefix 8k": (lambda: shared_attention(8, 8192, True), [32, 64]),
    }
    plain = tile_config.decode_config
    for work, (run, heights) in works.items():
        times: list[tuple[float, TileConfig]] = []
        for height, width, warps, stages in itertools.product(heights, (32, 64, 128), (4, 8), (3, 5, 6)):
            config = TileConfig(height, width, warps, stages)
            tile_config.decode_config = lambda *arguments, config=config: config  # type: ignore[assignment]
            # Too much shared memory, or more registers than there are.
            with contextlib.suppress(Exception):
                times.append((run(), config))
        for microseconds, config in sorted(times, key=lambda pair: pair[0])[:5]:
            yield {"name": work, "us": microseconds, "tile": str(config)}
    tile_config.decode_config = plain


def decode_attention_us(batch: int, context: int) -> float:
    """Microseconds of our decode attention alone."""
    lens = [context] * batch
    tables, num_blocks = random_tables(lens, [])
    kv = PagedKV(1, num_blocks, 8, BLOCK_SIZE, 128, KINDS[DTYPE], DEVICE).layers[0]
    kv.k.normal_(), kv.v.normal_()
    _, batch_on_device, _ = InputBuffer(DEVICE).fill(host_step(make_geometry(32, 8, 128, DTYPE), lens, tables))
    q = torch.randn(batch, 32, 128, device=DEVICE, dtype=DTYPE)
    return timed(lambda: planned_attention(q, kv, batch_on_device, scale=0.1)) * 1e6
