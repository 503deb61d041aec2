"""How a card's memory is divided, and what is said when it is not enough."""

import pytest
from tiny_models import make_model

from localpaged.engine.device_memory import (
    FRAGMENTED,
    GIB,
    RESERVE,
    MemoryUse,
    estimate_activations,
    estimate_weights,
    kv_bytes,
)
from localpaged.errors import SettingError
from localpaged.models.registry import decoder_config

BLOCK = 2 << 20


def room(use: MemoryUse, total: int = 24 * GIB, free: int = 8 * GIB, utilization: float = 0.9) -> int:
    return kv_bytes(use, total, free, utilization, BLOCK, 2048, 64)


def test_kv_takes_what_the_share_leaves_and_no_more_than_is_free() -> None:
    use = MemoryUse(16 * GIB, 1 * GIB, GIB // 2, 0)
    assert room(use) == int(24 * GIB * 0.9) - 17 * GIB - GIB // 2
    assert room(use, free=4 * GIB) == 4 * GIB - GIB - GIB // 2 - RESERVE - int(24 * GIB * FRAGMENTED)


def test_a_share_that_is_too_small_is_told_with_one_that_is_enough() -> None:
    use = MemoryUse(16 * GIB, 1 * GIB, GIB // 2, 0)
    with pytest.raises(SettingError, match=r"weights 16.00 GiB.*Start with --gpu-memory-utilization 0\.\d\d") as raised:
        room(use, utilization=0.7)
    share = float(str(raised.value).split()[-1].rstrip("."))
    assert room(use, utilization=share) >= 2 * BLOCK


def test_steps_that_are_too_large_are_told_with_smaller_ones() -> None:
    with pytest.raises(SettingError, match="--max-num-seqs 16 --max-num-batched-tokens 512"):
        room(MemoryUse(20 * GIB, 3 * GIB, 2 * GIB, 0), free=4 * GIB)


def test_weights_that_leave_nothing_ask_for_a_smaller_model() -> None:
    with pytest.raises(SettingError, match="smaller model"):
        room(MemoryUse(24 * GIB, 0, 0, 0), free=0)


@pytest.mark.parametrize("variant", ["llama", "llama tied", "qwen3", "gemma3_text", "phi3"])
def test_the_estimate_of_weights_is_that_of_the_model_but_for_norms_and_biases(variant: str) -> None:
    model = make_model(variant)
    config = decoder_config(model.config)
    large = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)
    assert estimate_weights(config, 2) == 2 * large


def test_activations_grow_with_tokens_and_with_rows_of_logits() -> None:
    config = decoder_config(make_model("llama").config)
    small = estimate_activations(config, 100, 4, 2)
    assert estimate_activations(config, 200, 4, 2) - small == 100 * 2 * (max(10 * 16 + 6 * 16, 3 * 80) + 3 * 48)
    assert estimate_activations(config, 100, 5, 2) - small == 2 * 320 * 4
