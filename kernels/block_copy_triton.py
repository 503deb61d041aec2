"""The Triton kernel of block_copy.py."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# 16 bytes a thread of 128.
TILE_WORDS = 512


@triton.jit
def _copy_blocks_kernel(  # type: ignore[no-untyped-def]
    source, destination, pairs, source_part_stride, source_block_stride, part_stride, block_stride, num_words,
    TILE: tl.constexpr,
):  # fmt: skip
    """TILE words of one block of one part."""
    pair = tl.program_id(0)
    part = tl.program_id(2).to(tl.int64)
    from_block = tl.load(pairs + 2 * pair)
    to_block = tl.load(pairs + 2 * pair + 1)
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = word < num_words
    values = tl.load(source + part * source_part_stride + from_block * source_block_stride + word, mask=mask)
    tl.store(destination + part * part_stride + to_block * block_stride + word, values, mask=mask)


def launch(source: Sequence[Tensor], destination: Sequence[Tensor], pairs: Tensor) -> None:
    """Copy pairs [C, 2], in any order; one kernel for each of the sources."""
    device = destination[0].device if destination[0].is_cuda else source[0].device
    pairs = (pairs.pin_memory() if device.type == "cuda" else pairs).to(device, non_blocking=True)
    for one, other in zip(source, destination, strict=True):
        one, other = _words(one), _words(other)
        num_words = one.shape[2]
        _copy_blocks_kernel[(pairs.shape[0], triton.cdiv(num_words, TILE_WORDS), one.shape[0])](
            one, other, pairs, one.stride(0), one.stride(1), other.stride(0), other.stride(1), num_words,
            TILE=TILE_WORDS, num_warps=4,
        )  # fmt: skip


def _words(blocks: Tensor) -> Tensor:
    """[P, N, ...] as [P, N, words], of the widest words that a block and its place are whole numbers of."""
    flat = blocks.flatten(2).view(torch.uint8)
    wide = all(value % 4 == 0 for value in (flat.shape[2], flat.stride(0), flat.stride(1), flat.storage_offset()))
    return flat.view(torch.int32) if wide else flat
