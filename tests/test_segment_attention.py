"""Planned attention in Triton's interpreter: decode rows, groups with shared prefixes and chunks, in one batch."""

from dataclasses import dataclass

import interpreter  # noqa: F401
import numpy as np
import pytest
import torch
from tolerances import ATTENTION, TRITON

from localpaged.engine.input_buffer import InputBuffer
from localpaged.engine.step_input import HostStep, group_rows
from localpaged.engine.step_plan import Geometry, plan_step
from localpaged.kernels.attention_plan import plan_decode
from localpaged.kernels.paged_attention import paged_attention_reference
from localpaged.kernels.paged_kv import KVFormat, LayerKV, PagedKV
from localpaged.kernels.planned_attention import planned_attention
from localpaged.kernels.planned_batch import PlannedBatch
from localpaged.kernels.store_qkv import dequantise_reference, quantise_reference

HALF_FORMATS = {torch.float16: KVFormat.FLOAT16, torch.bfloat16: KVFormat.BFLOAT16, torch.float32: KVFormat.FLOAT32}


@dataclass
class Case:
    """A batch: groups of decode rows as (shared tokens, context lengths), chunks as (tokens, context length)."""

    groups: list[tuple[int, list[int]]]
    chunks: list[tuple[int, int]]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    format: KVFormat | None = None
    share_min_keys: int = 1
    split_min_keys: int = 32


