"""Copy whole KV blocks of every layer: the copy of copy-on-write, and the way to and from host memory.

source, destination: tensors [P, N, ...], P parts (each layer's keys, values, scales) of N blocks each;
pairs int64 [C, 2] of (source block, destination block).
Source: PagedAttention (arXiv:2309.06180), section 4.4.
Bound by memory: reads and writes each block once in each part; to and from host memory, by the bus.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from localpaged.kernels.dispatch import Implementation, implementation_for


def copy_blocks_reference(source: Sequence[Tensor], destination: Sequence[Tensor], pairs: Tensor) -> None:
    """Copy block pairs[i, 0] of each source to pairs[i, 1] of its destination; all are read before any is written."""
    for one, other in zip(source, destination, strict=True):
        other[:, pairs[:, 1].to(other.device)] = one[:, pairs[:, 0].to(one.device)].to(other.device)


def copy_blocks(source: Sequence[Tensor], destination: Sequence[Tensor], pairs: Tensor) -> None:
    """Copy block pairs[i, 0] of source to block pairs[i, 1] of destination, in every part, in place.

    source, destination: [P, N, ...] and [P, M, ...] of one type, the same ones for copy-on-write; on a GPU one of them
    may be in pinned host memory. Blocks must be contiguous.
    pairs: int64 [C, 2] on the host; destinations are distinct. Where source is destination, a block may be read in one
    pair and written in another: it is read first.
    Raises ValueError when the shapes do not fit.
    """
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs must be [C, 2], not {tuple(pairs.shape)}")
    for one, other in zip(source, destination, strict=True):
        if one.shape[0] != other.shape[0] or one.shape[2:] != other.shape[2:] or one.dtype != other.dtype:
            raise ValueError(f"blocks of {tuple(one.shape)} do not go into {tuple(other.shape)}")
    if pairs.shape[0] == 0:
        return
    if implementation_for(source[0]) is Implementation.TRITON or implementation_for(destination[0]) is (
        Implementation.TRITON
    ):
        from localpaged.kernels.block_copy_triton import launch

        within = all(one is other for one, other in zip(source, destination, strict=True))
        for some in _in_order(pairs) if within else [pairs]:
            launch(source, destination, some)
    else:
        copy_blocks_reference(source, destination, pairs)


def _in_order(pairs: Tensor) -> list[Tensor]:
    """Pairs that can be copied at once, one such set after the other: what is written was read in an earlier one."""
    remaining: list[list[int]] = pairs.tolist()
    sets = []
    while remaining:
        sources = [source for source, _ in remaining]
        ready = [pair for pair in remaining if all(pair[1] != source for source in sources)]
        if not ready:
            raise ValueError(f"the copies {remaining} go round in a circle")
        sets.append(torch.tensor(ready))
        remaining = [pair for pair in remaining if pair not in ready]
    return sets
