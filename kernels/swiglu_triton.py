"""The Triton kernel of swiglu.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024


@triton.jit
def _gated_activation_kernel(gate_up, out, SIZE: tl.constexpr, TILE: tl.constexpr, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """TILE numbers of one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = i < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + i, mask=mask, other=0.0).to(tl.float32)
    # gelu(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)) in its tanh form.
    inner = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate) if GELU else gate
    # The sigmoid by what cannot overflow.
    small = tl.exp(-tl.abs(inner))
    sigmoid = tl.where(inner >= 0, 1.0, small) / (1.0 + small)
    tl.store(out + row * SIZE + i, (gate * sigmoid * up).to(out.dtype.element_ty), mask=mask)


def launch(gate_up: Tensor, gelu: bool) -> Tensor:
    """activation(gate) * up of gate_up [T, 2F], a new [T, F]."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up.contiguous()
    out = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        _gated_activation_kernel[(num_rows, triton.cdiv(size, TILE))](
            gate_up, out, SIZE=size, TILE=TILE, GELU=gelu, num_warps=4
        )
    return out
