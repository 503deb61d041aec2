"""Counter-based random numbers: the same (seed, candidate, position) always draws the same number.

So a draw depends neither on what else is in the batch nor on what was drawn before, and a
preempted answer goes on as if nothing had been. Philox4x32-10, Salmon et al., SC 2011.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
ROUNDS = 10

Words = NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Four 32-bit words for each counter under each key; all arrays have one shape and hold 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: list[int], candidates: list[int], positions: list[int]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, candidate, position). Seeds are taken modulo 2^64."""
    seed = np.array([value % 2**64 for value in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    candidate = np.array(candidates, dtype=np.uint64)
    zero = np.zeros_like(seed)
    word, *_ = philox4x32((position, candidate, zero, zero), (seed & _LOW, seed >> _HALF))
    return word.astype(np.float64) * 2.0**-32
