"""Block copies: whole blocks, in every cache, poison and all."""

import pytest
import torch

from localpaged.kernels.block_copy import copy_blocks


def test_every_cache_copies_the_same_blocks_and_keeps_the_others() -> None:
    caches = [torch.randn(6, 8, 3, 16, 64), torch.randn(2, 8, 1, 128, 80)]
    before = [cache.clone() for cache in caches]
    copy_blocks(caches, caches, torch.tensor([[6, 0], [2, 7], [6, 4]]))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[:, [6, 1, 2, 3, 6, 5, 6, 2]])


def test_unwritten_slots_are_copied_as_they_are() -> None:
    cache = torch.full((1, 3, 2, 8, 64), torch.nan)
    cache[0, 1, :, :5] = 1.0
    copy_blocks([cache], [cache], torch.tensor([[1, 2]]))
    assert torch.equal(cache[0, 2].isnan(), cache[0, 1].isnan())
    assert cache[0, 0].isnan().all()


def test_no_pairs_change_nothing_and_other_shapes_raise() -> None:
    cache = torch.randn(2, 4, 2, 8, 64)
    before = cache.clone()
    copy_blocks([cache], [cache], torch.empty((0, 2), dtype=torch.int64))
    assert torch.equal(cache, before)
    with pytest.raises(ValueError, match=r"\[C, 2\]"):
        copy_blocks([cache], [cache], torch.tensor([[0, 1, 2]]))
    with pytest.raises(ValueError, match="do not go into"):
        copy_blocks([cache], [cache[:, :, :1]], torch.tensor([[0, 1]]))
