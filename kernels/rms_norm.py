"""Root mean square normalisation of the last dimension, alone or after adding to the residual stream.

x [T, C], weight [C] -> x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight) with a unit offset (Gemma).
Source: arXiv:1910.07467, equation 4. Bound by memory: reads and writes x once.
"""

from functools import cache

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from localpaged.kernels.dispatch import SERIAL_ROWS, Implementation, implementation_for
from localpaged.kernels.host_array import lasting_array


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """Normalise x [T, C] in float32."""
    xf = x.float()
    normed = xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)
    return (normed * (weight.float() + 1 if unit_offset else weight.float())).to(x.dtype)


@njit(cache=True, fastmath={"contract", "reassoc"})
def _normalise(x, weight, eps, offset, out):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(total / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = x[i] * factor * (weight[i] + offset)


@njit(cache=True, fastmath={"contract", "reassoc"})
def _add(x, residual):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        residual[i] += x[i]


@cache
def _kernel():  # type: ignore[no-untyped-def]
    @njit("void(f4[:,::1],f4[:,::1],b1,f4[::1],f4,f4,f4[:,::1],i8)", parallel=True, cache=True)
    def kernel(x, residual, adds, weight, eps, offset, out, serial_rows):  # type: ignore[no-untyped-def]
        if x.shape[0] <= serial_rows:
            for row in range(x.shape[0]):
                if adds:
                    _add(x[row], residual[row])
                _normalise(residual[row], weight, eps, offset, out[row])
        else:
            for row in prange(x.shape[0]):
                if adds:
                    _add(x[row], residual[row])
                _normalise(residual[row], weight, eps, offset, out[row])

    return kernel


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """Normalise each row of x [T, C] and multiply by weight [C]; returns a new [T, C].

    Raises ValueError when the shapes do not fit.
    """
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"x {tuple(x.shape)} must be [T, C] with C = {tuple(weight.shape)}")
    implementation = implementation_for(x)
    if implementation is Implementation.TRITON and x.stride(1) == 1:
        from localpaged.kernels.rms_norm_triton import launch

        return launch(x, None, weight, eps, unit_offset)
    if implementation is not Implementation.NUMBA:
        return rms_norm_reference(x, weight, eps, unit_offset)
    rows = x.contiguous().numpy()
    out = np.empty(rows.shape, np.float32)
    _kernel()(rows, rows, False, lasting_array(weight), eps, float(unit_offset), out, SERIAL_ROWS)
    return torch.from_numpy(out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """Add x [T, C] to residual [T, C] in place and return the norm of the sum, a new [T, C].

    Raises ValueError when the shapes do not fit.
    """
    if x.shape != residual.shape or x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(
            f"x {tuple(x.shape)}, residual {tuple(residual.shape)} do not fit weight {tuple(weight.shape)}"
        )
    implementation = implementation_for(x)
    if implementation is Implementation.TRITON and x.stride(1) == 1 and residual.is_contiguous():
        from localpaged.kernels.rms_norm_triton import launch

        return launch(x, residual, weight, eps, unit_offset)
    if implementation is not Implementation.NUMBA or not residual.is_contiguous():
        residual += x
        return rms_norm_reference(residual, weight, eps, unit_offset)
    rows, sums = x.contiguous().numpy(), residual.numpy()
    out = np.empty(rows.shape, np.float32)
    _kernel()(rows, sums, True, lasting_array(weight), eps, float(unit_offset), out, SERIAL_ROWS)
    return torch.from_numpy(out)
