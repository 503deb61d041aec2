"""Chooses device and types, and builds what runs a decoder on a GPU, with its pool sized by measurement."""

import gc
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from localpaged.engine.config import EngineConfig
from localpaged.engine.device_memory import (
    GIB,
    UTILIZATION,
    MemoryUse,
    check_pool,
    estimate_activations,
    estimate_weights,
    kv_bytes,
)
from localpaged.engine.device_runner import DeviceRunner
from localpaged.engine.device_sampler import DeviceSampler
from localpaged.engine.runner import try_step
from localpaged.engine.step_plan import Geometry
from localpaged.errors import SettingError
from localpaged.kernels import dispatch
from localpaged.kernels.attention_plan import SPLIT_MIN_KEYS
from localpaged.kernels.paged_kv import KVFormat, PagedKV
from localpaged.models.decoder import Decoder
from localpaged.models.weights import Placement

logger = logging.getLogger(__name__)

GPU_BATCHED_TOKENS = 2048
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}
KV_FORMATS = {"int8": KVFormat.INT8, "fp8": KVFormat.FP8, "fp8_e4m3": KVFormat.FP8}
OLDEST_CARD = 75


def choose_device(name: str) -> torch.device:
    """The device for --device auto, cpu or cuda. Raises SettingError with the remedy."""
    if name not in ("auto", "cpu", "cuda"):
        raise SettingError(f"--device {name} is not available here. Use auto, cpu or cuda.")
    if name == "cpu":
        return torch.device("cpu")
    missing = missing_for_cuda()
    if missing is None:
        return torch.device("cuda", torch.cuda.current_device())
    if name == "cuda":
        raise SettingError(f"--device cuda is not available here: {missing} Use --device cpu meanwhile.")
    return torch.device("cpu")


def missing_for_cuda() -> str | None:
    """Why no card can be used, as a sentence with the remedy; None when one can."""
    if torch.version.cuda is None:
        return "this is the CPU build of torch. Install torch's CUDA build into this environment."
    if not torch.cuda.is_available():
        return "torch finds no CUDA device. Check that `nvidia-smi` lists one, and its driver's version."
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed; it is made for Linux."
    if not (os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))):
        return "Triton needs a C compiler. Install gcc."
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"Triton needs {header}. Install Python's development files (python3-dev)."
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < OLDEST_CARD:
        return f"{torch.cuda.get_device_name()} is sm_{major}{minor}, and sm_{OLDEST_CARD} is the oldest that runs."
    return None


def choose_placement(dtype: str, device: torch.device) -> Placement:
    """Device and type of the weights. auto: bfloat16 where the card multiplies it, else float16."""
    if device.type == "cpu":
        if dtype not in ("auto", "float32"):
            raise SettingError(f"--dtype {dtype} is not available on a CPU. Use auto or float32.")
        return Placement()
    has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
    if dtype == "auto":
        return Placement(device, torch.bfloat16 if has_bfloat16 else torch.float16)
    if dtype not in DTYPES:
        raise SettingError(f"--dtype {dtype} is none of auto, {', '.join(DTYPES)}.")
    if DTYPES[dtype] is torch.bfloat16 and not has_bfloat16:
        raise SettingError(f"--dtype bfloat16 is not available on {torch.cuda.get_device_name(device)}. Use float16.")
    return Placement(device, DTYPES[dtype])


def choose_kv_format(name: str, placement: Placement) -> KVFormat:
    """The format of the KV cache. auto: the weights' type."""
    if name == "auto":
        return KVFormat(str(placement.dtype).removeprefix("torch."))
    if placement.device.type == "cpu" and not dispatch.triton_on_cpu:
        if name != "float32":
            raise SettingError(f"--kv-cache-dtype {name} is not available on a CPU. Use auto or float32.")
        return KVFormat.FLOAT32
    if name in KV_FORMATS:
        return KV_FORMATS[name]
    if name in DTYPES and DTYPES[name] is placement.dtype:
        return KVFormat(str(placement.dtype).removeprefix("torch."))
    raise SettingError(
        f"--kv-cache-dtype {name} does not go with weights of {placement.dtype}. Use auto, {', '.join(KV_FORMATS)}."
    )


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """What runs a model on a GPU."""

    runner: DeviceRunner
    sampler: DeviceSampler
    num_blocks: int


