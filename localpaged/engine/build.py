"""Builds an engine from its configuration: loads the model, sizes the pool, logs what came of it."""

import hashlib
import logging
import time
from pathlib import Path

import psutil
import torch

from localpaged import __version__
from localpaged.engine.block_pool import BlockPool
from localpaged.engine.config import EngineConfig
from localpaged.engine.core import EngineCore, set_threads
from localpaged.engine.device_build import (
    GPU_BATCHED_TOKENS,
    build_device_parts,
    choose_device,
    choose_kv_format,
    choose_placement,
)
from localpaged.engine.device_memory import GIB, check_pool, estimate_weights
from localpaged.engine.device_runner import DeviceRunner
from localpaged.engine.guide import Guides
from localpaged.engine.kv_cache_manager import KVCacheManager
from localpaged.engine.kv_files import KvFiles
from localpaged.engine.kv_host import KvHost
from localpaged.engine.kv_tier import KvTier
from localpaged.engine.messages import ModelInfo
from localpaged.engine.runner import ModelRunner, measure, warm_up
from localpaged.engine.sampler import Sampler
from localpaged.engine.scheduler import Scheduler
from localpaged.errors import ModelError, SettingError
from localpaged.kernels import dispatch
from localpaged.models.chat_tokenizer import ChatTokenizer, load_tokenizer
from localpaged.models.decoder_config import DecoderConfig
from localpaged.models.load import open_checkpoint
from localpaged.models.weights import Placement

logger = logging.getLogger(__name__)

# Without a setting the KV takes a quarter of the memory that is free once the model is loaded, and no
# more than this: beyond it a CPU is too slow for what would fit.
CPU_KV_SHARE = 0.25
CPU_KV_MOST = 4 * GIB
CPU_BATCHED_TOKENS = 512
BLOCK_SIZES = (8, 128)


class Engine:
    """A loaded model with its tokenizer and description."""

    def __init__(self, core: EngineCore, tokenizer: ChatTokenizer, info: ModelInfo) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self.info = info


def build_engine(config: EngineConfig) -> Engine:
    """Load a model and make its pool. Raises ModelError and SettingError with the remedy."""
    start = time.perf_counter()
    _check_settings(config)
    set_threads()
    path = Path(config.model)
    if not path.exists():
        raise ModelError(f"{path} does not exist. `localpaged list` shows the models that are here.")
    device = choose_device(config.device)
    placement = choose_placement(config.dtype, device)
    on_device = device.type == "cuda" or dispatch.triton_on_cpu
    checkpoint = open_checkpoint(path, placement)
    model = checkpoint.config
    tokenizer = load_tokenizer(path)
    window = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > window:
        raise SettingError(
            f"--max-model-len is {config.max_model_len:,} and the model's window is {window:,}. Lower it."
        )
    window = config.max_model_len or window
    weight_bytes_before = _memory_in_use(device)
    try:
        decoder = checkpoint.build(num_positions=window, exact=config.dtype == "float32")
    except torch.cuda.OutOfMemoryError as error:
        raise ModelError(_too_large(checkpoint.config, placement)) from error
    weight_bytes = max(_memory_in_use(device) - weight_bytes_before, 0)
    budget = config.max_num_batched_tokens or max(
        GPU_BATCHED_TOKENS if on_device else CPU_BATCHED_TOKENS, config.max_num_seqs
    )
    runner: ModelRunner | DeviceRunner
    sampler: Sampler | None = None
    if on_device:
        parts = build_device_parts(config, decoder, placement, window, budget)
        runner, sampler, num_blocks = parts.runner, parts.sampler, parts.num_blocks
    else:
        choose_kv_format(config.kv_cache_dtype, placement)
        num_blocks = _num_blocks(config, model.kv_bytes_per_token(element_bytes=4) * config.block_size)
        runner = ModelRunner(decoder, num_blocks, config.block_size)
    bytes_per_block = runner.bytes_per_block
    pool = BlockPool(num_blocks, config.block_size)
    max_model_len = min(window, num_blocks * config.block_size)
    scheduler = Scheduler(
        KVCacheManager(pool, config.enable_prefix_caching), config.max_num_seqs, budget, max_model_len
    )
    core = EngineCore(
        runner,
        scheduler,
        lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True),
        model.eos_token_ids | tokenizer.eos_token_ids,
        model.vocab_size,
        config.check_when_idle,
        sampler,
        Guides(tokenizer, model.vocab_size, model.eos_token_ids | tokenizer.eos_token_ids),
    )
    warm_up(runner, config.block_size, max_model_len)
    measure(runner, config.block_size, max_model_len, core.rates)
    host = KvHost(config.block_size, int(config.swap_space * GIB)) if config.swap_space > 0 else None
    disk = None
    if config.kv_folder is not None and config.kv_disk_space > 0:
        # Bytes of one device are not those of another.
        form = f"{config.dtype} {runner.kv.format.value} {device.type}"
        disk = KvFiles(
            Path(config.kv_folder), _fingerprint(path, config, form), config.block_size, config.kv_disk_space
        )
    if host is not None or disk is not None:
        core.sessions.tier = KvTier(host, disk, scheduler.manager, runner, lambda: core.rates.prefill_tokens_s)
    info = ModelInfo(
        name=config.name or path.stem,
        architecture=model.architecture,
        dtype="float32" if config.dtype == "float32" else decoder.weight_form,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        block_size=config.block_size,
        num_blocks=num_blocks,
        bytes_per_block=bytes_per_block,
        max_model_len=max_model_len,
        longest_request=max_model_len,
        weight_bytes=weight_bytes,
        load_s=round(time.perf_counter() - start, 2),
    )
    logger.info("%s", describe(info))
    if max_model_len < window:
        logger.warning(
            "The model's window is %s tokens and the pool holds %s. For the whole window give %s.",
            f"{window:,}",
            f"{max_model_len:,}",
            f"--kv-cache-memory {-(-window // config.block_size) * bytes_per_block}",
        )
    return Engine(core, tokenizer, info)


