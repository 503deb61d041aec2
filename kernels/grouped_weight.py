"""A weight matrix in 8-bit integers with a scale, and perhaps a minimum, for each group of columns.

The exact compact form of a GGUF-quantised matrix: w = scale * q + minimum.
Source: the block layouts in ggml-common.h and ggml-quants.c (github.com/ggml-org/ggml).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# ggml's tensor type numbers; a GGUF file stores them.
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K = 2, 3, 6, 7, 8, 12, 13, 14
SUPER_BLOCK = 256

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """w = scale * q + minimum, a scale and a minimum for each `group` columns.

    q: int8 [N, K]
    scale: float32 [N, K/group]
    minimum: float32 [N, K/group], None when it is zero throughout
    """

    q: Tensor
    scale: Tensor
    minimum: Tensor | None
    group: int

    def dequantize(self) -> Tensor:
        """The float32 matrix [N, K]."""
        rows, columns = self.q.shape
        w = self.q.view(rows, columns // self.group, self.group).float() * self.scale[..., None]
        if self.minimum is not None:
            w += self.minimum[..., None]
        return w.view(rows, columns)

    def rows(self, indices: Tensor) -> Tensor:
        """Only these rows of the float32 matrix, [len(indices), K]: an embedding lookup."""
        minimum = None if self.minimum is None else self.minimum[indices]
        return GroupedWeight(self.q[indices], self.scale[indices], minimum, self.group).dequantize()

    def regroup(self, group: int, with_minimum: bool) -> "GroupedWeight":
        """The same weight in smaller groups, which divide its own, and with a minimum where it had none."""
        repeats = self.group // group
        scale = self.scale.repeat_interleave(repeats, dim=1)
        minimum = None if self.minimum is None else self.minimum.repeat_interleave(repeats, dim=1)
        if minimum is None and with_minimum:
            minimum = torch.zeros_like(scale)
        return GroupedWeight(self.q, scale, minimum, group)

    @staticmethod
    def concatenate(parts: list["GroupedWeight"]) -> "GroupedWeight":
        """Stack matrices over their rows; those of different forms (Q4_K beside Q6_K) take one that holds both."""
        group = math.gcd(*(part.group for part in parts))
        with_minimum = any(part.minimum is not None for part in parts)
        parts = [part.regroup(group, with_minimum) for part in parts]
        minima = [part.minimum for part in parts if part.minimum is not None]
        return GroupedWeight(
            torch.cat([part.q for part in parts]),
            torch.cat([part.scale for part in parts]),
            torch.cat(minima) if minima else None,
            group,
        )


def _halves(data: Bytes) -> Floats:
    """float16 numbers stored as bytes [..., 2] -> float32 [...]."""
    return np.ascontiguousarray(data).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """Bytes [..., n] -> [..., 2n]: all low nibbles, then all high ones."""
    return np.concatenate([data & 0x0F, data >> 4], axis=-1)


def _fifth_bits(data: Bytes) -> Bytes:
    """32 bits stored as bytes [..., 4] -> [..., 32], each bit in the place of a 5-bit number's highest."""
    return np.unpackbits(data, axis=-1, bitorder="little") << np.uint8(4)


def _k_scales(data: Bytes) -> tuple[Floats, Floats]:
    """The 6-bit scales and minima of a Q4_K or Q5_K super-block, bytes [..., 12] -> two of [..., 8]."""
    low, middle, high = data[..., :4], data[..., 4:8], data[..., 8:]
    scale = np.concatenate([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], axis=-1)
    minimum = np.concatenate([middle & 0x3F, (high >> 4) | ((middle >> 2) & 0x30)], axis=-1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _decode_k(blocks: Bytes, tensor_type: int) -> tuple[NDArray, Floats, Floats | None, int]:
    """Super-blocks of 256 weights, bytes [N, blocks, bytes] -> q, scale, minimum, group."""
    rows = blocks.shape[0]
    if tensor_type == Q6_K:
        low = blocks[..., :128].reshape(rows, -1, 2, 1, 64) >> np.array([[0], [4]], dtype=np.uint8) & 0x0F
        high = blocks[..., 128:192].reshape(rows, -1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & 0x03
        q = low.reshape(rows, -1) | (high.reshape(rows, -1) << np.uint8(4))
        scale = _halves(blocks[..., 208:210])[..., None] * blocks[..., 192:208].view(np.int8).astype(np.float32)
        return q.astype(np.int8) - np.int8(32), scale, None, 16
    scales, minima = _k_scales(blocks[..., 4:16])
    quants = blocks[..., 48 if tensor_type == Q5_K else 16 :]
    q = (quants.reshape(rows, -1, 4, 1, 32) >> np.array([[0], [4]], dtype=np.uint8)) & 0x0F
    q = q.reshape(rows, -1, 8, 32)
    if tensor_type == Q5_K:
        bits = blocks[..., 16:48].reshape(rows, -1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None]
        q = q | ((bits & 1) << np.uint8(4))
    scale = _halves(blocks[..., :2])[..., None] * scales
    return q, scale, -(_halves(blocks[..., 2:4])[..., None] * minima), 32


def grouped_from_gguf(data: Bytes, tensor_type: int, shape: tuple[int, int]) -> GroupedWeight | None:
    """Regroup raw GGUF blocks without any rounding; None for a type that has no such form.

    data: bytes of the tensor, [N, bytes a row] or flat, as gguf.GGUFReader gives them
    tensor_type: gguf.GGMLQuantizationType
    shape: (N, K), rows then columns
    """
    block_bytes = {Q4_0: 18, Q4_1: 20, Q5_0: 22, Q5_1: 24, Q8_0: 34, Q4_K: 144, Q5_K: 176, Q6_K: 210}
    kind = int(tensor_type)
    if kind not in block_bytes:
        return None
    rows, columns = shape
    blocks = np.ascontiguousarray(data).view(np.uint8).reshape(rows, -1, block_bytes[kind])
    q: NDArray
    minimum: Floats | None = None
    group = 32
    if kind in (Q4_K, Q5_K, Q6_K):
        q, scale, minimum, group = _decode_k(blocks, kind)
    else:
        scale = _halves(blocks[..., :2])
        if kind in (Q4_1, Q5_1):
            minimum = _halves(blocks[..., 2:4])
        if kind == Q8_0:
            q = blocks[..., 2:].view(np.int8)
        elif kind == Q4_0:
            q = _nibbles(blocks[..., 2:]).astype(np.int8) - np.int8(8)
        elif kind == Q4_1:
            q = _nibbles(blocks[..., 4:])
        elif kind == Q5_0:
            q = (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])).astype(np.int8) - np.int8(16)
        else:
            q = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return GroupedWeight(
        torch.from_numpy(np.ascontiguousarray(q).astype(np.int8, copy=False).reshape(rows, columns)),
        torch.from_numpy(np.ascontiguousarray(scale).reshape(rows, columns // group)),
        None if minimum is None else torch.from_numpy(minimum.reshape(rows, columns // group)),
        group,
    )
