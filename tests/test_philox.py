"""Philox4x32-10 against the known answers of Random123 (kat_vectors, D. E. Shaw Research)."""

import numpy as np
import pytest

from localpaged.engine.philox import philox4x32, uniforms

KNOWN = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[np.ndarray, ...]:
    return tuple(np.array([int(word, 16)], dtype=np.uint64) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = words(counter)
    k0, k1 = words(key)
    assert philox4x32((c0, c1, c2, c3), (k0, k1)) == words(expected)


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    alone = uniforms([5], [1], [9])[0]
    assert uniforms([1, 5, 5], [1, 1, 0], [9, 9, 9])[1] == alone


def test_seed_candidate_and_position_each_change_the_draw() -> None:
    draws = uniforms([5, 6, 5, 5, -1, 2**64 - 1], [1, 1, 2, 1, 0, 0], [9, 9, 9, 8, 0, 0])
    assert len(set(draws[:4])) == 4
    assert draws[4] == draws[5]


def test_draws_are_uniform() -> None:
    draws = uniforms([3] * 20000, [0] * 20000, list(range(20000)))
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert abs(counts - 1000).max() < 150
    assert 0 <= draws.min() < draws.max() < 1