def make(case: Case, num_blocks: int | None = None) -> tuple[torch.Tensor, LayerKV, torch.Tensor, list[int], list[int]]:
    """Random queries and KV: q, cache, tables, context lengths and rows of each sequence.

    Blocks are in random order; every slot that no sequence has written is NaN, or a scale of NaN.
    """
    lens = [length for _, group in case.groups for length in group] + [length for _, length in case.chunks]
    sizes = [1] * (len(lens) - len(case.chunks)) + [size for size, _ in case.chunks]
    needed = [-(-length // case.block_size) for length in lens]
    free = torch.randperm(num_blocks or sum(needed) + 3).tolist()
    tables = torch.zeros(len(lens), max(needed), dtype=torch.int32)
    row = 0
    for shared, group in case.groups:
        common = [free.pop() for _ in range(shared // case.block_size)]
        for length in group:
            own = [free.pop() for _ in range(-(-length // case.block_size) - len(common))]
            tables[row, : len(common + own)] = torch.tensor(common + own)
            row += 1
    for _, length in case.chunks:
        blocks = [free.pop() for _ in range(-(-length // case.block_size))]
        tables[row, : len(blocks)] = torch.tensor(blocks)
        row += 1
    kind = case.format or HALF_FORMATS[case.dtype]
    total = num_blocks or sum(needed) + 3
    kv = PagedKV(1, total, case.kv_heads, case.block_size, case.head_dim, kind).layers[0]
    if num_blocks is None:
        for part in kv[2:] if kind.quantised else kv[:2]:
            assert part is not None
            part.fill_(torch.nan)
    for table, length in zip(tables.tolist(), lens, strict=True):
        for index in range(-(-length // case.block_size)):
            end = min(case.block_size, length - index * case.block_size)
            for cache, scales in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
                place = cache[table[index], :, :end]
                values = torch.randn(place.shape)
                if scales is None:
                    cache[table[index], :, :end] = values.to(cache.dtype)
                else:
                    cache[table[index], :, :end], scales[table[index], :, :end] = quantise_reference(values, kind)
    return torch.randn(sum(sizes), case.heads, case.head_dim).to(case.dtype), kv, tables, lens, sizes


def plan(case: Case, tables: torch.Tensor, lens: list[int], sizes: list[int], window: int | None) -> PlannedBatch:
    """The batch, built as the engine builds it."""
    num_decode = len(lens) - len(case.chunks)
    starts, shared = [0], []
    for tokens, group in case.groups:
        starts.append(starts[-1] + len(group))
        shared.append(tokens // case.block_size)
    planned = plan_step(
        Geometry(case.heads, case.kv_heads, case.head_dim, (window,), case.block_size, case.dtype.itemsize, 90, 4),
        np.array(lens, dtype=np.int32),
        sizes[num_decode:],
        np.array(starts, dtype=np.int32),
        np.array(shared, dtype=np.int32),
        case.share_min_keys,
        case.split_min_keys,
    )
    positions = np.concatenate(
        [np.arange(length - size, length) for length, size in zip(lens, sizes, strict=True)]
    ).astype(np.int32)
    none = np.zeros(len(positions), dtype=np.int32)
    host = HostStep(
        none, none, positions, tables.numpy(), num_decode, planned.decode, planned.prefill, None, planned.shares
    )
    return InputBuffer(torch.device("cpu")).fill(host)[1]


def check(case: Case, window: int | None = None, softcap: float | None = None) -> None:
    q, kv, tables, lens, sizes = make(case)
    batch = plan(case, tables, lens, sizes, window)
    out = planned_attention(q, kv, batch, scale=0.125, window=window, softcap=softcap)
    rows = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(sizes))
    expected = paged_attention_reference(
        q.float(), *dequantise_reference(kv), tables[rows], batch.limits, scale=0.125, window=window, softcap=softcap
    )
    tolerance = ATTENTION if case.dtype is torch.float32 and not kv.format.quantised else TRITON[case.dtype]
    assert (out.float() - expected).abs().max() < tolerance
    assert out.dtype is case.dtype


MIXED = [(0, [1]), (64, [70, 65, 90]), (0, [16]), (32, [33, 48]), (0, [130]), (0, [17])]
CHUNKS = [(1, 40), (37, 37), (5, 64), (16, 100)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_groups_single_rows_and_chunks_in_one_batch(dtype: torch.dtype) -> None:
    check(Case(MIXED, CHUNKS, dtype=dtype))


@pytest.mark.parametrize("format", [KVFormat.INT8, KVFormat.FP8])
def test_quantised_keys_and_values(format: KVFormat) -> None:
    check(Case(MIXED, CHUNKS[:2], format=format))
    check(Case(MIXED[:2], CHUNKS[:1], format=format, dtype=torch.bfloat16), window=20)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes(head_dim: int) -> None:
    check(Case(MIXED[:3], CHUNKS[:2], head_dim=head_dim, dtype=torch.float16))


@pytest.mark.parametrize("block_size", [8, 24, 63, 128])
def test_block_sizes(block_size: int) -> None:
    shared = 2 * block_size
    check(Case([(shared, [shared + 1, shared + block_size]), (0, [block_size])], [(9, 30)], block_size=block_size))


@pytest.mark.parametrize("window", [1, 7, 16, 60, 10_000])
def test_windows_hide_what_is_behind_them(window: int) -> None:
    check(Case(MIXED, CHUNKS), window=window)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 1), (9, 3), (32, 1)])
def test_query_heads_of_one_kv_head(heads: int, kv_heads: int) -> None:
    check(Case(MIXED[:2], CHUNKS[:1], heads=heads, kv_heads=kv_heads))


def test_soft_capping_with_and_without_a_window() -> None:
    check(Case(MIXED, CHUNKS), softcap=3.0)
    check(Case(MIXED, CHUNKS), softcap=3.0, window=9)


def test_a_group_of_more_rows_than_one_tile_holds() -> None:
    check(Case([(48, [50 + row for row in range(27)])], []))


def test_chunks_are_not_split_where_one_segment_is_enough() -> None:
    case = Case([(0, [5]), (0, [3])], [(4, 9)], split_min_keys=1024)
    check(case)
    q, kv, tables, lens, sizes = make(case)
    batch = plan(case, tables, lens, sizes, None)
    assert not batch.prefill[None].split


def test_decode_rows_alone_and_chunks_alone() -> None:
    check(Case(MIXED, []))
    check(Case([], CHUNKS))


def test_an_empty_batch_gives_nothing() -> None:
    kv = PagedKV(1, 2, 2, 16, 64).layers[0]
    empty = torch.zeros(0, dtype=torch.int32)
    batch = PlannedBatch(empty, empty, empty, torch.zeros(0, 1, dtype=torch.int32), 0, {}, {}, None)
    assert planned_attention(torch.empty(0, 6, 64), kv, batch, scale=1.0).shape == (0, 6, 64)
    with pytest.raises(ValueError, match="do not fit"):
        planned_attention(torch.empty(1, 5, 64), kv, batch, scale=1.0)


def test_empty_groups_and_rows_without_context_have_no_segments() -> None:
    lens, starts = np.array([20, 0, 33], dtype=np.int32), np.array([0, 0, 1, 1, 2, 3, 3], dtype=np.int32)
    found = plan_decode(
        lens, starts, np.zeros(6, dtype=np.int32),
        block_size=16, window=None, rows_per_tile=4, target_segments=4, tile_keys=16, split_min_keys=16,
    )  # fmt: skip
    # Row 0 in two pieces, row 1 in none, row 2 in three.
    assert [tuple(row[:5]) for row in found.segments.tolist()] == [
        (0, 1, 0, 0, 16), (0, 1, 0, 16, 20), (2, 1, 2, 0, 16), (2, 1, 2, 16, 32), (2, 1, 2, 32, 33)
    ]  # fmt: skip
    assert found.ranges[:, 3:5].tolist() == [[0, 2], [0, 0], [2, 5]]
    assert not found.ranges[:, :3].any()


def test_a_plan_never_exceeds_what_a_graph_has_room_for() -> None:
    rng = np.random.default_rng()
    for _ in range(200):
        sizes = rng.integers(1, 9, rng.integers(1, 9))
        starts = np.cumsum([0, *sizes]).astype(np.int32)
        shared = rng.integers(0, 40, len(sizes)).astype(np.int32)
        lens = np.concatenate([s * 16 + 1 + rng.integers(0, 3000, n) for s, n in zip(shared, sizes, strict=True)])
        found = plan_decode(
            lens.astype(np.int32), starts, shared, block_size=16, window=rng.choice([None, 100]),
            rows_per_tile=int(rng.integers(1, 9)), target_segments=int(rng.integers(1, 40)), tile_keys=32,
        )  # fmt: skip
        assert len(found.segments) <= 2 * len(lens) + 40


def test_large_scores_do_not_overflow() -> None:
    case = Case(MIXED, CHUNKS)
    q, kv, tables, lens, sizes = make(case)
    batch = plan(case, tables, lens, sizes, None)
    out = planned_attention(q * 3000, kv, batch, scale=0.125)
    assert out.isfinite().all()


def test_blocks_beyond_two_to_the_31_elements() -> None:
    """The last blocks of a cache whose elements are numbered beyond 2^31; what is not touched takes no memory."""
    case = Case([(16, [20, 33])], [(3, 18)], heads=2, kv_heads=1, format=KVFormat.INT8)
    num_blocks = 2**31 // (16 * 64) + 40
    q, kv, tables, lens, sizes = make(case, num_blocks=num_blocks)
    for index, block in enumerate(sorted(set(tables.flatten().tolist()))):
        tables[tables == block] = num_blocks - 1 - index
    assert kv.k_scale is not None and kv.v_scale is not None
    for block in set(tables.flatten().tolist()):
        for cache, scales in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
            cache[block], scales[block] = quantise_reference(torch.randn(1, 16, 64), KVFormat.INT8)
    batch = plan(case, tables, lens, sizes, None)
    out = planned_attention(q, kv, batch, scale=0.125)
    rows = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(sizes))
    # The reference takes the same blocks from a small cache.
    blocks, inverse = tables.unique(return_inverse=True)
    index = blocks.long()
    small = LayerKV(kv.k[index], kv.v[index], kv.k_scale[index], kv.v_scale[index])
    expected = paged_attention_reference(
        q, *dequantise_reference(small), inverse.int()[rows], batch.limits, scale=0.125
    )
    assert (out - expected).abs().max() < TRITON[torch.float32]


def test_rows_that_pad_a_batch_give_zeros_and_touch_nothing() -> None:
    geometry = Geometry(6, 2, 64, (None,), 16, 4, 90, 4)
    case = Case([(32, [40, 45])], [])
    q, kv, tables, lens, sizes = make(case)
    starts, shared = group_rows([], np.array([], dtype=np.int32), tables.numpy(), 16)
    assert (starts.tolist(), shared.tolist()) == ([0], [])
    plan_on_host = plan_decode(
        np.array(lens, dtype=np.int32), np.array([0, 2], dtype=np.int32), np.array([2], dtype=np.int32),
        block_size=16, window=None, rows_per_tile=21, target_segments=geometry.target_segments, tile_keys=32,
        share_min_keys=1, split_min_keys=32,
    )  # fmt: skip
    positions = np.array(lens, dtype=np.int32) - 1
    none = np.zeros(2, dtype=np.int32)
    host = HostStep(none, none, positions, tables.numpy(), 2, {None: plan_on_host}, {}, None, True)
    _, batch, _ = InputBuffer(torch.device("cpu")).fill(host.pad(8, 10, geometry))
    out = planned_attention(torch.cat([q, torch.full((6, 6, 64), torch.nan)]), kv, batch, scale=0.125)
    expected = paged_attention_reference(q, kv.k, kv.v, tables, torch.tensor(lens), scale=0.125)
    assert (out[:2] - expected).abs().max() < ATTENTION
    assert torch.equal(out[2:], torch.zeros(6, 6, 64))
