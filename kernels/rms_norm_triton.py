"""The Triton kernel of rms_norm.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, out, eps, offset, x_stride, SIZE: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr
):
    """One row; ADD: the residual becomes residual + x, and its norm is the result."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    mask = i < SIZE
    values = tl.load(x + row * x_stride + i, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * SIZE + i, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + row * SIZE + i, rounded, mask=mask)
        # The norm is that of what is kept.
        values = rounded.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(values * values) / SIZE + eps)
    scaled = values * factor * (tl.load(weight + i, mask=mask, other=0.0).to(tl.float32) + offset)
    tl.store(out + row * SIZE + i, scaled.to(out.dtype.element_ty), mask=mask)


def launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    """The norm of x [T, C], or of residual + x, which is left in residual; a new [T, C]."""
    num_rows, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_rows == 0:
        return out
    width = triton.next_power_of_2(size)
    _rms_norm_kernel[(num_rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        1.0 if unit_offset else 0.0,
        x.stride(0),
        SIZE=size,
        WIDTH=width,
        ADD=residual is not None,
        num_warps=max(1, min(16, width // 512)),
    )
    return out
