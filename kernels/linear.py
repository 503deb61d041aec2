"""A linear layer with its weight packed once for the way it will be multiplied.

x [M, K] times weight [N, K] transposed, plus bias [N] -> [M, N], float32.
Bound by memory for a few rows (the weight is read once), by arithmetic for many: 2 * M * N * K operations.
The weight is held in one form only, chosen in dispatch.py.
"""

import torch
from torch import Tensor

from localpaged.kernels.dispatch import LinearForm, linear_form
from localpaged.kernels.grouped_matmul import PackedWeight, grouped_matmul, pack_weight
from localpaged.kernels.grouped_weight import GroupedWeight

__all__ = ["GroupedWeight", "Linear", "linear_reference"]


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]."""
    return torch.nn.functional.linear(x, weight, bias)


class Linear:
    """A packed weight [N, K]; call it with x [M, K] to get [M, N]."""

    def __init__(self, shape: tuple[int, int], packed: PackedWeight | torch.ScriptObject | Tensor) -> None:
        self.shape = shape
        self._packed = packed
        self._bias: Tensor | None = None

    @classmethod
    def pack(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        grouped: GroupedWeight | None = None,
        exact: bool = False,
    ) -> "Linear":
        """Pack weight [N, K] and bias [N]; grouped is the same weight in its compact exact form.

        The layer keeps neither of them, only the form that it multiplies. exact: multiply in float32.
        """
        shape = (weight.shape[0], weight.shape[1])
        form = linear_form(weight, exact)
        if form is LinearForm.GROUPED_OR_HALF:
            packed = pack_weight(grouped, bias) if grouped is not None else None
            if packed is not None:
                return cls(shape, packed)
            half_bias = None if bias is None else bias.float()
            return cls(shape, torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), half_bias))
        layer = cls(shape, weight)
        layer._bias = bias
        return layer

    @classmethod
    def pack_grouped(cls, grouped: GroupedWeight, bias: Tensor | None = None) -> "Linear | None":
        """Pack a weight from its compact form alone; None where that is not how it would be multiplied."""
        if linear_form(grouped.q) is not LinearForm.GROUPED_OR_HALF:
            return None
        packed = pack_weight(grouped, bias)
        return None if packed is None else cls((grouped.q.shape[0], grouped.q.shape[1]), packed)

    @property
    def form(self) -> str:
        """How the weight is held, for people to read."""
        if isinstance(self._packed, PackedWeight):
            return f"{self._packed.bits}-bit"
        return str(self._packed.dtype).removeprefix("torch.") if isinstance(self._packed, Tensor) else "float16"

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]. Raises ValueError when K is another."""
        if x.ndim != 2 or x.shape[1] != self.shape[1]:
            raise ValueError(f"x {tuple(x.shape)} does not fit a weight {self.shape}")
        if isinstance(self._packed, PackedWeight):
            return grouped_matmul(x, self._packed)
        if isinstance(self._packed, Tensor):
            return linear_reference(x, self._packed, self._bias)
        if x.shape[0] == 0:
            return x.new_empty(0, self.shape[0])
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
