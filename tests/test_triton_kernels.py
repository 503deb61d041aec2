"""The smaller Triton kernels in the interpreter, each against its reference, in every type that they take."""

import interpreter  # noqa: F401
import pytest
import torch
from tolerances import TRITON

from localpaged.kernels import dispatch
from localpaged.kernels.block_copy import copy_blocks
from localpaged.kernels.paged_kv import KVFormat, LayerKV, PagedKV
from localpaged.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from localpaged.kernels.store_qkv import dequantise_reference, quantise_reference, store_qkv, store_qkv_reference
from localpaged.kernels.swiglu import gated_activation, gated_activation_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def triton_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton_on_cpu", True)


def close(ours: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool(((ours.float() - expected.float()).abs() <= TRITON[dtype] * (1 + expected.float().abs())).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "unit_offset"), [((1, 64), False), ((5, 577), True), ((3, 4096), False)])
def test_norms_alone_and_after_adding(dtype: torch.dtype, shape: tuple[int, int], unit_offset: bool) -> None:
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    assert close(rms_norm(x, weight, 1e-5, unit_offset), rms_norm_reference(x, weight, 1e-5, unit_offset), dtype)
    total = (x.float() + residual.float()).to(dtype)
    normed = add_rms_norm(x, residual, weight, 1e-5, unit_offset)
    assert close(residual, total, dtype)
    assert close(normed, rms_norm_reference(residual, weight, 1e-5, unit_offset), dtype)


def test_norms_of_a_view_and_of_nothing() -> None:
    wide, weight = torch.randn(4, 200), torch.randn(64)
    assert close(rms_norm(wide[:, 40:104], weight, 1e-5), rms_norm_reference(wide[:, 40:104], weight, 1e-5), wide.dtype)
    assert rms_norm(wide[:0, :64], weight, 1e-5).shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "activation"), [((1, 2), "silu"), ((3, 2 * 1500), "gelu_tanh"), ((2, 2 * 63), "silu")]
)
def test_gated_activation(dtype: torch.dtype, shape: tuple[int, int], activation: str) -> None:
    x = torch.randn(shape).to(dtype) * 6
    ours = gated_activation(x, activation)  # type: ignore[arg-type]
    assert close(ours, gated_activation_reference(x.float(), activation), dtype)  # type: ignore[arg-type]


def poisoned(kind: KVFormat, head_dim: int, block_size: int, kv_heads: int) -> LayerKV:
    kv = PagedKV(1, 7, kv_heads, block_size, head_dim, kind).layers[0]
    for part in kv:
        if part is not None:
            part.fill_(torch.nan) if part.is_floating_point() else part.fill_(99)
    return kv


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "rotated", "heads", "kv_heads", "normed"),
    [
        (64, 64, 6, 2, False),
        (128, 128, 3, 1, True),
        (80, 32, 4, 4, False),
        (96, 96, 5, 1, True),
        (64, None, 2, 2, True),
    ],
)
def test_queries_turn_in_place_and_keys_and_values_reach_their_slots(
    dtype: torch.dtype, head_dim: int, rotated: int | None, heads: int, kv_heads: int, normed: bool
) -> None:
    kind = {torch.float32: KVFormat.FLOAT32, torch.float16: KVFormat.FLOAT16, torch.bfloat16: KVFormat.BFLOAT16}[dtype]
    kv, expected_kv = (poisoned(kind, head_dim, 9, kv_heads) for _ in range(2))
    qkv = torch.randn(5, heads + 2 * kv_heads, head_dim).to(dtype)
    slots = torch.randperm(7 * 9)[:5].int()
    # A row that pads a batch.
    slots[2] = -1
    positions = torch.tensor([0, 39, -1, 7, 20], dtype=torch.int32)
    table = None
    if rotated is not None:
        angles = torch.rand(40, rotated // 2) * 6
        table = angles.cos(), angles.sin()
    norms = (torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype)) if normed else None
    expected = qkv.clone()
    store_qkv(qkv, kv, slots, positions, table, norms, 1e-5, normed)
    store_qkv_reference(expected, expected_kv, slots, positions.clamp_min(0), table, norms, 1e-5, normed)
    assert close(qkv[:, :heads], expected[:, :heads], dtype)
    for ours, other in zip(kv[:2], expected_kv[:2], strict=True):
        assert torch.equal(ours.isnan(), other.isnan())
        assert close(ours.nan_to_num(), other.nan_to_num(), dtype)


