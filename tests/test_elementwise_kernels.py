"""Norms, rotary embedding, gated activation, KV writes and block copies against their references."""

import pytest
import torch
from tolerances import ELEMENTWISE

from localpaged.kernels.block_copy import copy_blocks
from localpaged.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from localpaged.kernels.rotary import apply_rotary, apply_rotary_reference
from localpaged.kernels.swiglu import gated_activation, gated_activation_reference
from localpaged.kernels.write_kv import write_kv, write_kv_reference


def close(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((ours - expected).abs() < ELEMENTWISE * (1 + expected.abs())).all())


@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (33, 80), (200, 63)])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm_equals_its_reference(shape: tuple[int, int], unit_offset: bool) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[1])
    before = x.clone()
    assert close(rms_norm(x, weight, 1e-5, unit_offset), rms_norm_reference(x, weight, 1e-5, unit_offset))
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (33, 63)])
def test_add_rms_norm_adds_in_place(shape: tuple[int, int]) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    total = x + residual
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert close(residual, total)
    assert close(normed, rms_norm_reference(total, weight, 1e-5))


def test_norms_refuse_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError):
        rms_norm(torch.randn(2, 5), torch.randn(4), 1e-5)
    with pytest.raises(ValueError):
        add_rms_norm(torch.randn(2, 4), torch.randn(3, 4), torch.randn(4), 1e-5)


@pytest.mark.parametrize(("head_dim", "rotated"), [(64, 64), (80, 80), (96, 48), (128, 32)])
@pytest.mark.parametrize("num_tokens", [1, 5, 64])
def test_rotary_turns_views_of_one_projection_in_place(head_dim: int, rotated: int, num_tokens: int) -> None:
    # q, k and v side by side, as the decoder has them: neither q nor k is contiguous.
    qkv = torch.randn(num_tokens, 6 + 2 + 2, head_dim)
    expected = qkv.clone()
    angles = torch.rand(100, rotated // 2) * 6
    table = angles.cos(), angles.sin()
    positions = torch.randint(0, 100, (num_tokens,))
    q, k, _ = qkv.split([6, 2, 2], dim=1)
    apply_rotary(q, k, *table, positions)
    apply_rotary_reference(*expected.split([6, 2, 2], dim=1)[:2], *table, positions)
    assert close(qkv, expected)
    with pytest.raises(ValueError):
        apply_rotary(q, k, *table, positions[:-1])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 32), (5, 2 * 1536), (70, 2 * 37)])
def test_gated_activation_equals_its_reference(activation: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape) * 8
    ours = gated_activation(x, activation)  # type: ignore[arg-type]
    assert close(ours, gated_activation_reference(x, activation))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_kv_goes_to_its_slots_and_nowhere_else(num_tokens: int) -> None:
    qkv = torch.randn(num_tokens, 10, 64)
    k, v = qkv[:, 6:8], qkv[:, 8:]
    caches = [torch.full((12, 2, 8, 64), torch.nan) for _ in range(4)]
    slots = torch.randperm(96)[:num_tokens]
    write_kv(k, v, caches[0], caches[1], slots)
    write_kv_reference(k, v, caches[2], caches[3], slots)
    assert torch.equal(caches[0].nan_to_num(9), caches[2].nan_to_num(9))
    assert torch.equal(caches[1].nan_to_num(9), caches[3].nan_to_num(9))
    with pytest.raises(ValueError):
        write_kv(k, v, caches[0], caches[1], torch.cat([slots, slots]))


def test_copies_read_before_they_write() -> None:
    cache = torch.randn(1, 5, 2, 4, 8)
    before = cache.clone()
    # Block 1 is given up and taken again within one step: source of one copy, destination of another.
    copy_blocks([cache], [cache], torch.tensor([[1, 3], [2, 1]]))
    assert torch.equal(cache[0, 3], before[0, 1])
    assert torch.equal(cache[0, 1], before[0, 2])
    assert torch.equal(cache[0, [0, 2, 4]], before[0, [0, 2, 4]])
