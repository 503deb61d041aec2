"""Write the keys and values of new tokens into their slots of the paged cache.

k, v [T, Hkv, Dh] -> caches [num_blocks, Hkv, block_size, Dh]; slot = block * block_size + offset.
Source: "Efficient Memory Management for LLM Serving with PagedAttention", section 4.3 (arXiv:2309.06180).
Bound by memory: reads and writes 8 * T * Hkv * Dh bytes once.
"""

from functools import cache

from numba import njit, prange
from torch import Tensor

from localpaged.kernels.dispatch import SERIAL_ROWS, Implementation, implementation_for
from localpaged.kernels.float_row import float_row
from localpaged.kernels.host_array import lasting_array


def write_kv_reference(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Scatter k and v [T, Hkv, Dh] to slots int64 [T] of the caches, in place."""
    block_size = k_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    k_cache[blocks, :, offsets] = k.to(k_cache.dtype)
    v_cache[blocks, :, offsets] = v.to(v_cache.dtype)


@njit(cache=True)
def _write_token(token, k, v, k_cache, v_cache, slots):  # type: ignore[no-untyped-def]
    block_size, head_size = k_cache.shape[2], k_cache.shape[3]
    block, slot = slots[token] // block_size, slots[token] % block_size
    for head in range(k.shape[1]):
        new_k = float_row(k.ctypes.data + token * k.strides[0] + head * k.strides[1], head_size)
        new_v = float_row(v.ctypes.data + token * v.strides[0] + head * v.strides[1], head_size)
        to_k, to_v = k_cache[block, head, slot], v_cache[block, head, slot]
        for d in range(head_size):
            to_k[d] = new_k[d]
            to_v[d] = new_v[d]


@cache
def _kernel():  # type: ignore[no-untyped-def]
    @njit("void(f4[:,:,:],f4[:,:,:],f4[:,:,:,::1],f4[:,:,:,::1],i8[:],i8)", parallel=True, cache=True)
    def kernel(k, v, k_cache, v_cache, slots, serial_rows):  # type: ignore[no-untyped-def]
        if slots.shape[0] <= serial_rows:
            for token in range(slots.shape[0]):
                _write_token(token, k, v, k_cache, v_cache, slots)
        else:
            for token in prange(slots.shape[0]):
                _write_token(token, k, v, k_cache, v_cache, slots)

    return kernel


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
    if implementation_for(k) is not Implementation.NUMBA or k.stride(2) != 1 or v.stride(2) != 1:
        write_kv_reference(k, v, k_cache, v_cache, slots)
    else:
        _kernel()(
            k.numpy(), v.numpy(), lasting_array(k_cache), lasting_array(v_cache), lasting_array(slots), SERIAL_ROWS
        )
