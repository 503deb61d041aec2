"""Whole models with random weights on a GPU: decode steps, prompts, transfers to host memory, and the engine."""

import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_cases import BLOCK_SIZE, DEVICE, DTYPE, KINDS, host_step, make_geometry, random_tables
from torch import Tensor

from localpaged.engine.decode_graphs import Compute, DecodeGraphs
from localpaged.engine.host_blocks import HostTransfers
from localpaged.engine.input_buffer import InputBuffer
from localpaged.kernels.paged_kv import PagedKV
from localpaged.kernels.planned_batch import PlannedBatch
from localpaged.models.decoder import Decoder
from localpaged.models.decoder_config import DecoderConfig, LayerConfig, RopeConfig
from localpaged.models.weights import Placement

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {"hidden": 576, "intermediate": 1536, "heads": 9, "kv": 3, "dim": 64, "layers": 30, "vocab": 49152},
    "qwen3-0.6b": {
        "hidden": 1024, "intermediate": 3072, "heads": 16, "kv": 8, "dim": 128, "layers": 28, "vocab": 151936,
        "qk": True,
    },
    "llama-3.1-8b": {
        "hidden": 4096, "intermediate": 14336, "heads": 32, "kv": 8, "dim": 128, "layers": 32, "vocab": 128256,
        "tied": False,
    },
    "tiny": {"hidden": 64, "intermediate": 96, "heads": 4, "kv": 2, "dim": 16, "layers": 1, "vocab": 100},
}  # fmt: skip


class RandomWeights:
    """Weights by name, made when asked for; small enough that nothing overflows."""

    def __init__(self, config: DecoderConfig, placement: Placement) -> None:
        self.placement = placement
        hidden, heads, kv = (
            config.hidden_size,
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        )
        self._shapes = {
            "q_proj": (heads, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, heads),
            "gate_proj": (config.intermediate_size, hidden), "up_proj": (config.intermediate_size, hidden),
            "down_proj": (hidden, config.intermediate_size), "embed_tokens": (config.vocab_size, hidden),
            "lm_head": (config.vocab_size, hidden), "q_norm": (config.head_dim,), "k_norm": (config.head_dim,),
        }  # fmt: skip
        self._hidden = hidden
        self.num_bytes = 0

    def has(self, name: str) -> bool:
        return False

    def tensor(self, name: str) -> Tensor:
        shape = self._shapes.get(name.split(".")[-2], (self._hidden,))
        values = torch.randn(shape, device=self.placement.device, dtype=self.placement.dtype)
        if len(shape) > 1 and "embed" not in name:
            # Each step reads it; of the embedding, a few rows.
            self.num_bytes += values.nbytes
            values *= shape[-1] ** -0.5
        return values

    def grouped(self, name: str) -> None:
        return None


