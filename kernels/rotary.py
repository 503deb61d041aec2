"""Rotary position embedding of queries and keys, in place.

q [T, H, Dh], k [T, Hkv, Dh]; the first R of Dh dimensions turn, dimension i together with i + R/2.
Source: RoFormer, section 3.4.2 (arXiv:2104.09864), in the half-split order of transformers' Llama.
Bound by memory: reads and writes q and k once.
"""

from functools import cache

from numba import njit, prange
from torch import Tensor

from localpaged.kernels.dispatch import SERIAL_ROWS, Implementation, implementation_for
from localpaged.kernels.float_row import float_row
from localpaged.kernels.host_array import lasting_array


def _rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn x [T, heads, Dh] by cos and sin [T, R/2]."""
    half = cos.shape[1]
    first, second = x[..., :half].clone(), x[..., half : 2 * half].clone()
    cos, sin = cos[:, None], sin[:, None]
    x[..., :half] = first * cos - second * sin
    x[..., half : 2 * half] = second * cos + first * sin


def apply_rotary_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Turn q and k in place by the angles of their positions."""
    _rotate_reference(q, cos[positions], sin[positions])
    _rotate_reference(k, cos[positions], sin[positions])


@njit(cache=True, fastmath={"contract"})
def _rotate_token(token, x, cos, sin, position):  # type: ignore[no-untyped-def]
    half = cos.shape[1]
    c, s = cos[position], sin[position]
    for head in range(x.shape[1]):
        row = float_row(x.ctypes.data + token * x.strides[0] + head * x.strides[1], 2 * half)
        for i in range(half):
            first, second = row[i], row[half + i]
            row[i] = first * c[i] - second * s[i]
            row[half + i] = second * c[i] + first * s[i]


@cache
def _kernel():  # type: ignore[no-untyped-def]
    @njit("void(f4[:,:,:],f4[:,:,:],f4[:,::1],f4[:,::1],i8[:],i8)", parallel=True, cache=True)
    def kernel(q, k, cos, sin, positions, serial_rows):  # type: ignore[no-untyped-def]
        if positions.shape[0] <= serial_rows:
            for token in range(positions.shape[0]):
                _rotate_token(token, q, cos, sin, positions[token])
                _rotate_token(token, k, cos, sin, positions[token])
        else:
            for token in prange(positions.shape[0]):
                _rotate_token(token, q, cos, sin, positions[token])
                _rotate_token(token, k, cos, sin, positions[token])

    return kernel


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Turn q [T, H, Dh] and k [T, Hkv, Dh] in place.

    cos, sin: float32 [P, R/2] for each of P positions, any attention scaling included
    positions: int64 [T], each below P
    Raises ValueError when the shapes do not fit.
    """
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or positions.shape[0] != q.shape[0]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and {positions.shape[0]} positions do not fit")
    if cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[2]:
        raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit heads of {q.shape[2]}")
    if q.shape[0] == 0:
        return
    if (
        implementation_for(q) is not Implementation.NUMBA
        or q.stride(2) != 1
        or k.stride(2) != 1
        or not cos.is_contiguous()
    ):
        apply_rotary_reference(q, k, cos, sin, positions)
    else:
        _kernel()(
            q.numpy(),
            k.numpy(),
            lasting_array(cos),
            lasting_array(sin),
            lasting_array(positions),
            SERIAL_ROWS,
        )
