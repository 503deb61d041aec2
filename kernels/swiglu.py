"""The gated activation between a feed-forward layer's two products.

gate_up [T, 2F] -> activation(gate) * up, [T, F]; the first F columns are the gate.
Source: "GLU Variants Improve Transformer" (arXiv:2002.05202), section 2. Bound by memory.
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


def gated_activation_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up of gate_up [T, 2F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up; gate_up [T, 2F] -> a new [T, F].

    Raises ValueError for another activation or an odd number of columns.
    """
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {activation!r} is neither silu nor gelu_tanh")
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} must be [T, 2F]")
    return gated_activation_reference(gate_up, activation)