class Model:
    """A decoder with random weights, run as the engine runs it."""

    def __init__(self, name: str) -> None:
        shape = SHAPES[name]
        config = DecoderConfig(
            architecture=name,
            vocab_size=shape["vocab"],
            hidden_size=shape["hidden"],
            intermediate_size=shape["intermediate"],
            num_heads=shape["heads"],
            num_kv_heads=shape["kv"],
            head_dim=shape["dim"],
            max_position_embeddings=16384,
            norm_eps=1e-6,
            layers=(LayerConfig(window=None, rope="default"),) * shape["layers"],
            ropes={"default": RopeConfig({"rope_theta": 500000.0}, shape["dim"])},
            tied_embeddings=shape.get("tied", True),
            qk_norm=shape.get("qk", False),
        )
        weights = RandomWeights(config, Placement(DEVICE, DTYPE))
        self.decoder = Decoder(config, weights, 16384)
        head_bytes = config.vocab_size * config.hidden_size * DTYPE.itemsize
        self.weight_bytes = weights.num_bytes + (head_bytes if config.tied_embeddings else 0)
        self.geometry = make_geometry(shape["heads"], shape["kv"], shape["dim"], DTYPE)
        self.buffer = InputBuffer(DEVICE)

    def make_kv(self, num_blocks: int) -> PagedKV:
        config = self.decoder.config
        return PagedKV(
            config.num_layers, num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim, KINDS[DTYPE], DEVICE
        )

    def compute_over(self, kv: PagedKV) -> Compute:
        """One step over a cache, to hidden states and logits."""

        def compute(token_ids: Tensor, batch: PlannedBatch) -> tuple[Tensor, Tensor]:
            hidden = self.decoder.forward(token_ids, batch, kv.layers)
            return hidden, self.decoder.logits(hidden)

        return compute

    def decode_step(self, batch: int, context: int, graphs: bool, steps: int = 40) -> tuple[float, int]:
        """Seconds of a step, from planning it to having its tokens on the host, and the bytes that it must read."""
        lens = [context + steps + 8] * batch
        tables, num_blocks = random_tables(lens, [])
        kv = self.make_kv(num_blocks)
        kv.values.zero_()

        compute = self.compute_over(kv)
        captured = DecodeGraphs(compute, self.buffer, self.geometry, batch, tables.shape[1])

        def step(index: int) -> None:
            host = host_step(self.geometry, [context + index] * batch, tables)
            if graphs:
                _, logits = captured.run(host)
            else:
                token_ids, planned_batch, _ = self.buffer.fill(host)
                _, logits = compute(token_ids, planned_batch)
            logits.argmax(-1).cpu()

        for index in range(5):
            step(index)
        start = time.perf_counter()
        for index in range(5, 5 + steps):
            step(index)
        step_s = (time.perf_counter() - start) / steps
        return step_s, self.weight_bytes + batch * context * kv.bytes_per_block // BLOCK_SIZE

    def prefill(self, length: int, chunk: int = 2048) -> tuple[float, float]:
        """Seconds to compute a prompt in chunks, and the operations that it takes."""
        tables, num_blocks = random_tables([length], [])
        kv = self.make_kv(num_blocks)
        config = self.decoder.config

        def run() -> None:
            for first in range(0, length, chunk):
                size = min(chunk, length - first)
                host = host_step(self.geometry, [first + size], tables, [size])
                token_ids, batch, _ = self.buffer.fill(host)
                self.decoder.logits(self.decoder.forward(token_ids, batch, kv.layers)).argmax(-1).cpu()

        run()
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        head = config.vocab_size * config.hidden_size
        products = 2.0 * (self.weight_bytes // DTYPE.itemsize - head) * length
        attention = 2.0 * config.num_layers * config.num_heads * config.head_dim * length**2
        return seconds, products + attention


def transformers_step(name: str, context: int, steps: int = 16) -> float:
    """Seconds of a step of transformers' generate() with a static cache, not compiled."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SHAPES[name]
    config = LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=shape["dim"],
        max_position_embeddings=16384,
        tie_word_embeddings=shape.get("tied", True),
    )
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).to(DTYPE).eval()
    prompt = torch.ones(1, context, dtype=torch.long, device=DEVICE)

    def generate(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,
            pad_token_id=0,
        )
        torch.cuda.synchronize()
        return time.perf_counter() - start

    generate(2)
    return (generate(2 + steps) - generate(2)) / steps


def transfers(num_blocks: int, layers: int = 32) -> dict[str, dict[str, Any]]:
    """GB/s of blocks in the shape of Llama-3.1-8B to pinned memory and back, and whether they came back right."""
    kv = PagedKV(layers, num_blocks, 8, BLOCK_SIZE, 128, KINDS[DTYPE], DEVICE)
    kv.values.normal_()
    before = kv.values.clone()
    moves = HostTransfers(kv)
    blocks = np.random.permutation(num_blocks).tolist()
    found: dict[str, dict[str, Any]] = {}
    for turn in range(3):
        start = time.perf_counter()
        kept = moves.read(blocks)
        array = np.asarray(kept)
        read_s = time.perf_counter() - start
        kv.values.zero_()
        _synchronize()
        start = time.perf_counter()
        moves.write(blocks, array)
        moves.wait()
        _synchronize()
        write_s = time.perf_counter() - start
        if turn:
            right = bool(torch.equal(kv.values, before))
            found["to host"] = {"gb_s": kept.nbytes / read_s / 1e9}
            found["from host"] = {"gb_s": kept.nbytes / write_s / 1e9, "right": right}
    return found


def _synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def engine_needs() -> str | None:
    """What the engine needs and is not here; None when nothing is missing."""
    names = [name for name in ("msgspec", "psutil", "tokenizers", "gguf") if importlib.util.find_spec(name) is None]
    return ", ".join(names) or None


def graph_cases(
    name: str = "qwen3-0.6b", context: int = 700
) -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    """Captured graphs against the same steps without: padded, sharing, and after a prefill whose rows are split."""
    model = Model(name)
    lens, blocks = [context] * 3, context // BLOCK_SIZE
    # Three candidates and a prompt of its own.
    tables, num_blocks = random_tables([*lens, context], [(3, blocks)])
    kv = model.make_kv(num_blocks)
    kv.values.normal_()
    compute = model.compute_over(kv)
    captured = DecodeGraphs(compute, model.buffer, model.geometry, 4, tables.shape[1])

    def differ(groups: list[tuple[int, int]] | None) -> tuple[float, float]:
        host = host_step(model.geometry, lens, tables[:3], groups=groups)
        before = captured.run(host)[1].clone()
        prompt = host_step(model.geometry, [context], tables[3:], [9], split_min_keys=64)
        token_ids, batch, _ = model.buffer.fill(prompt)
        for _ in range(3):
            compute(token_ids, batch)
        after = captured.run(host)[1].clone()
        token_ids, batch, _ = model.buffer.fill(host)
        eager = compute(token_ids, batch)[1]
        scale = eager.abs().max()
        again = (after - eager).abs().max() / scale
        return float(torch.maximum((before - eager).abs().max() / scale, again)), 0.05

    yield "graphs, three rows in four", lambda: differ(None)
    yield "graphs, three rows that share a prefix", lambda: differ([(3, blocks)])


def engine() -> Iterator[tuple[str, bool]]:
    """(what, whether it is right) of the whole engine on a tiny model in a folder."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from byte_model import greedy, prompt, save_byte_model

    from localpaged import LLM, SamplingParams

    folder = Path(tempfile.mkdtemp())
    reference = save_byte_model(folder)
    llm = LLM(str(folder), dtype="float32", block_size=8, max_num_seqs=8, kv_cache_memory=64 << 20)
    prompts = [prompt(length, length) for length in (1, 8, 40)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    answers = [greedy(reference, given["prompt_token_ids"], 20) for given in prompts]
    yield "greedy equals transformers", [output.outputs[0].token_ids for output in outputs] == answers
    params = SamplingParams(n=4, seed=3, max_tokens=30, ignore_eos=True)
    once, again = (llm.generate([prompt(50)], params)[0].outputs for _ in range(2))
    yield "a seed repeats four candidates", [o.token_ids for o in once] == [o.token_ids for o in again]
    yield "the four differ", len({tuple(o.token_ids) for o in once}) == 4
    stats = llm.kv_stats()
    yield "the pool adds up", bool(stats["consistent"]) and stats["referenced"] == 0
