"""What gpu_check.py checks and times: random input in the shapes of real models, references, and what others offer.

Everything also runs on the CPU in Triton's interpreter, at small sizes, which is how tests/test_gpu_check.py knows
that the script works before it meets a card.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localpaged.engine.input_buffer import InputBuffer
from localpaged.engine.step_input import HostStep
from localpaged.engine.step_plan import Geometry, plan_step
from localpaged.kernels.block_copy import copy_blocks, copy_blocks_reference
from localpaged.kernels.paged_attention import paged_attention_reference
from localpaged.kernels.paged_kv import KVFormat, LayerKV, PagedKV
from localpaged.kernels.planned_attention import planned_attention
from localpaged.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from localpaged.kernels.sampling import SamplingRows, sample_rows, sample_rows_reference
from localpaged.kernels.store_qkv import dequantise_reference, quantise_reference, store_qkv, store_qkv_reference
from localpaged.kernels.swiglu import gated_activation, gated_activation_reference
from localpaged.kernels.triton_target import capability, num_multiprocessors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HAS_BFLOAT16 = DEVICE.type == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
DTYPE = torch.bfloat16 if HAS_BFLOAT16 else torch.float16
BLOCK_SIZE = 16
# Relative to values of about one, by the type of the input.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
KINDS = {torch.float32: KVFormat.FLOAT32, torch.float16: KVFormat.FLOAT16, torch.bfloat16: KVFormat.BFLOAT16}
Case = tuple[str, Callable[[], tuple[float, float]]]


def rows_of(lens: list[int], sizes: list[int]) -> Tensor:
    """Which sequence each query row belongs to."""
    return torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(sizes))


def host_step(
    geometry: Geometry,
    lens: list[int],
    tables: np.ndarray,
    sizes: list[int] | None = None,
    groups: list[tuple[int, int]] | None = None,
    share_min_keys: int | None = None,
    split_min_keys: int | None = None,
) -> HostStep:
    """A step: decode rows, then chunks (sizes above 1). groups: (rows, blocks in common), all rows alone without it."""
    sizes = sizes or [1] * len(lens)
    num_decode = sum(size == 1 for size in sizes)
    ends = np.cumsum(sizes).astype(np.int32)
    groups = groups or [(1, 0)] * num_decode
    starts = np.cumsum([0, *(rows for rows, _ in groups)]).astype(np.int32)
    shared = np.array([blocks for _, blocks in groups], dtype=np.int32)
    context = np.array(lens, dtype=np.int32)
    plan = plan_step(geometry, context, sizes[num_decode:], starts, shared, share_min_keys, split_min_keys)
    positions = np.concatenate([np.arange(n - size, n) for n, size in zip(lens, sizes, strict=True)]).astype(np.int32)
    table_of_row = np.repeat(np.arange(len(lens)), sizes)
    slots = tables[table_of_row, positions // geometry.block_size] * geometry.block_size
    slots = (slots + positions % geometry.block_size).astype(np.int32)
    last = (ends - 1).astype(np.int32) if plan.prefill else None
    tokens = np.ones(len(positions), dtype=np.int32)
    return HostStep(tokens, slots, positions, tables, num_decode, plan.decode, plan.prefill, last, plan.shares)


def make_geometry(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None = None,
    block_size: int = BLOCK_SIZE,
) -> Geometry:
    card, sms = capability(DEVICE), num_multiprocessors(DEVICE)
    return Geometry(heads, kv_heads, head_dim, (window,), block_size, dtype.itemsize, card, sms)


def random_tables(
    lens: list[int], groups: list[tuple[int, int]], block_size: int = BLOCK_SIZE
) -> tuple[np.ndarray, int]:
    """Block tables in random order with the groups' blocks in common, and how many blocks there must be."""
    sizes = [-(-length // block_size) for length in lens]
    order = iter(np.random.permutation(sum(sizes) + 1).astype(np.int32))
    tables = np.zeros((len(lens), max(sizes)), dtype=np.int32)
    row = 0
    for rows, blocks in groups + [(1, 0)] * (len(lens) - sum(rows for rows, _ in groups)):
        common = list(itertools.islice(order, blocks))
        for _ in range(rows):
            tables[row, : sizes[row]] = common + list(itertools.islice(order, sizes[row] - blocks))
            row += 1
    return tables, sum(sizes) + 1


def filled_kv(
    lens: list[int], tables: np.ndarray, num_blocks: int, kv_heads: int, head_dim: int, kind: KVFormat, block_size: int
) -> LayerKV:
    """A layer's cache with random content where the tables say, and NaN past every sequence's end."""
    kv = PagedKV(1, num_blocks, kv_heads, block_size, head_dim, kind, DEVICE).layers[0]
    for part in kv:
        if part is not None and part.is_floating_point():
            part.fill_(torch.nan)
    for row, length in enumerate(lens):
        token = torch.arange(length, device=DEVICE)
        blocks = torch.from_numpy(tables[row].astype(np.int64)).to(DEVICE)[token // block_size]
        for cache, scales in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
            values = torch.randn(length, kv_heads, head_dim, device=DEVICE)
            if scales is None:
                cache[blocks, :, token % block_size] = values.to(cache.dtype)
            else:
                quantised, scale = quantise_reference(values, kind)
                cache[blocks, :, token % block_size], scales[blocks, :, token % block_size] = quantised, scale
    return kv


def attention_case(
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    dtype: torch.dtype = DTYPE,
    kind: KVFormat | None = None,
    window: int | None = None,
    softcap: float | None = None,
    block_size: int = BLOCK_SIZE,
    large: bool = True,
) -> tuple[float, float]:
    """Error and tolerance of a batch with a group, single rows and chunks."""
    scale = 16 if large else 1
    shared = 4 * scale
    groups = [(3, shared), (1, 0), (1, 0)]
    lens = [shared * block_size + 1, shared * block_size + 19, shared * block_size + 7, 1, 37 * scale, 40 * scale, 33]
    sizes = [1, 1, 1, 1, 1, 9 * scale, 33]
    tables, num_blocks = random_tables(lens, groups, block_size)
    kv = filled_kv(lens, tables, num_blocks, kv_heads, head_dim, kind or KINDS[dtype], block_size)
    geometry = make_geometry(heads, kv_heads, head_dim, dtype, window, block_size)
    host = host_step(geometry, lens, tables, sizes, groups, share_min_keys=1, split_min_keys=64)
    _, batch, _ = InputBuffer(DEVICE).fill(host)
    q = torch.randn(sum(sizes), heads, head_dim, device=DEVICE).to(dtype)
    out = planned_attention(q, kv, batch, scale=head_dim**-0.5, window=window, softcap=softcap)
    rows = rows_of(lens, sizes)
    expected = paged_attention_reference(
        q.float(),
        *dequantise_reference(kv),
        torch.from_numpy(tables)[rows].to(DEVICE),
        batch.limits,
        scale=head_dim**-0.5,
        window=window,
        softcap=softcap,
    )
    return float((out.float() - expected).abs().max()), TOLERANCE[dtype]


def store_case(
    dtype: torch.dtype, kind: KVFormat, normed: bool, rotated: int, head_dim: int = 128
) -> tuple[float, float]:
    """Error of norm, rotary embedding and storing, queries and dequantised keys and values together."""
    heads, kv_heads, tokens = 8, 2, 37
    kv, other = (PagedKV(1, 6, kv_heads, BLOCK_SIZE, head_dim, kind, DEVICE).layers[0] for _ in range(2))
    for part in (*kv, *other):
        if part is not None:
            part.zero_()
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, device=DEVICE).to(dtype)
    slots = torch.randperm(6 * BLOCK_SIZE, device=DEVICE)[:tokens].int()
    slots[3] = -1
    positions = torch.randint(0, 500, (tokens,), device=DEVICE, dtype=torch.int32)
    angles = torch.rand(500, rotated // 2, device=DEVICE) * 6
    norms = tuple(torch.randn(head_dim, device=DEVICE).to(dtype) for _ in range(2)) if normed else None
    inputs = (slots, positions, (angles.cos(), angles.sin()), norms, 1e-6)
    expected = qkv.clone()
    store_qkv(qkv, kv, *inputs)
    store_qkv_reference(expected, other, *inputs)
    pairs = [
        (qkv[:, :heads], expected[:, :heads]),
        *zip(dequantise_reference(kv), dequantise_reference(other), strict=True),
    ]
    error = max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)
    # One step of the coarser of the two formats.
    step = {KVFormat.INT8: 1 / 127, KVFormat.FP8: 1 / 14}.get(kind, 0.0)
    return error, max(TOLERANCE[dtype], step)


def norm_case(dtype: torch.dtype, size: int) -> tuple[float, float]:
    x, residual = (torch.randn(9, size, device=DEVICE).to(dtype) for _ in range(2))
    weight, total = torch.randn(size, device=DEVICE).to(dtype), (x.float() + residual.float()).to(dtype)
    alone = (rms_norm(x, weight, 1e-6).float() - rms_norm_reference(x.float(), weight.float(), 1e-6)).abs().max()
    after = add_rms_norm(x, residual, weight, 1e-6).float() - rms_norm_reference(total.float(), weight.float(), 1e-6)
    same = (residual.float() - total.float()).abs().max()
    return float(torch.stack([alone, after.abs().max(), same]).max()) / 4, TOLERANCE[dtype]


def activation_case(dtype: torch.dtype, activation: Any, size: int) -> tuple[float, float]:
    x = torch.randn(5, 2 * size, device=DEVICE).to(dtype)
    error = gated_activation(x, activation).float() - gated_activation_reference(x.float(), activation)
    return float(error.abs().max()) / 4, TOLERANCE[dtype]


def copy_case(kind: KVFormat) -> tuple[float, float]:
    kv = PagedKV(3, 40, 2, BLOCK_SIZE, 64, kind, DEVICE)
    for part in kv.parts:
        part.copy_(torch.randint(-100, 100, part.shape).to(part.dtype))
    expected = [part.clone() for part in kv.parts]
    pairs = torch.tensor([[5, 30], [7, 5], [9, 7], [3, 31]])
    copy_blocks(kv.parts, kv.parts, pairs)
    copy_blocks_reference(expected, expected, pairs)
    return float(sum((a != b).sum() for a, b in zip(kv.parts, expected, strict=True))), 0.0


def sampling_case(vocab_size: int, num_rows: int) -> tuple[float, float]:
    """The share of draws that differ from the reference's by more than rounding, and of log-probabilities."""
    logits = torch.randn(num_rows, vocab_size, device=DEVICE) * 3

    def some(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor([values[row % len(values)] for row in range(num_rows)], dtype=dtype, device=DEVICE)

    rows = SamplingRows(
        torch.arange(num_rows, dtype=torch.int32, device=DEVICE),
        some([0.0, 0.7, 1.0, 1.3], torch.float32),
        some([0, 40, 0], torch.int32),
        some([1.0, 0.9, 1.0, 1.0, 0.95], torch.float32),
        some([0.0, 0.0, 0.05], torch.float32),
        torch.randint(0, 2**62, (num_rows,), device=DEVICE),
        some([0, 1, 2, 3], torch.int32),
        torch.arange(num_rows, dtype=torch.int32, device=DEVICE),
    )
    token_ids, logprobs = sample_rows(logits, rows)
    expected, expected_logprobs = sample_rows_reference(logits.cpu(), _on_host(rows))
    same = token_ids.cpu() == expected
    wrong = (logprobs.cpu() - expected_logprobs).abs()[same] > 1e-3
    return float((~same).float().mean() + wrong.float().mean()), 0.02


def _on_host(rows: SamplingRows) -> SamplingRows:
    names = [name for name in SamplingRows.__dataclass_fields__ if name != "adjustments"]
    return SamplingRows(**{name: getattr(rows, name).cpu() for name in names})


def kernel_cases(quick: bool, large: bool = True) -> Iterator[Case]:
    """Every kernel in the forms that are launched. large: in sizes for a card, not for the interpreter.

    quick: in the card's own type only.
    """
    types = [DTYPE, torch.float16] if HAS_BFLOAT16 and not quick else [DTYPE]
    for dtype in types:
        for head_dim in (64, 80, 96, 128, 256):
            yield (
                f"attention, {dtype}, heads of {head_dim}",
                lambda d=dtype, h=head_dim: attention_case(12, 4, h, d, large=large),
            )
        for kind in (KVFormat.INT8, KVFormat.FP8):
            yield (
                f"attention, {dtype}, {kind.value} KV",
                lambda d=dtype, k=kind: attention_case(dtype=d, kind=k, large=large),
            )
        yield f"attention, {dtype}, window", lambda d=dtype: attention_case(dtype=d, window=100, large=large)
        yield (
            f"attention, {dtype}, window and cap",
            lambda d=dtype: attention_case(8, 4, 256, d, window=300, softcap=50.0, large=large),
        )
        for block_size in (8, 24, 128):
            yield (
                f"attention, {dtype}, blocks of {block_size}",
                lambda d=dtype, b=block_size: attention_case(dtype=d, block_size=b, large=large),
            )
        for kind in (KINDS[dtype], KVFormat.INT8, KVFormat.FP8):
            yield f"store, {dtype}, {kind.value} KV", lambda d=dtype, k=kind: store_case(d, k, True, 128)
        yield (
            f"store, {dtype}, heads of 96, part of them turned",
            lambda d=dtype: store_case(d, KINDS[d], False, 72, 96),
        )
        for size in (576, 4096):
            yield f"norm, {dtype}, {size}", lambda d=dtype, s=size: norm_case(d, s)
        for activation in ("silu", "gelu_tanh"):
            yield f"activation, {dtype}, {activation}", lambda d=dtype, a=activation: activation_case(d, a, 1536)
    yield "attention, float32", lambda: attention_case(9, 3, 64, torch.float32, large=large)
    for kind in (KINDS[DTYPE], KVFormat.FP8):
        yield f"block copy, {kind.value}", lambda k=kind: copy_case(k)
    yield "sampling", lambda: sampling_case(128_256 if large else 500, 64 if large else 9)
