"""Tile sizes of the attention kernels by head size, format and card; knows no tensors and imports no Triton.

Defaults from what fits the card's shared memory and registers without spills (docs/kernels.md has what each one
takes); `scripts/gpu_check.py --tune` sweeps them. Not yet measured on a card.
"""

from dataclasses import dataclass

# Lanes of one product: the least that tensor cores take.
LEAST_LANES = 16
# A group's prefix is packed into tiles of so many lanes at most.
SHARED_LANES = 64
# Programs that a multiprocessor is given, so that their loads overlap.
PROGRAMS_EACH = 2
# Cards with 160 KiB of shared memory a program and more; the others have 100 and less.
ROOMY = (80, 90, 100, 103)
# Those whose products read keys from shared memory, not from registers.
WIDE = (90, 100, 103)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """block_m lanes (rows times query heads of a KV head) by block_n keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def rows(self, repeats: int) -> int:
        """Query rows of `repeats` heads each that fit."""
        return self.block_m // repeats


# Loads of keys depend on loads of block ids: Triton keeps two tiles in flight from five stages on, one below.
STAGES = 5


def decode_config(head_dim: int, repeats: int, shares: bool, capability: int, element_bytes: int = 2) -> TileConfig:
    """The tile for decode rows. shares: some group's rows are packed. element_bytes: of the queries."""
    dim, roomy = _power_of_2(head_dim), capability in ROOMY
    shared_lanes = SHARED_LANES if element_bytes < 4 else SHARED_LANES // 2
    block_m = max(LEAST_LANES, _power_of_2(repeats), shared_lanes if shares else 0)
    if element_bytes == 4 or capability < 80:
        return TileConfig(block_m, 32, 8, 1)
    block_n = 64 if dim <= 64 or (dim <= 128 and roomy) else 32
    return TileConfig(block_m, block_n, *_warps_and_stages(block_m, dim, roomy))


def prefill_config(head_dim: int, repeats: int, capability: int, element_bytes: int = 2) -> TileConfig:
    """The tile for chunks of queries."""
    dim, roomy, least = _power_of_2(head_dim), capability in ROOMY, _power_of_2(repeats)
    if element_bytes == 4 or capability < 80:
        return TileConfig(max(32, least), 32, 8, 1)
    block_m = max(128 if dim <= 128 else 64, least)
    block_n = 64 if dim <= 64 or (dim <= 128 and capability in WIDE) else 32
    return TileConfig(block_m, block_n, 8, _warps_and_stages(block_m, dim, roomy)[1])


def _warps_and_stages(block_m: int, dim: int, roomy: bool) -> tuple[int, int]:
    return 8 if block_m * dim > 4096 else 4, STAGES if roomy or block_m * dim < 16384 or dim <= 128 else STAGES - 1


def _power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()