@pytest.mark.parametrize("kind", [KVFormat.INT8, KVFormat.FP8])
def test_stored_integers_and_bytes_are_the_reference_s(kind: KVFormat) -> None:
    kv, expected_kv = (poisoned(kind, 64, 8, 2) for _ in range(2))
    # Large, small, and a head of zeros.
    qkv = torch.randn(6, 4 + 4, 64) * torch.tensor([1e-6, 1.0, 300.0, 1.0, 0.0, 5.0])[:, None, None]
    slots, positions = torch.randperm(56)[:6].int(), torch.arange(6, dtype=torch.int32)
    expected = qkv.clone()
    store_qkv(qkv, kv, slots, positions, None)
    store_qkv_reference(expected, expected_kv, slots, positions, None)
    assert kv.k_scale is not None and expected_kv.k_scale is not None
    assert torch.equal(kv.k_scale.isnan(), expected_kv.k_scale.isnan())
    for ours, other in zip(dequantise_reference(kv), dequantise_reference(expected_kv), strict=True):
        written = ~other.isnan()
        assert torch.equal(written, ~ours.isnan())
        # Rounding through float16 may take the neighbour where a number lies halfway.
        step = other.nan_to_num().abs().amax() / (127 if kind is KVFormat.INT8 else 14)
        assert ((ours - other)[written].abs() <= step).all()
        assert ((ours - other)[written] != 0).float().mean() < 0.01


def test_slots_beyond_two_to_the_31_elements() -> None:
    num_blocks = 2**31 // (16 * 64) + 3
    kv = PagedKV(1, num_blocks, 1, 16, 64, KVFormat.INT8).layers[0]
    qkv = torch.randn(2, 3, 64)
    slots = torch.tensor([16 * (num_blocks - 1) + 5, 16 * (num_blocks - 2)], dtype=torch.int32)
    store_qkv(qkv, kv, slots, slots * 0, None)
    assert kv.k_scale is not None
    for token, (block, offset) in enumerate([(num_blocks - 1, 5), (num_blocks - 2, 0)]):
        stored = kv.k[block, 0, offset].float() * kv.k_scale[block, 0, offset].float()
        assert (stored - qkv[token, 1]).abs().max() < 0.05


@pytest.mark.parametrize("kind", [KVFormat.INT8, KVFormat.FP8])
def test_a_quantised_number_is_within_half_a_step(kind: KVFormat) -> None:
    x = torch.randn(50, 64) * 10
    values, scale = quantise_reference(x, kind)
    kv = LayerKV(values[None], values[None], scale[None], scale[None])
    error = (dequantise_reference(kv)[0][0] - x).abs()
    allowed = 0.51 * scale.float()[:, None] if kind is KVFormat.INT8 else x.abs() / 15 + scale.float()[:, None] / 500
    assert (error <= allowed).all()


@pytest.mark.parametrize("kind", list(KVFormat))
def test_block_copies_of_every_format_read_before_they_write(kind: KVFormat) -> None:
    kv = PagedKV(2, 9, 1, 9, 5, kind)
    for part in kv.parts:
        part.copy_(torch.randint(-100, 100, part.shape).to(part.dtype))
    before = [part.clone() for part in kv.parts]
    copy_blocks(kv.parts, kv.parts, torch.tensor([[4, 1], [6, 4], [4, 2], [8, 6]]))
    for part, old in zip(kv.parts, before, strict=True):
        assert torch.equal(part, old[:, [0, 4, 4, 3, 6, 5, 8, 7, 8]])
    with pytest.raises(ValueError, match="in a circle"):
        copy_blocks(kv.parts, kv.parts, torch.tensor([[1, 2], [2, 1]]))


def test_qkv_that_does_not_fit_is_refused() -> None:
    kv = PagedKV(1, 2, 2, 8, 64).layers[0]
    ints = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="does not fit a cache"):
        store_qkv(torch.randn(3, 8, 32), kv, ints, ints, None)
    with pytest.raises(ValueError, match="as many slots"):
        store_qkv(torch.randn(3, 8, 64), kv, ints[:2], ints, None)
