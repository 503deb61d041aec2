"""The gated activation between a feed-forward layer's two products.

gate_up [T, 2F] -> activation(gate) * up, [T, F]; the first F columns are the gate.
Source: "GLU Variants Improve Transformer" (arXiv:2002.05202), section 2. Bound by memory.
"""

from functools import cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit, prange, types
from numba.extending import intrinsic
from torch import Tensor

from localpaged.kernels.dispatch import SERIAL_ROWS, Implementation, implementation_for
from localpaged.kernels.vector_ir import F32, VectorBuilder

Activation = Literal["silu", "gelu_tanh"]


def gated_activation_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up of gate_up [T, 2F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


LANES = 16


@intrinsic(prefer_literal=True)
def _activate(typing_context: Any, gate: Any, up: Any, out: Any, num_vectors: Any, gelu: Any) -> Any:
    """num_vectors * LANES float32 at address out = activation(gate) * up."""
    with_gelu = gelu.literal_value

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v = VectorBuilder(builder)
        gate, up, out, num_vectors = arguments[:4]

        def const(value: float) -> Any:
            return v.constant(F32, value, LANES)

        def one_vector(index: Any, carried: list[Any]) -> list[Any]:
            offset = builder.mul(index, v.integer(4 * LANES))
            x = v.load(builder.add(gate, offset), F32, LANES)
            if with_gelu:
                # sqrt(2 / pi) * (x + 0.044715 * x^3)
                cubic = v.fma(builder.fmul(x, x), const(0.7978845608 * 0.044715), const(0.7978845608))
                half = builder.fmul(x, const(0.5))
                active = v.fma(half, v.tanh(builder.fmul(x, cubic)), half)
            else:
                active = builder.fdiv(x, builder.fadd(const(1.0), v.exp(builder.fsub(const(0.0), x))))
            product = builder.fmul(active, v.load(builder.add(up, offset), F32, LANES))
            v.store(product, builder.add(out, offset))
            return []

        v.loop(num_vectors, [], one_vector)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp, gelu), codegen


@njit(cache=True)
def _activate_row(row, gate_up, out, gelu):  # type: ignore[no-untyped-def]
    size = out.shape[1]
    gate = gate_up.ctypes.data + row * gate_up.strides[0]
    to = out.ctypes.data + row * out.strides[0]
    if gelu:
        _activate(gate, gate + 4 * size, to, size // LANES, 1)
    else:
        _activate(gate, gate + 4 * size, to, size // LANES, 0)


@cache
def _kernel():  # type: ignore[no-untyped-def]
    @njit("void(f4[:,::1],f4[:,::1],b1,i8)", parallel=True, cache=True)
    def kernel(gate_up, out, gelu, serial_rows):  # type: ignore[no-untyped-def]
        if out.shape[0] <= serial_rows:
            for row in range(out.shape[0]):
                _activate_row(row, gate_up, out, gelu)
        else:
            for row in prange(out.shape[0]):
                _activate_row(row, gate_up, out, gelu)

    return kernel


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up; gate_up [T, 2F] -> a new [T, F].

    Raises ValueError for another activation or an odd number of columns.
    """
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {activation!r} is neither silu nor gelu_tanh")
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} must be [T, 2F]")
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    implementation = implementation_for(gate_up)
    if implementation is Implementation.TRITON:
        from localpaged.kernels.swiglu_triton import launch

        return launch(gate_up, activation == "gelu_tanh")
    if implementation is Implementation.REFERENCE or size % LANES or not size:
        return gated_activation_reference(gate_up, activation)
    out = np.empty((num_rows, size), np.float32)
    _kernel()(gate_up.contiguous().numpy(), out, activation == "gelu_tanh", SERIAL_ROWS)
    return torch.from_numpy(out)
