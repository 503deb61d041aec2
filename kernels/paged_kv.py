"""The memory that blocks are in: every layer's keys and values, and their scales where they are quantised.

Knows shapes and bytes; who owns which block is the block pool's business.
"""

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor


class KVFormat(Enum):
    """How keys and values are held. Quantised ones have one float16 scale a token and head, for K and for V."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    # Four bits of exponent and three of mantissa, as torch.float8_e4m3fn; held as bytes, which every card can load.
    FP8 = "fp8"

    @property
    def quantised(self) -> bool:
        return self in (KVFormat.INT8, KVFormat.FP8)

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self]

    def bytes_per_head(self, head_dim: int) -> int:
        """Bytes of one token's keys of one head, scale included; values take as many."""
        return head_dim * self.dtype.itemsize + (2 if self.quantised else 0)


_DTYPES = {
    KVFormat.FLOAT32: torch.float32,
    KVFormat.FLOAT16: torch.float16,
    KVFormat.BFLOAT16: torch.bfloat16,
    KVFormat.INT8: torch.int8,
    KVFormat.FP8: torch.uint8,
}


class LayerKV(NamedTuple):
    """One layer's keys and values [num_blocks, Hkv, block_size, Dh], scales float16 [num_blocks, Hkv, block_size]."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def format(self) -> KVFormat:
        return next(kind for kind, dtype in _DTYPES.items() if dtype == self.k.dtype)


class PagedKV:
    """KV of all layers in one allocation, so that one kernel can reach every layer's part of a block.

    values: [2 * layers, num_blocks, Hkv, block_size, Dh]; a layer's keys, then its values
    scales: float16 [2 * layers, num_blocks, Hkv, block_size] where the format is quantised
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        format: KVFormat = KVFormat.FLOAT32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (2 * num_layers, num_blocks, num_kv_heads, block_size)
        self.format = format
        # Not filled: what no token has written takes no memory, and nothing reads it.
        self.values = torch.empty(*shape, head_dim, dtype=format.dtype, device=device)
        self.scales = torch.empty(shape, dtype=torch.float16, device=device) if format.quantised else None
        self.layers = [
            LayerKV(
                self.values[2 * layer],
                self.values[2 * layer + 1],
                None if self.scales is None else self.scales[2 * layer],
                None if self.scales is None else self.scales[2 * layer + 1],
            )
            for layer in range(num_layers)
        ]

    @property
    def num_blocks(self) -> int:
        return self.values.shape[1]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V that one block takes in all layers, scales included."""
        total = self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)
        return total // self.num_blocks

    @property
    def parts(self) -> list[Tensor]:
        """What holds something for each block, [2 * layers, num_blocks, ...]."""
        return [self.values] if self.scales is None else [self.values, self.scales]
