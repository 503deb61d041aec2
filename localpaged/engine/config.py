"""What an engine is started with. Names and meanings are vLLM's where it has them."""

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """model: a path to a GGUF file or a transformers folder. Sizes in tokens, blocks or bytes.

    kv_cache_memory: bytes for KV; None takes what memory_utilization (a share of the device's memory, for
    weights and KV together) leaves, or what the machine can spare. max_model_len: None takes the
    model's own window, or what the pool holds if that is less. kv_folder: where KV is kept between runs, up to
    kv_disk_space bytes; None keeps none. swap_space: GiB of memory for KV that the pool has no room for.
    log_folder: where engine.log is written; None writes to stderr alone.
    """

    model: str
    name: str = ""
    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    kv_cache_memory: int | None = None
    memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    kv_folder: str | None = None
    kv_disk_space: int = 0
    swap_space: float = 0
    check_when_idle: bool = False
    log_folder: str | None = None
    log_level: str = "info"
