"""One pass over a layer's projected queries, keys and values: norm of each head, rotary embedding, keys and values into
their slots of the paged cache, quantised where the cache is.

qkv [T, H + 2 * Hkv, Dh]: queries are changed in place, keys and values go to caches [num_blocks, Hkv, block_size, Dh];
slot = block * block_size + offset, and a token whose slot is -1 stores nothing.
int8: the largest magnitude of a token's head becomes 127; fp8 (e4m3): 448; scales are float16.
Source: PagedAttention (arXiv:2309.06180), section 4.3; RoFormer (arXiv:2104.09864), section 3.4.2; RMSNorm
(arXiv:1910.07467), equation 4.
Bound by memory: reads qkv once and writes it once.
"""

import torch
from torch import Tensor

from localpaged.kernels.paged_kv import KVFormat, LayerKV
from localpaged.kernels.rms_norm import rms_norm_reference

MOST = {KVFormat.INT8: 127.0, KVFormat.FP8: 448.0}
# So that a head of zeros has a scale that float16 can hold.
LEAST_SCALE = 2.0**-14


def quantise_reference(x: Tensor, format: KVFormat) -> tuple[Tensor, Tensor]:
    """x [..., Dh] as the format's integers or bytes and float16 scales [...]; x is about one times the other."""
    scale = (x.float().abs().amax(-1) / MOST[format]).clamp_min(LEAST_SCALE).half()
    scaled = x.float() / scale.float()[..., None]
    if format is KVFormat.INT8:
        return scaled.round().clamp(-127, 127).to(torch.int8), scale
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scale


def dequantise_reference(kv: LayerKV) -> tuple[Tensor, Tensor]:
    """A layer's keys and values in float32."""
    if kv.k_scale is None or kv.v_scale is None:
        return kv.k.float(), kv.v.float()
    k, v = (x.view(torch.float8_e4m3fn) if kv.format is KVFormat.FP8 else x for x in (kv.k, kv.v))
    return k.float() * kv.k_scale.float()[..., None], v.float() * kv.v_scale.float()[..., None]


def store_qkv_reference(
    qkv: Tensor,
    kv: LayerKV,
    slots: Tensor,
    positions: Tensor,
    table: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    unit_offset: bool = False,
) -> None:
    """As store_qkv(), one step after the other, in float32."""
    num_kv_heads, block_size, head_dim = kv.k.shape[1:]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    q, k, v = qkv.float().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        q = rms_norm_reference(q.reshape(-1, head_dim), norms[0], eps, unit_offset).view(q.shape)
        k = rms_norm_reference(k.reshape(-1, head_dim), norms[1], eps, unit_offset).view(k.shape)
    if table is not None:
        q, k = _rotate(q, table, positions), _rotate(k, table, positions)
    qkv[:, :num_heads] = q.to(qkv.dtype)
    there = slots >= 0
    blocks, offsets = slots[there].long() // block_size, slots[there].long() % block_size
    for x, cache, scales in ((k[there], kv.k, kv.k_scale), (v[there], kv.v, kv.v_scale)):
        if scales is None:
            cache[blocks, :, offsets] = x.to(cache.dtype)
        else:
            cache[blocks, :, offsets], scales[blocks, :, offsets] = quantise_reference(x, kv.format)


def _rotate(x: Tensor, table: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    cos, sin = (part[positions.long()][:, None] for part in table)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def store_qkv(
    qkv: Tensor,
    kv: LayerKV,
    slots: Tensor,
    positions: Tensor,
    table: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    unit_offset: bool = False,
) -> None:
    """Norm, turn and store qkv [T, H + 2 * Hkv, Dh], contiguous; its first H heads are the queries afterwards.

    kv: one layer's cache; slots, positions: int32 [T]
    table: cos and sin, float32 [P, R/2] each, for the first R of Dh dimensions; None for no rotary embedding
    norms: weights [Dh] of the queries' and the keys' norm
    Raises ValueError when the shapes do not fit.
    """
    num_tokens, all_heads, head_dim = qkv.shape
    num_kv_heads = kv.k.shape[1]
    if head_dim != kv.k.shape[3] or all_heads <= 2 * num_kv_heads:
        raise ValueError(f"qkv {tuple(qkv.shape)} does not fit a cache {tuple(kv.k.shape)}")
    if slots.shape != (num_tokens,) or positions.shape != (num_tokens,):
        raise ValueError(f"{num_tokens} tokens need as many slots ({slots.shape}) and positions ({positions.shape})")
    if not qkv.is_contiguous() or (table is not None and 2 * table[0].shape[1] > head_dim):
        raise ValueError(f"qkv must be contiguous, and the rotary table no wider than heads of {head_dim}")
    if num_tokens == 0:
        return
    from localpaged.kernels.store_qkv_triton import launch

    launch(qkv, kv, slots, positions, table, norms, eps, unit_offset)
