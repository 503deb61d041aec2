"""Write the keys and values of new tokens into their slots of the paged cache.

k, v [T, Hkv, Dh] -> caches [num_blocks, Hkv, block_size, Dh]; slot = block * block_size + offset.
Source: "Efficient Memory Management for LLM Serving with PagedAttention", section 4.3 (arXiv:2309.06180).
Bound by memory: reads and writes 8 * T * Hkv * Dh bytes once.
"""

from torch import Tensor


def write_kv_reference(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Scatter k and v [T, Hkv, Dh] to slots int64 [T] of the caches, in place."""
    block_size = k_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    k_cache[blocks, :, offsets] = k.to(k_cache.dtype)
    v_cache[blocks, :, offsets] = v.to(v_cache.dtype)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write k and v [T, Hkv, Dh] to slots int64 [T] of the caches [blocks, Hkv, block_size, Dh], in place.

    Raises ValueError when the shapes do not fit.
    """
    if k.shape != v.shape or k_cache.shape != v_cache.shape:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must have one shape, and so must the caches")
    if k.shape[0] != slots.shape[0] or k.shape[1:] != (k_cache.shape[1], k_cache.shape[3]):
        raise ValueError(f"k {tuple(k.shape)} does not fit {slots.shape[0]} slots of a cache {tuple(k_cache.shape)}")
    if k.shape[0] == 0:
        return
    write_kv_reference(k, v, k_cache, v_cache, slots)