def build_device_parts(
    config: EngineConfig, decoder: Decoder, placement: Placement, max_model_len: int, budget: int
) -> DeviceParts:
    """Measure what a step and the graphs need, size the pool by what is left, and capture the graphs over it.

    budget: tokens of the largest step. Raises SettingError that says which setting to change to what.
    """
    device = placement.device
    geometry = model_geometry(decoder, config.block_size, placement)
    kind = choose_kv_format(config.kv_cache_dtype, placement)
    model = decoder.config

    def make_kv(num_blocks: int) -> PagedKV:
        return PagedKV(
            model.num_layers, num_blocks, model.num_kv_heads, config.block_size, model.head_dim, kind, device
        )

    def make_runner(kv: PagedKV) -> DeviceRunner:
        longest = min(max_model_len, kv.num_blocks * config.block_size)
        return DeviceRunner(decoder, kv, geometry, config.max_num_seqs, longest)

    bytes_per_block = make_kv(1).bytes_per_block
    if device.type != "cuda":
        if config.kv_cache_memory is None:
            raise SettingError("Triton's interpreter needs --kv-cache-memory: it has no card to measure.")
        num_blocks = config.kv_cache_memory // bytes_per_block
        check_pool(num_blocks, bytes_per_block)
        return DeviceParts(make_runner(make_kv(num_blocks)), DeviceSampler(device), num_blocks)
    use = _measure(lambda: make_runner(make_kv(1)), config.block_size, budget, config.max_num_seqs, max_model_len)
    total = torch.cuda.get_device_properties(device).total_memory
    free = torch.cuda.mem_get_info(device)[0]
    room = kv_bytes(
        use, total, free, config.memory_utilization or UTILIZATION, bytes_per_block, budget, config.max_num_seqs
    )
    if config.kv_cache_memory is not None:
        if config.kv_cache_memory > room:
            raise SettingError(
                f"--kv-cache-memory asks for {config.kv_cache_memory / GIB:.2f} GiB and there is room for "
                f"{room / GIB:.2f} GiB beside the model. Give at most {room}."
            )
        room = config.kv_cache_memory
    num_blocks = room // bytes_per_block
    check_pool(num_blocks, bytes_per_block)
    try:
        runner = make_runner(make_kv(num_blocks))
        assert runner.graphs is not None
        runner.graphs.capture_all()
        _compile_eager_steps(runner, config.block_size, budget, max_model_len)
    except torch.cuda.OutOfMemoryError as error:
        raise SettingError(
            f"There is not enough memory on the card for {room / GIB:.2f} GiB of KV beside {use}. Start with "
            f"--kv-cache-memory {int(room * 0.8)}, or end other programs that use the card."
        ) from error
    element_bytes = placement.dtype.itemsize
    estimate = MemoryUse(
        estimate_weights(model, element_bytes),
        estimate_activations(model, budget, config.max_num_seqs, element_bytes),
        use.graphs,
        room,
    )
    measured = MemoryUse(use.weights, use.activations, use.graphs, num_blocks * bytes_per_block)
    in_use = total - torch.cuda.mem_get_info(device)[0]
    logger.info("Memory estimated: %s", estimate)
    logger.info("Memory measured: %s; %.2f GiB of the card's %.2f in use", measured, in_use / GIB, total / GIB)
    return DeviceParts(runner, DeviceSampler(device), num_blocks)


def model_geometry(decoder: Decoder, block_size: int, placement: Placement) -> Geometry:
    """What planning needs to know of this model on this device."""
    from localpaged.kernels.triton_target import capability, num_multiprocessors

    model = decoder.config
    windows = tuple(dict.fromkeys(layer.window for layer in model.layers))
    return Geometry(
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        windows,
        block_size,
        placement.dtype.itemsize,
        capability(placement.device),
        num_multiprocessors(placement.device),
    )


def _compile_eager_steps(runner: DeviceRunner, block_size: int, budget: int, max_model_len: int) -> None:
    """Have every form of the kernels compiled before the first request: whole chunks, few rows on a long context."""
    _try_largest_step(runner, block_size, budget, max_model_len)
    try_step(runner, block_size, 1, 2, num_computed=min(8 * SPLIT_MIN_KEYS, max_model_len - 2))
    torch.cuda.synchronize()


def _try_largest_step(runner: DeviceRunner, block_size: int, budget: int, max_model_len: int) -> torch.Tensor:
    """Hidden states of a step of at least budget tokens, in as few chunks as the model's window allows."""
    length = min(budget, max_model_len)
    return try_step(runner, block_size, -(-budget // length), length)


def _measure(
    make_runner: Callable[[], DeviceRunner], block_size: int, budget: int, max_num_seqs: int, max_model_len: int
) -> MemoryUse:
    """Run the largest step and capture the largest graphs over a small pool."""
    weights = torch.cuda.memory_allocated()
    try:
        runner = make_runner()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        # Then logits of as many rows as can be sampled.
        hidden = _try_largest_step(runner, block_size, budget, max_model_len)
        logits = runner.decoder.logits(hidden[:1].expand(max_num_seqs, -1))
        del hidden, logits
        torch.cuda.synchronize()
        activations = torch.cuda.max_memory_reserved() - before
        torch.cuda.empty_cache()
        free_before = torch.cuda.mem_get_info()[0]
        assert runner.graphs is not None
        runner.graphs.capture_all()
        torch.cuda.synchronize()
        graphs = max(free_before - torch.cuda.mem_get_info()[0], 0)
    except torch.cuda.OutOfMemoryError as error:
        seqs = max(max_num_seqs // 4, 1)
        raise SettingError(
            f"There is not enough memory on the card for a step of {budget} tokens: the weights take "
            f"{weights / GIB:.2f} GiB. Start with --max-num-batched-tokens {max(budget // 4, seqs)} "
            f"--max-num-seqs {seqs}, or choose a smaller model."
        ) from error
    del runner
    # Runner and graphs refer to each other.
    gc.collect()
    torch.cuda.empty_cache()
    return MemoryUse(weights, activations, graphs, 0)
