"""Settings that an engine cannot be built with, each refused with the remedy."""

from pathlib import Path
from typing import Any

import pytest

from localpaged.engine.build import build_engine
from localpaged.engine.config import EngineConfig
from localpaged.errors import SettingError


@pytest.mark.parametrize(
    ("setting", "value", "part"),
    [
        ("block_size", 3, "8 to 128"),
        ("max_model_len", 100_000, "window is 512"),
        ("max_model_len", 1, "at least 2"),
        ("kv_cache_memory", 1000, "--kv-cache-memory"),
        ("max_num_seqs", 0, "at least 1"),
        ("max_num_batched_tokens", 4, "--max-num-seqs"),
        ("dtype", "float8", "auto or float32"),
        ("kv_cache_dtype", "fp8", "not available on a CPU"),
        ("device", "cuda", "--device cpu meanwhile"),
        ("device", "tpu", "auto, cpu or cuda"),
    ],
)
def test_settings_that_cannot_be_are_refused(byte_model: Path, setting: str, value: Any, part: str) -> None:
    with pytest.raises(SettingError, match=part):
        build_engine(EngineConfig(model=str(byte_model), **{setting: value}))
