"""Copy whole KV blocks in every layer: the copy of copy-on-write.

caches: any number of [num_blocks, Hkv, block_size, Dh]; pairs int64 [N, 2] of (source, destination).
Source: PagedAttention (arXiv:2309.06180), section 4.4.
Bound by memory: reads and writes each block once in each cache.
"""

from collections.abc import Sequence

from torch import Tensor


def copy_blocks_reference(caches: Sequence[Tensor], pairs: Tensor) -> None:
    """Copy block pairs[i, 0] to pairs[i, 1] in each cache; no destination is also a source."""
    sources, destinations = pairs[:, 0], pairs[:, 1]
    for cache in caches:
        cache[destinations] = cache[sources]


def copy_blocks(caches: Sequence[Tensor], pairs: Tensor) -> None:
    """Copy block pairs[i, 0] to pairs[i, 1] in each cache, in place.

    caches: [num_blocks, ...] each, every layer's keys and values
    pairs: int64 [N, 2]; destinations are distinct, and none is also a source
    Raises ValueError when pairs is not [N, 2].
    """
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs must be [N, 2], not {tuple(pairs.shape)}")
    if pairs.shape[0] == 0:
        return
    copy_blocks_reference(caches, pairs)