def _fingerprint(path: Path, config: EngineConfig, form: str) -> str:
    """A name for everything that KV depends on besides its tokens."""
    digest = hashlib.blake2b(digest_size=12)
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    for file in files:
        digest.update(f"{file.name if len(files) > 1 else ''} {file.stat().st_size} ".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(1 << 20))
            opened.seek(max(file.stat().st_size - (1 << 20), 0))
            digest.update(opened.read())
    digest.update(f"{form} {config.block_size} {__version__}".encode())
    return digest.hexdigest()


def describe(info: ModelInfo) -> str:
    """One line on what was loaded and how much it holds."""
    tokens = info.num_blocks * info.block_size
    return (
        f"{info.name} ({info.architecture}, {info.dtype}) on {info.device}: "
        f"{info.num_blocks:,} blocks of {info.block_size} tokens = {tokens:,} tokens of KV in "
        f"{info.num_blocks * info.bytes_per_block / GIB:.2f} GiB; "
        f"longest request {info.longest_request:,} tokens; loaded in {info.load_s:.1f} s"
    )


def _check_settings(config: EngineConfig) -> None:
    low, high = BLOCK_SIZES
    if not low <= config.block_size <= high:
        raise SettingError(f"--block-size is {config.block_size}; it must be from {low} to {high}.")
    if config.max_num_seqs < 1:
        raise SettingError(f"--max-num-seqs is {config.max_num_seqs}; it must be at least 1.")
    budget = config.max_num_batched_tokens
    if budget is not None and budget < config.max_num_seqs:
        raise SettingError(
            f"--max-num-batched-tokens is {budget} and --max-num-seqs {config.max_num_seqs}: "
            "every sequence needs a token a step. Raise the first or lower the second."
        )
    if config.max_model_len is not None and config.max_model_len < 2:
        raise SettingError(f"--max-model-len is {config.max_model_len}; it must be at least 2.")


def _num_blocks(config: EngineConfig, bytes_per_block: int) -> int:
    available = psutil.virtual_memory().available
    if config.kv_cache_memory is not None:
        if config.kv_cache_memory > available:
            raise SettingError(
                f"--kv-cache-memory asks for {config.kv_cache_memory / GIB:.2f} GiB and {available / GIB:.2f} "
                f"GiB are free. Give at most {int(available * 0.9)}."
            )
        num_blocks = config.kv_cache_memory // bytes_per_block
    elif config.memory_utilization is not None:
        share = config.memory_utilization * psutil.virtual_memory().total - _resident_bytes()
        num_blocks = int(max(min(share, available), 0)) // bytes_per_block
    else:
        num_blocks = int(min(available * CPU_KV_SHARE, CPU_KV_MOST)) // bytes_per_block
    check_pool(num_blocks, bytes_per_block)
    return num_blocks


def _too_large(model: DecoderConfig, placement: Placement) -> str:
    total = torch.cuda.get_device_properties(placement.device).total_memory
    free = torch.cuda.mem_get_info(placement.device)[0]
    weights = estimate_weights(model, placement.dtype.itemsize)
    return (
        f"The weights take about {weights / GIB:.1f} GiB in {placement.dtype} and {free / GIB:.1f} of the card's "
        f"{total / GIB:.1f} GiB are free. End other programs that use it, or choose a smaller model."
    )


def _memory_in_use(device: torch.device) -> int:
    """Bytes that this process has of the device's memory."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _resident_bytes()


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
