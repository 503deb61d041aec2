"""Rotary position embedding of queries and keys, in place.

q [T, H, Dh], k [T, Hkv, Dh]; the first R of Dh dimensions turn, dimension i together with i + R/2.
Source: RoFormer, section 3.4.2 (arXiv:2104.09864), in the half-split order of transformers' Llama.
Bound by memory: reads and writes q and k once.
"""

from torch import Tensor


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
    apply_rotary_reference(q, k, cos, sin, positions)
