"""Root mean square normalisation of the last dimension, alone or after adding to the residual stream.

x [T, C], weight [C] -> x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight) with a unit offset (Gemma).
Source: arXiv:1910.07467, equation 4. Bound by memory: reads and writes x once.
"""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """Normalise x [T, C] in float32."""
    xf = x.float()
    normed = xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)
    return (normed * (weight.float() + 1 if unit_offset else weight.float())).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """Normalise each row of x [T, C] and multiply by weight [C]; returns a new [T, C].

    Raises ValueError when the shapes do not fit.
    """
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"x {tuple(x.shape)} must be [T, C] with C = {tuple(weight.shape)}")
    return rms_norm_reference(x, weight, eps, unit_offset)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """Add x [T, C] to residual [T, C] in place and return the norm of the sum, a new [T, C].

    Raises ValueError when the shapes do not fit.
    """
    if x.shape != residual.shape or x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(
            f"x {tuple(x.shape)}, residual {tuple(residual.shape)} do not fit weight {tuple(weight.shape)}"
        )
    residual += x
    return rms_norm_reference(residual, weight, eps, unit_offset)
